"""A round against verifiers without engines: all requests complete, whoever dies, aborts or keeps its rows to itself."""

import asyncio
from collections import Counter

import pytest
from vllm.v1.engine import FinishReason

from backend.config.sources import CommandError, ConfigError
from backend.engine.client import fixed_sampling
from backend.rollout.outcome import RoundResult
from backend.rollout.requests import RolloutRequest
from backend.rollout.trace import Case
from backend.wire.engine import PAUSED
from tests.support.fake_verifier import FakeVerifier, Sequence, eventually
from tests.support.rollout_workers import Workers, respond, run, stall, step_row

LENGTHS = [3, 8, 1, 12, 5, 7, 2, 6]


def requests() -> list[RolloutRequest]:
    made = []
    for number, length in enumerate(LENGTHS):
        tokens = [100 * number + j for j in range(length)]
        params = fixed_sampling(tokens, 0.0)
        made.append(RolloutRequest(number, Case(number, f"p{number}", "g"), [1, 2, number], tokens, params, length))
    return made


async def play(workers: Workers, window: int = 3) -> RoundResult:
    async with workers.joined(window) as fleet:
        return await run(fleet, requests())


def check(finished: RoundResult) -> None:
    """Every response is there once, and the rows of the workers tell the same story."""
    wanted = requests()
    assert {number: finished.tokens(number) for number in finished.responses} == {each.number: each.fixed for each in wanted}
    owned = [int(row.request_id) for part in finished.parts for row in part.requests]
    assert sorted(owned) == list(range(len(wanted))), "every request ended at one worker"
    emitted, verified = Counter[int](), Counter[int]()
    for row in (row for part in finished.parts for row in part.rows.verifications):
        emitted[int(row.request_id)] += row.tokens
        verified[int(row.request_id)] += 1
    for ended in (row for part in finished.parts for row in part.requests):
        number = int(ended.request_id)
        assert (ended.tokens, ended.verifications) == (len(finished.tokens(number)), verified[number])
        # A verifier that died may have kept rows to itself.
        assert emitted[number] == ended.tokens or (finished.deaths and emitted[number] < ended.tokens)


async def test_a_drained_worker_gives_back_its_requests_and_all_its_rows_before_it_ends(workers: Workers) -> None:
    workers.start("verifier-0", respond)
    drained = workers.start("verifier-1", stall)

    def drain_once_busy() -> None:
        at = [each for each in workers.fleet.core.sequences if each.link is not None and each.link.member.id == "verifier-1"]
        if sum(bool(each.emitted) for each in at) == 3:
            workers.states["verifier-1"] = "draining"
        if drained.sequences and all(sequence.aborted.is_set() for sequence in drained.sequences):
            workers.verifiers.pop("verifier-1", drained).kill()

    workers.on_look = drain_once_busy
    finished = await play(workers)
    check(finished)
    (left,) = finished.deaths
    assert (left.worker, left.reason, left.requests_resumed) == (1, "was drained", 3)
    verified = sum(row.tokens for part in finished.parts for row in part.rows.verifications)
    assert verified == sum(LENGTHS), "no row is missing, and no token was computed twice"


async def test_steps_are_counted_by_incarnation(workers: Workers) -> None:
    """One that is reached again has gone on counting; one that was started again has begun anew."""
    workers.start("verifier-0", respond)
    async with workers.joined() as fleet:

        async def shown(step: int) -> int:
            await eventually(lambda: bool(fleet.core.ready_links))
            workers.verifiers["verifier-0"].rows.steps.append(step_row(step))
            await asyncio.gather(*fleet.take_rows())
            fleet.core.links["verifier-0"].close()
            return fleet.part("verifier-0").rows.steps[-1].step

        assert [await shown(600), await shown(601)] == [600, 601]
        workers.kill("verifier-0")
        workers.start("verifier-0", respond)
        assert [await shown(0), await shown(1)] == [602, 603]


async def test_a_starved_worker_stays(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease runs out while it answers; one that says nothing is gone."""
    verifier = workers.start("verifier-0", respond)
    async with workers.joined() as fleet:
        looks: list[bool] = []
        workers.states["verifier-0"], workers.on_look = "lost", lambda: looks.append(True)
        await eventually(lambda: len(looks) > 2)
        assert fleet.core.ready_links
        assert not fleet.deaths
        verifier.hung = True
        monkeypatch.setattr("gateway.fleet.verifiers.FRESH_S", 0.0)
        await eventually(lambda: not fleet.core.links)
        assert [death.reason for death in fleet.deaths] == ["was lost"]


async def test_the_only_worker_comes_back(workers: Workers) -> None:
    doomed = workers.start("verifier-0", stall)

    def restart_once_busy() -> None:
        if workers.verifiers["verifier-0"] is doomed and workers.fleet.part("verifier-0").rows.steps:
            workers.kill("verifier-0")
            workers.start("verifier-0", respond)

    workers.on_look = restart_once_busy
    finished = await play(workers)
    check(finished)
    (death,) = finished.deaths
    (part,) = finished.parts
    died = min(row.arrived_at for row in part.requests) + death.at_s
    assert any(row.first_token_at < died < row.ended_at for row in part.requests), "first tokens are of the dead one"
    for rows in (part.rows.steps, part.rows.verifications):
        steps = [row.step for row in rows]
        assert steps[0] == 0, "all that the first one had was the first step of its requests"
        assert 0 not in steps[steps.index(1) :], "steps of one worker never go back"


@pytest.mark.parametrize("stop_reason", [None, PAUSED])
async def test_an_aborted_request_is_sent_again(workers: Workers, stop_reason: str | None) -> None:
    """Though it was aborted at more verifiers than another request may be, or by a pause that ends requests."""

    async def abort_first(verifier: FakeVerifier, sequence: Sequence) -> None:
        if sequence.request_id.endswith("~4"):
            await respond(verifier, sequence)
        else:
            sequence.emit([], FinishReason.ABORT, stop_reason)

    verifier = workers.start("verifier-0", abort_first)
    check(await play(workers))
    assert len(verifier.sequences) == 4 * len(LENGTHS)


async def test_the_longest_request_goes_first_to_whoever_has_the_least_left(workers: Workers) -> None:
    begun: list[tuple[int, str]] = []

    async def wait(verifier: FakeVerifier, sequence: Sequence) -> None:
        begun.append((int(sequence.request_id.rpartition("/")[2]), verifier.name))
        await eventually(lambda: len(begun) >= 6)
        await respond(verifier, sequence)

    for name in ("verifier-0", "verifier-1"):
        workers.start(name, wait)
    check(await play(workers))
    firsts = {name: [number for number, where in begun[:6] if where == name] for name in workers.verifiers}
    # Of 12, 8, 7, 6, 5 and 3 tokens: 12, 6 and 3, and 8, 7 and 5.
    assert firsts == {"verifier-0": [3, 7, 0], "verifier-1": [1, 5, 4]}


@pytest.mark.parametrize(
    ("emitted", "reason", "lost", "complaint"),
    [
        ([], FinishReason.ERROR, 0, r"row \d: verifier-0 refused the request"),
        ([7], FinishReason.LENGTH, 0, r"row \d: verifier-0 did not keep to the response"),
        (None, None, 3, "verifier-0 lost 3 rows"),
    ],
)
async def test_what_must_not_happen_ends_the_rollout(
    workers: Workers, emitted: list[int] | None, reason: FinishReason, lost: int, complaint: str
) -> None:
    async def misbehave(verifier: FakeVerifier, sequence: Sequence) -> None:
        verifier.rows.lost = lost
        if emitted is None:
            await respond(verifier, sequence)
        else:
            sequence.emit(emitted, reason)

    workers.start("verifier-0", misbehave)
    with pytest.raises(CommandError, match=complaint):
        await play(workers)
    async with workers.joined() as fleet:
        with pytest.raises(ConfigError, match=r"verifier-0 takes no fixed responses: .*\"async_scheduling\": false"):
            fleet.check_fixed()
