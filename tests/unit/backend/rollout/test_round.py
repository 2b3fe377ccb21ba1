"""A round against verifiers without engines: all requests complete, whoever dies, aborts or keeps its rows to itself."""

from __future__ import annotations

import asyncio
import io
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from tqdm import tqdm
from vllm.v1.engine import FinishReason

from backend.config.sources import ConfigError
from backend.coordinator import CoordinatorUnavailable
from backend.engine.client import fixed_sampling
from backend.engine.front.offline import ResponseMaker
from backend.records.kept import RowBatch
from backend.records.rows import StepRow
from backend.rollout.outcome import RoundResult
from backend.rollout.requests import RolloutRequest
from backend.rollout.run import RolloutError, RoundRunner
from backend.rollout.trace import Case
from backend.rollout.workers import STARVED_S, Workers
from tests.support.fake_verifier import FakeVerifier, Sequence
from tests.support.rollout_fleet import Fleet, respond, run, stall

LENGTHS = [3, 8, 1, 12, 5, 7, 2, 6]


def requests() -> list[RolloutRequest]:
    made = []
    for number, length in enumerate(LENGTHS):
        tokens = [100 * number + j for j in range(length)]
        params = fixed_sampling(tokens, 0.0)
        made.append(RolloutRequest(number, Case(number, f"p{number}", "g"), [1, 2, number], tokens, params, length))
    return made


def play(fleet: Fleet, window: int = 3) -> RoundResult:
    return run(fleet, requests(), ResponseMaker(), window)


def check(finished: RoundResult, was_cut: bool = False) -> None:
    """Every response is there once, and the rows of the workers tell the same story."""
    wanted = requests()
    assert {number: finished.tokens(number) for number in finished.responses} == {each.number: each.fixed for each in wanted}
    owned = [int(row.request_id) for part in finished.parts for row in part.rows.requests]
    assert sorted(owned) == list(range(len(wanted))), "every request ended at one worker"
    emitted, verified = Counter[int](), Counter[int]()
    for row in (row for part in finished.parts for row in part.rows.verifications):
        emitted[int(row.request_id)] += row.tokens
        verified[int(row.request_id)] += 1
    for ended in (row for part in finished.parts for row in part.rows.requests):
        number = int(ended.request_id)
        assert (ended.tokens, ended.verifications) == (len(finished.tokens(number)), verified[number])
        # A verifier that died may have kept rows to itself; after a cut, one may have gone on before it knew.
        assert emitted[number] >= ended.tokens or finished.deaths
        assert emitted[number] <= ended.tokens or was_cut


def test_a_worker_that_dies_is_replaced_by_the_others(fleet: Fleet) -> None:
    fleet.start("verifier-0", respond)
    doomed = fleet.start("verifier-1", stall)

    def die_once_busy() -> None:
        if "verifier-1" in fleet.verifiers and doomed.sequences:
            fleet.kill("verifier-1")

    fleet.on_look = die_once_busy
    finished = play(fleet)
    check(finished)
    (death,) = finished.deaths
    assert (death.worker, death.reason, death.requests_resumed) == (1, "was lost", 3)
    assert all(not part.ended for part in finished.parts if part.number == 1)


def test_a_drained_worker_gives_back_its_requests_and_all_its_rows(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "tend", lambda workers: None)  # No rows are fetched before.
    fleet.start("verifier-0", respond)
    drained = fleet.start("verifier-1", stall)

    def drain_once_busy() -> None:
        if len(drained.rows.verifications) >= 3:
            fleet.states["verifier-1"] = "draining"

    fleet.on_look = drain_once_busy
    finished = play(fleet)
    check(finished)
    (left,) = finished.deaths
    assert (left.worker, left.reason, left.requests_resumed) == (1, "was drained", 3)
    assert all(sequence.aborted.is_set() for sequence in drained.sequences)
    verified = sum(row.tokens for part in finished.parts for row in part.rows.verifications)
    assert verified == sum(LENGTHS), "no row is missing, and no token was computed twice"


def test_steps_are_counted_by_incarnation(fleet: Fleet, workers: Workers) -> None:
    """One that takes requests again after a drain has gone on counting; one that was started again has begun anew."""

    def shown(step: int) -> int:
        workers.look()
        fleet.verifiers["verifier-0"].rows.steps.append(StepRow(step, 1.0, 1.0, 1, 0, 1, 1, 1, 4, 0, 1.0, 1.0, 2.0, {}))
        worker = workers.present["verifier-0"]
        fleet.states["verifier-0"] = "draining"
        assert workers.look() == ([], [(worker, "was drained")])
        del fleet.states["verifier-0"]
        return worker.rows.steps[-1].step

    fleet.start("verifier-0", respond)
    assert [shown(600), shown(601)] == [600, 601]
    fleet.kill("verifier-0")
    fleet.start("verifier-0", respond)
    assert [shown(0), shown(1)] == [602, 603]


def test_a_starved_worker_stays(fleet: Fleet, workers: Workers) -> None:
    """Its lease runs out while it answers; one that says nothing is gone."""
    fleet.start("verifier-0", respond)
    fleet.states["verifier-0"] = "lost"
    assert workers.look() == ([], []), "no new worker is begun with"
    del fleet.states["verifier-0"]
    (worker,), _ = workers.look()
    fleet.states["verifier-0"] = "lost"
    assert workers.look() == ([], [])
    worker.client.heard_at -= STARVED_S
    assert workers.look() == ([], [(worker, "was lost")])


def test_a_coordinator_that_knows_no_verifiers_yet_ends_no_worker(fleet: Fleet, workers: Workers) -> None:
    """It was restarted."""
    fleet.start("verifier-0", respond)
    (worker,), _ = workers.look()
    del fleet.verifiers["verifier-0"]
    assert workers.look() == ([], [])
    worker.client.heard_at -= STARVED_S
    assert workers.look() == ([], [(worker, "was lost")])


def test_fixed_responses_are_refused_where_a_verifier_takes_none(fleet: Fleet, workers: Workers) -> None:
    fleet.start("verifier-0", respond)
    workers.look()
    with pytest.raises(ConfigError, match=r"verifier-0 takes no fixed responses: .*\"async_scheduling\": false"):
        workers.check_fixed()


def test_a_rollout_that_was_silent_between_rounds_is_known_again(fleet: Fleet, workers: Workers) -> None:
    """Its lease has run out: it greets, and goes on; no verifier was lost in the round."""
    verifier = fleet.start("verifier-0", respond)
    workers.look()
    fleet.call(verifier.clients.clear)
    bar = tqdm(file=io.StringIO(), total=len(LENGTHS))
    finished = RoundRunner(1, requests(), workers, 3, ResponseMaker(), bar).run()
    check(finished)
    assert not finished.deaths


def test_requests_go_on_after_the_connection_was_cut(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier lives and is greeted again.  Tokens of running requests, and rows of ended ones, are lost meanwhile."""

    async def cut_first(verifier: FakeVerifier, sequence: Sequence) -> None:
        first, number = sequence.request.request_id.endswith("-1"), int(sequence.request.request_id.split("-")[1])
        await respond(verifier, sequence, upto=2 if first and number % 2 else None, with_row=not first)

    verifier = fleet.start("verifier-0", cut_first)
    cuts = 0

    def cut_once_busy() -> None:
        nonlocal cuts
        known = fleet.known("verifier-0")
        if known is not None and len(verifier.sequences) >= 3 and cuts < 3:
            cuts += 1
            monkeypatch.setattr(known.client.dealer, "was_cut", lambda: True)
            known.client.receive()

    fleet.on_look = cut_once_busy
    finished = play(fleet)
    check(finished, was_cut=True)
    assert {death.reason for death in finished.deaths} == {"was lost"}
    assert any(sequence.request_id.endswith("-2") for sequence in verifier.sequences)


def test_a_lost_worker_is_greeted_again_once_the_coordinator_would_know_of_its_death(
    fleet: Fleet, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backend.rollout.workers.SETTLED_S", 60.0)
    fleet.start("verifier-0", respond)
    (worker,), _ = workers.look()
    worker.client.is_cut = True
    assert workers.look() == ([], [(worker, "was lost")])
    assert workers.look() == ([], [])
    monkeypatch.setattr("backend.rollout.workers.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 61))
    (again,), _ = workers.look()
    assert again.number == worker.number


def test_the_only_worker_comes_back(fleet: Fleet) -> None:
    doomed = fleet.start("verifier-0", stall)

    def restart_once_busy() -> None:
        known = fleet.known("verifier-0")
        if known is not None and known.rows.steps and fleet.verifiers["verifier-0"] is doomed:
            fleet.kill("verifier-0")
            fleet.start("verifier-0", respond)

    fleet.on_look = restart_once_busy
    finished = play(fleet)
    check(finished)
    (death,) = finished.deaths
    (part,) = finished.parts
    died = min(row.arrived_at for row in part.rows.requests) + death.at_s
    assert any(row.first_token_at < died < row.ended_at for row in part.rows.requests), "first tokens are of the dead one"
    for rows in (part.rows.steps, part.rows.verifications):
        steps = [row.step for row in rows]
        assert steps[0] == 0, "all that the first one had was the first step of its requests"
        assert 0 not in steps[steps.index(1) :], "steps of one worker never go back"


def test_a_request_is_complete_though_its_verifier_dies_with_its_rows(fleet: Fleet) -> None:
    async def keep_rows(verifier: FakeVerifier, sequence: Sequence) -> None:
        await respond(verifier, sequence)
        verifier.rows = RowBatch()

    async def outlive_it(verifier: FakeVerifier, sequence: Sequence) -> None:
        while "verifier-1" in fleet.verifiers:
            await asyncio.sleep(0.01)
        await respond(verifier, sequence)

    fleet.start("verifier-0", outlive_it)
    doomed = fleet.start("verifier-1", keep_rows)

    def die_once_done() -> None:
        known = fleet.known("verifier-1")
        if known is not None and doomed.sequences and not known.client.answers and "verifier-1" in fleet.verifiers:
            fleet.kill("verifier-1")

    fleet.on_look = die_once_done
    finished = play(fleet, window=1)
    check(finished)
    assert [len(part.ended) > 0 for part in finished.parts] == [True, True]
    assert len(finished.deaths) == 1


def test_an_aborted_request_is_sent_again(fleet: Fleet) -> None:
    async def abort_first(verifier: FakeVerifier, sequence: Sequence) -> None:
        if sequence.request.request_id.endswith("-1"):
            sequence.emit([], FinishReason.ABORT)
        else:
            await respond(verifier, sequence)

    verifier = fleet.start("verifier-0", abort_first)
    check(play(fleet))
    assert len(verifier.sequences) == 2 * len(LENGTHS)


def test_a_coordinator_that_is_away_disturbs_nothing(fleet: Fleet) -> None:
    fleet.start("verifier-0", respond)
    looks = iter(range(1000))

    def away() -> None:
        if next(looks):
            raise CoordinatorUnavailable("away")

    fleet.on_look = away
    check(play(fleet))


@pytest.mark.parametrize(
    ("tokens", "reason", "complaint"),
    [
        ([], FinishReason.ERROR, "verifier-0 refused the request"),
        ([7], FinishReason.LENGTH, "verifier-0 did not keep to the response"),
    ],
)
def test_what_must_not_happen_ends_the_rollout(fleet: Fleet, tokens: list[int], reason: FinishReason, complaint: str) -> None:
    async def misbehave(verifier: FakeVerifier, sequence: Sequence) -> None:
        sequence.emit(tokens, reason)

    fleet.start("verifier-0", misbehave)
    with pytest.raises(RolloutError, match=rf"row \d: {complaint}"):
        play(fleet)


def test_lost_rows_end_the_rollout(fleet: Fleet) -> None:
    async def lossy(verifier: FakeVerifier, sequence: Sequence) -> None:
        verifier.rows.lost = 3
        await respond(verifier, sequence)

    fleet.start("verifier-0", lossy)
    with pytest.raises(RolloutError, match="verifier-0 lost 3 rows"):
        play(fleet)
