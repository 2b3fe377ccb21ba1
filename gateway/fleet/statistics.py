"""Speculation statistics of one request.  Every verifier that ran one of its sequences sends an account; the answer shows them.

Runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from backend.wire.engine import Account, RequestOptions, Tally

if TYPE_CHECKING:
    from gateway.fleet.sequences import InFlight

ACCOUNT_WAIT_S = 1.0
"""Seconds that an answer waits for missing accounts.  If the gateway ended a sequence at a stop string, its account comes only
after the running step."""
_LAST = ('"choices":[]', '"type":"message_delta"')
"""One of these occurs in the chunk with the usage and in no other: inside generated text the quotes would be escaped."""
MoveKind = Literal["failover", "migration"]


@dataclass
class Cut:
    """Why and when a sequence was taken from its verifier.  Kept until its next token."""

    kind: MoveKind
    cause: str
    at: float
    """Monotonic seconds."""


@dataclass
class SequenceStatistics:
    """The accounts and moves of one sequence."""

    record: InFlight
    accounts: list[Account] = field(default_factory=list)
    moves: list[Cut] = field(default_factory=list)
    awaited: list[asyncio.Future[None]] = field(default_factory=list)
    """One for each verifier that it was given to; done when the account from there has come, or will never come."""

    def tallies(self) -> list[Tally]:
        """The sums over all verifiers, one for each source and drafter."""
        found: dict[tuple[str, str], Tally] = {}
        for each in (tally for account in self.accounts for tally in account.tallies):
            known = found.setdefault((each.source, each.drafter), Tally(each.source, each.drafter))
            known.drafts += each.drafts
            known.drafted += each.drafted
            known.accepted += each.accepted
        return list(found.values())

    def body(self, index: int, mode: str) -> dict[str, Any]:
        """The statistics as the answer shows them."""
        record, accounts, tallies = self.record, self.accounts, self.tallies()
        emitted, known = record.emitted_tokens, sum(account.tokens for account in accounts)
        verifications = sum(account.verifications for account in accounts)
        lengths: Counter[int] = Counter()
        for account in accounts:
            lengths.update(dict(enumerate(account.accepted_lengths)))
        first, last = record.first_token or 0.0, record.last_token or 0.0
        return {
            "index": index,
            "mode": mode,
            "rule": next((account.rule for account in accounts if account.rule), None),
            "tokens": emitted,
            "unaccounted_tokens": max(emitted - known, 0),
            "tokens_per_second": round((emitted - 1) / (last - first), 3) if last > first else None,
            "verifications": verifications,
            "tokens_per_verification": round(known / verifications, 3) if verifications else None,
            "drafted": sum(tally.drafted for tally in tallies),
            "accepted": sum(tally.accepted for tally in tallies),
            "accepted_lengths": [lengths[length] for length in range(max(lengths, default=-1) + 1)],
            "sources": msgspec.to_builtins(tallies),
            "waited_s": round(sum(account.waited_s for account in accounts), 6),
            "moves": [{"kind": cut.kind, "cause": cut.cause} for cut in self.moves],
        }


@dataclass
class SpeculationOptions:
    """One request's options for speculation, and its sequences."""

    options: RequestOptions
    stats: bool
    mode: str
    """The fleet's mode."""
    statistics: dict[int, SequenceStatistics] = field(default_factory=dict)

    def follow(self, record: InFlight, request_id: str, prompt_id: str, choices: int) -> SequenceStatistics | None:
        """The statistics of a sequence that is about to be submitted, if they are needed.

        vLLM's `request_id` begins with the choice's number if there are several; its `prompt_id` may end with the prompt's.
        """
        if not self.options.account:
            return None
        index = int(request_id.partition("_")[0]) if choices > 1 else 0
        index += int(prompt_id.rpartition("-")[2]) * choices if prompt_id.startswith("cmpl-") else 0
        self.statistics[index] = SequenceStatistics(record)
        return self.statistics[index]

    async def add_to(self, body: dict[str, Any]) -> dict[str, Any]:
        """Waits for accounts, then puts the statistics into an answer or a stream's last chunk."""
        if not self.options.account:
            return body
        if awaited := [each for statistics in self.statistics.values() for each in statistics.awaited]:
            # Tokens of accounts that do not come in time are shown as `unaccounted_tokens`.
            await asyncio.wait(awaited, timeout=ACCOUNT_WAIT_S)
        if self.options.prediction and isinstance(usage := body.get("usage"), dict):
            predicted = [t for statistics in self.statistics.values() for t in statistics.tallies() if t.source == "prediction"]
            emitted_tokens = sum(statistics.record.emitted_tokens for statistics in self.statistics.values())
            # A verifier hears of a stop string only after its tokens.
            accepted = min(sum(tally.accepted for tally in predicted), emitted_tokens)
            usage["completion_tokens_details"] = {
                **(usage.get("completion_tokens_details") or {}),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(tally.drafted for tally in predicted) - accepted,
            }
        if self.stats:
            mode = self.mode if self.options.mode == "auto" else self.options.mode
            body["outrider"] = {"choices": [each.body(index, mode) for index, each in sorted(self.statistics.items())]}
        return body

    async def add_to_chunk(self, chunk: str) -> str:
        """A stream's chunk; that with the usage gets the statistics."""
        if not any(last in chunk for last in _LAST):
            return chunk
        name, _, data = chunk.partition("data: ")
        body = await self.add_to(json.loads(data))
        return f"{name}data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
