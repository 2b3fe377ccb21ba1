"""What one request is told of speculation: its sequences' accounts, from every verifier they ran at, put into the answer.

The gateway's event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backend.wire.engine import Account, Asked, Tally

if TYPE_CHECKING:
    from gateway.engine_link import VerifierLink
    from gateway.in_flight import Cut, InFlight

ACCOUNT_WAIT_S = 1.0
"""How long an answer waits for the account of a sequence that the gateway has ended, by a stop string: it comes after the step
that runs."""
_LAST = '"choices":[]'
"""Stands in the chunk with the usage and in no other; in text, its quotes would be escaped."""


@dataclass
class Told:
    """What is known of one sequence."""

    record: InFlight
    asked: Asked
    accounts: list[Account] = field(default_factory=list)
    moves: list[Cut] = field(default_factory=list)
    _awaited: set[str] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def placed(self, place_id: str, cut: Cut | None) -> None:
        """It goes to a verifier under this id; `cut`: what it comes from another by."""
        self._awaited.add(place_id)
        if cut is not None:
            self.moves.append(cut)

    def came(self, account: Account) -> None:
        """A verifier's account."""
        self.accounts.append(account)
        self.lost(account.request_id)

    def lost(self, place_id: str) -> None:
        """That verifier's account will not come any more."""
        self._awaited.discard(place_id)
        self._changed.set()

    async def complete(self) -> None:
        """Waits for every account that will come."""
        while self._awaited:
            self._changed.clear()
            await self._changed.wait()

    def tallies(self) -> list[Tally]:
        """Of all verifiers together, by source and drafter."""
        found: dict[tuple[str, str], Tally] = {}
        for each in (tally for account in self.accounts for tally in account.tallies):
            known = found.setdefault((each.source, each.drafter), Tally(each.source, each.drafter))
            known.drafts += each.drafts
            known.drafted += each.drafted
            known.accepted += each.accepted
        return list(found.values())

    def body(self, index: int, mode: str) -> dict[str, Any]:
        """As the answer shows it; `mode`: the fleet's."""
        record, accounts, tallies = self.record, self.accounts, self.tallies()
        emitted, known = record.said, sum(account.tokens for account in accounts)
        verifications = sum(account.verifications for account in accounts)
        lengths: Counter[int] = Counter()
        for account in accounts:
            lengths.update(dict(enumerate(account.accepted_lengths)))
        first, last = record.first_token or 0.0, record.last_token or 0.0
        return {
            "index": index,
            "mode": mode if self.asked.mode == "auto" else self.asked.mode,
            "tokens": emitted,
            "unaccounted_tokens": max(emitted - known, 0),
            "tokens_per_second": round((emitted - 1) / (last - first), 3) if last > first else None,
            "verifications": verifications,
            "tokens_per_verification": round(known / verifications, 3) if verifications else None,
            "drafted": sum(tally.drafted for tally in tallies),
            "accepted": sum(tally.accepted for tally in tallies),
            "accepted_lengths": [lengths[length] for length in range(max(lengths, default=-1) + 1)],
            "sources": [
                {"source": t.source, "drafter": t.drafter, "drafts": t.drafts, "drafted": t.drafted, "accepted": t.accepted}
                for t in tallies
            ],
            "waited_s": round(sum(account.waited_s for account in accounts), 6),
            "moves": [{"kind": cut.kind, "cause": cut.cause} for cut in self.moves],
        }


class Awaited:
    """Accounts that are to come, by the id at the verifier: one for every sequence, also for those that are aborted."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[VerifierLink, Told]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def placed(self, record: InFlight, link: VerifierLink) -> None:
        """A sequence was given to a verifier."""
        told = record.told
        if told is not None and told.asked.account:
            told.placed(record.place_id, record.cut)
            self._places[record.place_id] = link, told

    def came(self, accounts: Sequence[Account]) -> None:
        """A verifier has sent some."""
        for account in accounts:
            _, told = self._places.pop(account.request_id, (None, None))
            if told is not None:
                told.came(account)

    def ended(self, place_id: str) -> None:
        """It is over there: an account would have come before, so the verifier has not taken the request in."""
        _, told = self._places.pop(place_id, (None, None))
        if told is not None:
            told.lost(place_id)

    def lost(self, link: VerifierLink) -> None:
        """That verifier sends no more."""
        for place_id in [place_id for place_id, (at, _) in self._places.items() if at is link]:
            self.ended(place_id)


@dataclass
class Inquiry:
    """One request that asks something of its own."""

    asked: Asked
    stats: bool
    mode: str
    """The fleet's."""
    choices: int = 1
    """Of each prompt."""
    told: dict[int, Told] = field(default_factory=dict)

    def follow(self, record: InFlight) -> Told:
        """A sequence of this request is about to be submitted."""
        told = Told(record, self.asked)
        if self.asked.account:
            self.told[self._index(record)] = told
        return told

    def _index(self, record: InFlight) -> int:
        """Its choice's: vLLM numbers a prompt's choices by a prefix, and the prompts of a text completion by a suffix."""
        request_id, prompt = record.request.request_id, record.request.external_req_id or ""
        choice = int(request_id.partition("_")[0]) if self.choices > 1 else 0
        return (int(prompt.rpartition("-")[2]) * self.choices if prompt.startswith("cmpl-") else 0) + choice

    async def add_to(self, body: dict[str, Any]) -> dict[str, Any]:
        """Puts what was asked for into an answer, or into the last chunk of one."""
        if not self.asked.account:
            return body
        accounts = asyncio.gather(*(told.complete() for told in self.told.values()))
        try:
            await asyncio.wait_for(accounts, ACCOUNT_WAIT_S)
        except TimeoutError:
            # What is missing is shown as tokens that nobody accounts for.
            pass
        if self.asked.prediction and isinstance(usage := body.get("usage"), dict):
            predicted = [t for told in self.told.values() for t in told.tallies() if t.source == "prediction"]
            accepted = sum(tally.accepted for tally in predicted)
            usage["completion_tokens_details"] = {
                **(usage.get("completion_tokens_details") or {}),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(tally.drafted for tally in predicted) - accepted,
            }
        if self.stats:
            body["outrider"] = {"choices": [told.body(index, self.mode) for index, told in sorted(self.told.items())]}
        return body

    async def add_to_stream(self, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """The chunks; that of the usage with what was asked for."""
        try:
            async for chunk in chunks:
                if _LAST not in chunk:
                    yield chunk
                    continue
                body = await self.add_to(json.loads(chunk.removeprefix("data: ")))
                yield f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
        finally:
            await chunks.aclose()
