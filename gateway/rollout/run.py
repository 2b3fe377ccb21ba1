"""Runs one round of a rollout: sends the batch to the fleet and gathers answers and rows.  The command's event loop.

A request is complete when its last token has arrived.  The longest request that waits is sent first, so that those which are
left for the end of the round are short.  The round ends when all workers that live have sent their rows.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Sequence
from copy import copy

from backend.config.sources import CommandError, Say
from backend.engine.client import engine_request
from backend.engine.front import EngineCoreOutputs, RequestOutput, SamplingParams
from backend.engine.front.client import Outputs
from backend.records.rows import RequestRow
from backend.rollout.outcome import RoundResult
from backend.rollout.requests import RolloutRequest
from gateway.admission.claim import Claim, enter_claim
from gateway.fleet.sequences import InFlight
from gateway.rollout.fleet import RolloutFleet

TEND_S = 1.0
"""Seconds between two fetches of rows."""
LOOK_S, SAY_S = 0.2, 15.0
"""Seconds between two looks at the fleet while no output comes, and between two lines on progress."""
ENDS = ("stop", "length", "repetition")
"""Finish reasons of vLLM's with which a response is complete."""
NOBODY_S = 600.0
"""Seconds that a round waits when no verifier is left, for Ray to start another."""


class RoundRunner:
    """Runs one round; each round needs a new one."""

    def __init__(
        self,
        number: int,
        requests: Sequence[RolloutRequest],
        fleet: RolloutFleet,
        responses: Outputs,
        say: Say,
        seed: int | None = None,
    ) -> None:
        """`seed` is for free responses whose parameters have none; with None, they are not reproducible."""
        self._round = RoundResult(number)
        self._requests = requests
        self._fleet, self._core = fleet, fleet.core
        self._responses = responses
        self._say = say
        self._seed = seed
        self._waiting = sorted(requests, key=lambda each: (each.expected, -each.number))
        """The next one is the last."""
        self._running: dict[str, tuple[RolloutRequest, InFlight]] = {}
        self._numbers: dict[str, int] = {}
        """Request number by id, for each time that a request was sent."""
        self._tokens = 0
        self._next_tend = self._next_progress = self._busy_at = 0.0

    async def run(self) -> RoundResult:
        """Returns when every request is complete.  Raises `CommandError`."""
        fleet = self._fleet
        await asyncio.gather(*fleet.take_rows(), return_exceptions=True)  # of the time before: the round's begin now
        fleet.begin(self._round.number)
        self._busy_at = fleet.began
        self._next_progress = fleet.began + SAY_S
        while len(self._round.responses) < len(self._requests):
            while self._waiting and (verifier_id := self._least_loaded()) is not None:
                await self._send(self._waiting.pop(), verifier_id)
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._take(await self._core.get_output_async())
            except TimeoutError:
                pass
            self._look_after(time.monotonic())
        await asyncio.gather(*fleet.take_rows(), return_exceptions=True)
        self._look_after(time.monotonic())
        self._round.parts = [fleet.parts[number] for number in sorted(fleet.parts)]
        self._round.deaths = fleet.deaths
        self._round.settle(self._numbers)
        return self._round

    def _least_loaded(self) -> str | None:
        """Of the verifiers with room, the one with the fewest expected tokens left."""
        core = self._core
        with_room = [link for link in core.routable_links() if core.sequences.placed(link.member.id) < self._fleet.window]
        left = dict.fromkeys(sorted(link.member.id for link in with_room), 0)
        for request, record in self._running.values():
            if record.link is not None and record.link.member.id in left:
                left[record.link.member.id] += max(1, request.expected - len(record.emitted))
        return min(left, key=left.__getitem__, default=None)

    async def _send(self, request: RolloutRequest, verifier_id: str) -> None:
        # Unlike any that gateways of the fleet have.
        request_id = f"{self._core.gateway_id}/{self._round.number}/{request.number}"
        made = engine_request(request_id, request.prompt, self._params(request), external_req_id=request_id)
        self._responses.add_request(made, None)
        enter_claim(Claim(target=verifier_id, patient=True))
        await self._core.add_request_async(made)
        record = self._core.sequences.get(request_id)
        assert record is not None
        self._running[request_id] = request, record

    def _params(self, request: RolloutRequest) -> SamplingParams:
        params = copy(request.params)
        params.seed = request.seed
        if request.fixed is None and request.seed is None and self._seed is not None:
            params.seed = zlib.crc32(f"{self._seed}/{self._round.number}/{request.number}".encode())
        return params

    async def _take(self, outputs: EngineCoreOutputs) -> None:
        processed = self._responses.process_outputs(outputs.outputs)
        for response in processed.request_outputs:
            assert isinstance(response, RequestOutput)
            self._end(response)
        # Verifiers know nothing of stop strings.
        await self._core.abort_requests_async(processed.reqs_to_abort)

    def _end(self, response: RequestOutput) -> None:
        """Handles the end of a response: its last token has arrived."""
        request, record = self._running.pop(response.request_id)
        (output,), verifier = response.outputs, record.claim.verifier or ""
        where = f"row {request.case.number}: {verifier}"
        if output.finish_reason not in ENDS:
            raise CommandError(f"{where} refused the request ({output.finish_reason})")
        if request.fixed is not None and output.token_ids != request.fixed:
            raise CommandError(f"{where} did not keep to the response")
        ids = [response.request_id, *(f"{response.request_id}~{place}" for place in range(2, record.places + 1))]
        self._numbers |= dict.fromkeys(ids, request.number)
        since, tokens, last_at = time.time() - time.monotonic(), len(output.token_ids), record.last_token or time.monotonic()
        times = (since + record.arrived, since + (record.first_token or last_at), since + last_at)
        row = RequestRow(
            str(request.number), *times, len(request.prompt), tokens, 0, 0, 0, output.finish_reason, request.fixed is not None
        )
        self._fleet.part(verifier).requests.append(row)
        self._round.responses[request.number] = response
        self._round.wall_s = max(self._round.wall_s, last_at - self._fleet.began)
        self._tokens += tokens

    def _look_after(self, now: float) -> None:
        for part in self._fleet.parts.values():
            if part.rows.lost:
                lost = f"verifier-{part.number} lost {part.rows.lost} rows"
                raise CommandError(f"{lost}: they came faster than they could be fetched")
        if now >= self._next_tend:
            self._next_tend = now + TEND_S
            self._fleet.take_rows()
        if self._core.ready_links:
            self._busy_at = now
        elif now - self._busy_at > NOBODY_S:
            raise CommandError(f"no verifier is left, and none has come back for {NOBODY_S:g} s")
        if now >= self._next_progress:
            self._next_progress = now + SAY_S
            done = f"round {self._round.number}: {len(self._round.responses)} of {len(self._requests)} requests"
            tokens = self._tokens + sum(len(record.emitted) for _, record in self._running.values())
            self._say(f"{done}, {tokens} tokens, {tokens / (now - self._fleet.began):.0f} tokens/s")
