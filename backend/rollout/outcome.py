"""The results of a round, before they become tables and a report.  Pure data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from backend.records.kept import RowBatch
from backend.records.rows import RequestRow, VerificationRow

if TYPE_CHECKING:
    from backend.engine.front import RequestOutput


class Death(msgspec.Struct, frozen=True):
    """A worker that was lost or drained during a round."""

    worker: int
    reason: str
    at_s: float
    """Seconds into the round."""
    requests_resumed: int
    """Number of its requests that other workers took over."""


@dataclass(eq=False)
class WorkerShare:
    """One worker's share of a round.  A verifier that died and was started again counts as one worker."""

    number: int
    rows: RowBatch = field(default_factory=RowBatch)
    """Steps and verifications that ran here."""
    requests: list[RequestRow] = field(default_factory=list)
    """Requests that ended here, as the client saw them; `RoundResult.settle` counts their verifications."""


@dataclass
class RoundResult:
    """The results of one round."""

    number: int
    wall_s: float = 0.0
    """Seconds from the start of the round to the last token."""
    parts: list[WorkerShare] = field(default_factory=list)
    """In order of worker numbers."""
    responses: dict[int, RequestOutput] = field(default_factory=dict)
    """By request number."""
    deaths: list[Death] = field(default_factory=list)

    def tokens(self, number: int) -> Sequence[int]:
        """A response's tokens."""
        tokens: Sequence[int] = self.responses[number].outputs[0].token_ids
        return tokens

    def settle(self, numbers: Mapping[str, int]) -> None:
        """Makes the rows of all workers those of this round: `numbers` has the request number of each id that was sent.

        Afterwards `request_id` is the request's number.  Counts of a request are sums over all workers; rows that a verifier
        had not sent before it died are missing from them.  Idle time before a worker's first step is not of the round.
        """
        made: defaultdict[str, list[VerificationRow]] = defaultdict(list)
        for part in self.parts:
            own = [row for row in part.rows.verifications if row.request_id in numbers]
            part.rows.verifications = [replace(row, request_id=str(numbers[row.request_id])) for row in own]
            part.rows.steps[:1] = [replace(row, interval_ms=0.0, idle_ms={}) for row in part.rows.steps[:1]]
            for row in part.rows.verifications:
                made[row.request_id].append(row)
        for part in self.parts:
            part.requests = [_counted(row, made[row.request_id]) for row in part.requests]


def _counted(row: RequestRow, verifications: Sequence[VerificationRow]) -> RequestRow:
    return replace(
        row,
        verifications=len(verifications),
        draft_tokens=sum(each.draft_tokens for each in verifications),
        accepted=sum(each.accepted for each in verifications),
    )
