"""The gateway's core as a rollout has it: it also gathers verifiers' rows, and notes who is lost.  The command's event loop.

A verifier that is started again, reached again, or takes requests again is the same worker of the round, by its number.
"""

import asyncio
import json
import math
import time
from collections.abc import Sequence

from msgspec.structs import replace

from backend.config import Settings
from backend.config.sources import ConfigError, Say
from backend.engine.front import EngineCoreOutput, EngineCoreRequest
from backend.fleet import FleetSnapshot
from backend.records.kept import RowBatch
from backend.rollout.options import NEEDED_BY_FIXED
from backend.rollout.outcome import Death, WorkerShare
from backend.transport.sockets import Wire
from backend.wire.engine import PAUSED
from gateway.admission.claim import Claim, enter_claim
from gateway.fleet.core import FleetCore
from gateway.fleet.directory import Directory
from gateway.fleet.engine_link import Cause, VerifierLink
from gateway.fleet.sequences import InFlight
from gateway.metrics.gateway import GatewayMetrics

START_S = 120.0
"""Seconds that the verifiers may take to answer before the first round."""
LOOK_S = 0.05
STARVED_S = 10.0
"""Seconds.  A verifier whose lease has expired may merely be starved of CPU time.  It is kept while its last message is not
older."""


class RolloutCore(FleetCore):
    """Gives each request to the verifier with the fewest expected tokens left, and refuses none, whoever dies under it."""

    wants_rows = True
    silence_limit_s = 60.0

    def __init__(self, directory: Directory, wire: Wire, settings: Settings, say: Say) -> None:
        super().__init__(directory, wire, GatewayMetrics(), settings)
        # The round decides how long its requests wait for a verifier.
        self.gate.limit(1, math.inf)
        self._say = say
        self._window = settings.verifier.max_num_seqs
        self._expected: dict[str, int] = {}
        """Expected tokens of the round's responses, by request id."""
        self._awaited: dict[VerifierLink, asyncio.Future[None]] = {}
        """Verifiers that were asked for rows."""
        self._drained: set[str] = set()
        """Incarnations."""
        self._next_step: dict[str, int] = {}
        self._first_step: dict[str, int] = {}
        """What is added to an incarnation's step numbers, so that they go on after those of the incarnation before."""
        self.begin(0)

    def begin(self, number: int) -> None:
        """Rows, losses and requests are of round `number` from now on."""
        self.number, self.began = number, time.monotonic()
        self.deaths: list[Death] = []
        self.parts: dict[int, WorkerShare] = {}
        for link in self.ready_links:
            self.part(link.member.id)
        self._expected.clear()

    def part(self, verifier_id: str) -> WorkerShare:
        """A verifier's share of the round."""
        return self.parts.setdefault(number := _number(verifier_id), WorkerShare(number))

    @property
    def version(self) -> str:
        """Version of the weights that the verifiers run; several versions if they differ."""
        return ", ".join(sorted({link.weights.version for link in self.ready_links}))

    async def until_complete(self) -> None:
        """Waits until all verifiers of the fleet have answered, up to `START_S`."""
        try:
            async with asyncio.timeout(START_S):
                while self.snapshot is None or not self.links or len(self.ready_links) < len(self.links):
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            pass

    def check_fixed(self) -> None:
        """Raises `ConfigError` if a verifier takes no fixed responses."""
        for link in self.ready_links:
            if link.welcome is not None and not link.welcome.fixed_responses:
                needed = json.dumps(NEEDED_BY_FIXED)
                raise ConfigError(f"{link.member.id} takes no fixed responses: serve it with --verifier-engine-args '{needed}'")

    # Requests

    def has_room(self) -> bool:
        """Whether some verifier runs fewer requests than it may."""
        return any(self.sequences.placed(link.member.id) < self._window for link in self.routable_links())

    async def submit(self, request: EngineCoreRequest, expected: int) -> InFlight:
        """Sends a request whose response probably has `expected` tokens; there must be room."""
        enter_claim(Claim())
        self._expected[request.request_id] = expected
        await self.add_request_async(request)
        record = self.sequences.get(request.request_id)
        assert record is not None
        return record

    def _choose(self, record: InFlight, without: VerifierLink | None = None, target: str | None = None) -> VerifierLink | None:
        links = [link for link in self.routable_links() if link is not without and record.fits(link)]
        return min(links, key=self._load, default=None)

    def _load(self, link: VerifierLink) -> tuple[bool, int, str]:
        left = (max(1, self._expected[each.request.request_id] - len(each.emitted)) for each in self.sequences.at(link))
        return self.sequences.placed(link.member.id) >= self._window, sum(left), link.member.id

    def _take(self, link: VerifierLink, output: EngineCoreOutput, now: float) -> bool:
        if output.stop_reason == PAUSED:
            # It goes on after the pause, as one that was given up does.
            output.stop_reason = None
        return super()._take(link, output, now)

    def _fail_over(self, records: Sequence[InFlight], cause: str, died: bool = False) -> None:
        # Over hours, several verifiers may be lost under a request that is no reason for it.
        super()._fail_over(records, cause)

    def share(self, record: InFlight) -> None:
        """Nothing: a rollout's figures are those of its own prompts."""

    # Verifiers that leave

    def is_fresh(self, link: VerifierLink) -> bool:
        return link.answers(STARVED_S)

    def look(self, snapshot: FleetSnapshot) -> None:
        """A drained verifier's requests go on at the others, and its rows are fetched."""
        states = {view.member.incarnation: view.member.state for view in snapshot.members}
        leaving = [link for link in self.ready_links if states.get(link.member.incarnation) == "draining"]
        requests = {link: self.sequences.at(link) for link in leaving}
        super().look(snapshot)
        for link in leaving:
            self.migrate([record for record in requests[link] if record.link is link], None, "drain")
            if link.member.incarnation not in self._drained:
                self._note_death(link, "was drained", sum(record.link is not link for record in requests[link]))
                self._ask(link)
                self._drained.add(link.member.incarnation)
        self._drained -= {incarnation for incarnation, state in states.items() if state == "ready"}

    def on_lost(self, link: VerifierLink, cause: Cause, died: bool) -> None:
        self._answered(link)
        if link.welcome is not None and cause != "closed" and link.member.incarnation not in self._drained:
            silent = f"was silent for {self.silence_limit_s:g} s"
            self._note_death(link, silent if cause == "silent" else "was lost", len(self.sequences.at(link)))
        super().on_lost(link, cause, died)

    def on_forgotten(self, link: VerifierLink) -> None:
        self._answered(link)
        super().on_forgotten(link)

    def _note_death(self, link: VerifierLink, reason: str, requests: int) -> None:
        self.deaths.append(Death(_number(link.member.id), reason, time.monotonic() - self.began, requests))
        self._say(f"{link.member.id} {reason} in round {self.number}; {requests} requests go on elsewhere")

    # Rows

    def ask_rows(self) -> None:
        """Asks all verifiers for their rows that have answered the last time."""
        for link in self.ready_links:
            if link not in self._awaited:
                self._ask(link)

    async def gather_rows(self) -> None:
        """Returns when all verifiers have sent the rows that they have now, or are lost."""
        for _ in range(2):
            # An answer that is on its way may be of the time before this call.
            self.ask_rows()
            await asyncio.gather(*self._awaited.values())

    def on_ready(self, link: VerifierLink) -> None:
        self._first_step.setdefault(link.member.incarnation, self._next_step.get(link.member.id, 0))
        self.part(link.member.id)
        super().on_ready(link)

    def on_rows(self, link: VerifierLink, rows: RowBatch) -> None:
        name, first = link.member.id, self._first_step[link.member.incarnation]
        if first:
            rows.steps = [replace(row, step=row.step + first) for row in rows.steps]
            rows.verifications = [replace(row, step=row.step + first) for row in rows.verifications]
        if rows.steps:
            self._next_step[name] = rows.steps[-1].step + 1
        self.part(name).rows.add(rows)
        self._answered(link)

    def _ask(self, link: VerifierLink) -> None:
        self._awaited.setdefault(link, asyncio.get_running_loop().create_future())
        link.ask_rows()

    def _answered(self, link: VerifierLink) -> None:
        if (awaited := self._awaited.pop(link, None)) is not None:
            awaited.set_result(None)


def _number(verifier_id: str) -> int:
    """3 of `verifier-3`."""
    return int(verifier_id.rpartition("-")[2])
