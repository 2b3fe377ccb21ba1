"""A round against verifiers without engines: all requests complete, whoever dies, aborts or keeps its rows to itself."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import LogprobsLists

from backend.config import Settings
from backend.config.sources import CommandError, ConfigError
from backend.coordinator import CoordinatorUnavailable
from backend.engine.client import EngineClient, fixed_sampling
from backend.engine.front.offline import Front, Responses, response_row
from backend.fleet import FleetSnapshot, MemberView, VerifierStats
from backend.fleet.members import MemberState
from backend.fleet.speed import Speed
from backend.fleet.stats import Weights
from backend.models.demo import TARGET_DIR
from backend.records.rows import RequestRow, StepRow, VerificationRow
from backend.rollout import run as run_module
from backend.rollout.bar import Bar
from backend.rollout.outcome import Round
from backend.rollout.requests import Request, Tokenizer
from backend.rollout.run import RolloutError, RoundRunner
from backend.rollout.tables import markov_table, whole_requests
from backend.rollout.trace import Case
from backend.rollout.workers import STARVED_S, Workers
from backend.routing.balance import Limits
from backend.wire.engine import FIXED_RESPONSE
from tests.support.fake_verifier import FakeVerifier, Sequence, count_up

LENGTHS = [3, 8, 1, 12, 5, 7, 2, 6]


def requests() -> list[Request]:
    made = []
    for number, length in enumerate(LENGTHS):
        tokens = [100 * number + j for j in range(length)]
        params = fixed_sampling(tokens, 0.0)
        made.append(Request(number, Case(number, f"p{number}", "g"), [1, 2, number], tokens, params, length))
    return made


class Fleet:
    """Verifiers in a thread of their own, and the coordinator's view of them.  `on_look` runs before every snapshot."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.verifiers: dict[str, FakeVerifier] = {}
        self.states: dict[str, MemberState] = {}
        """Of those that are not ready."""
        self.workers: Workers | None = None
        self._all: list[FakeVerifier] = []
        self.on_look: Callable[[], None] = lambda: None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, name: str, behaviour: Any) -> FakeVerifier:
        async def begin() -> FakeVerifier:
            verifier = FakeVerifier(self.directory, name)
            verifier.behaviour = behaviour
            return verifier.start()

        self.verifiers[name] = asyncio.run_coroutine_threadsafe(begin(), self._loop).result(10)
        self._all.append(self.verifiers[name])
        return self.verifiers[name]

    def kill(self, name: str) -> None:
        self.call(self.verifiers.pop(name).kill)

    def call(self, what: Callable[[], None]) -> None:
        """Where the verifiers live."""
        self._loop.call_soon_threadsafe(what)

    def snapshot(self) -> FleetSnapshot:
        self.on_look()
        members = [replace(each.member, state=self.states.get(name, "ready")) for name, each in self.verifiers.items()]
        return FleetSnapshot(1, [MemberView(each, 0.0) for each in members], [], {})

    def close(self) -> None:
        async def end() -> None:
            for verifier in self._all:
                verifier.kill()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(run_module, "LOOK_S", 0.05)
    monkeypatch.setattr(run_module, "TEND_S", 0.05)
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


async def respond(verifier: FakeVerifier, sequence: Sequence, upto: int | None = None, with_row: bool = True) -> None:
    """The fixed response, two tokens a step, and the rows of it."""
    tokens: list[int] = sequence.request.sampling_params.extra_args[FIXED_RESPONSE]
    brought = len(sequence.emitted)
    name = sequence.request.request_id
    verifications = 0
    for step, begin in enumerate(range(brought, len(tokens) if upto is None else brought + upto, 2)):
        chunk = tokens[begin : begin + 2]
        sequence.emit(chunk, FinishReason.LENGTH if begin + 2 >= len(tokens) else None)
        verifications += 1
        verifier.rows.verifications.append(VerificationRow(step, name, 3, 1, len(chunk) - 1, len(chunk), "d", False, True))
        verifier.rows.steps.append(StepRow(step, 1.0, 1.0, 1, 0, len(chunk), 1, len(chunk), 4, 0, 1.0, 1.0, 2.0, {}))
        await asyncio.sleep(0)
    if upto is None and with_row:
        here = len(tokens) - brought
        row = RequestRow(name, 0.0, 0.0, 1.0, 3, here, verifications, verifications, 0, "length", True, brought)
        verifier.rows.requests.append(row)


async def stall(verifier: FakeVerifier, sequence: Sequence) -> None:
    """Two tokens, and nothing more."""
    await respond(verifier, sequence, upto=2)


def play(fleet: Fleet, window: int = 3, balance_interval_s: float = 0.0) -> Round:
    return run(fleet, requests(), Responses(), window, balance_interval_s)


def run(fleet: Fleet, asked: list[Request], responses: Responses, window: int = 3, balance_interval_s: float = 0.0) -> Round:
    workers = fleet.workers = Workers(fleet, None)  # type: ignore[arg-type]
    try:
        workers.look()
        bar = Bar(io.StringIO(), "round 0", len(asked))
        return RoundRunner(0, asked, workers, window, responses, bar, balance_interval_s).run()
    finally:
        workers.close()


def check(finished: Round) -> None:
    """Every response is there once, and the rows of the workers tell the same story."""
    wanted = requests()
    assert {number: finished.tokens(number) for number in finished.responses} == {each.number: each.fixed for each in wanted}
    owned = [part.numbers[each] for part in finished.parts for each in part.completed]
    assert sorted(owned) == list(range(len(wanted))), "every request ended at one worker"
    emitted = dict.fromkeys(owned, 0)
    for part in finished.parts:
        for tokens, _, _, _, number in markov_table(part.rows.verifications, part.numbers):
            emitted[number] += tokens
    sent = Counter(number for part in finished.parts for number in part.numbers.values())
    for each in wanted:
        whole = len(each.fixed or ())
        # A verifier that died may have kept rows to itself.
        assert emitted[each.number] == whole or (finished.deaths and sent[each.number] > 1 and emitted[each.number] < whole)
    verified = finished.verifications()
    for ended in whole_requests(finished).values():
        for number, row in ended.items():
            assert (row.tokens, row.verifications) == (len(finished.tokens(number)), len(verified[number]))


def test_all_is_well(fleet: Fleet) -> None:
    fleet.start("verifier-0", respond)
    fleet.start("verifier-1", respond)
    finished = play(fleet)
    check(finished)
    assert not finished.deaths
    assert sorted(part.number for part in finished.parts) == [0, 1]
    assert all(part.numbers for part in finished.parts)


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
    assert (death.worker, death.reason, death.resumed) == (1, "died", 3)
    assert all(not part.completed for part in finished.parts if part.number == 1)


def test_a_starved_worker_stays(fleet: Fleet) -> None:
    """Its lease runs out while it answers; one that says nothing is gone."""
    fleet.start("verifier-0", respond)
    fleet.states["verifier-0"] = "lost"
    workers = Workers(fleet, None)  # type: ignore[arg-type]
    try:
        assert workers.look() == ([], []), "no new worker is begun with"
        del fleet.states["verifier-0"]
        (worker,), _ = workers.look()
        fleet.states["verifier-0"] = "lost"
        assert workers.look() == ([], [])
        worker.client.heard_at -= STARVED_S
        assert workers.look() == ([], [(worker, "died")])
    finally:
        workers.close()


def test_fixed_responses_are_refused_where_a_verifier_takes_none(fleet: Fleet) -> None:
    fleet.start("verifier-0", respond)
    workers = Workers(fleet, None)  # type: ignore[arg-type]
    try:
        workers.look()
        with pytest.raises(ConfigError, match=r"verifier-0 takes no fixed responses: .*\"async_scheduling\": false"):
            workers.check_fixed()
    finally:
        workers.close()


def test_a_rollout_that_was_silent_between_rounds_is_known_again(fleet: Fleet) -> None:
    """Its lease at a fleet that it joined has run out: it greets, and goes on."""
    verifier = fleet.start("verifier-0", respond)
    workers = Workers(fleet, None)  # type: ignore[arg-type]
    try:
        workers.look()
        fleet.call(verifier.clients.clear)
        bar = Bar(io.StringIO(), "round 1", len(LENGTHS))
        check(RoundRunner(1, requests(), workers, 3, Responses(), bar).run())
    finally:
        workers.close()


def test_requests_go_on_after_the_connection_was_cut(fleet: Fleet) -> None:
    """The verifier lives, and what it said meanwhile is lost: tokens of running requests, and rows of ended ones."""

    async def cut_first(verifier: FakeVerifier, sequence: Sequence) -> None:
        first, number = sequence.request.request_id.endswith("-1"), int(sequence.request.request_id.split("-")[1])
        await respond(verifier, sequence, upto=2 if first and number % 2 else None, with_row=not first)

    verifier = fleet.start("verifier-0", cut_first)
    cuts = 0

    def cut_once_busy() -> None:
        nonlocal cuts
        known = fleet.workers.present.get("verifier-0") if fleet.workers is not None else None
        if known is not None and len(verifier.sequences) >= 3 and cuts < 3:
            cuts += 1
            known.client.is_cut = True

    fleet.on_look = cut_once_busy
    finished = play(fleet)
    check(finished)
    assert not finished.deaths
    (part,) = finished.parts
    assert {row.request_id for row in part.rows.requests} >= part.completed
    assert any(request_id.endswith("-2") for request_id in part.completed)


def test_the_only_worker_comes_back(fleet: Fleet) -> None:
    doomed = fleet.start("verifier-0", stall)

    def restart_once_busy() -> None:
        assert fleet.workers is not None
        known = fleet.workers.present.get("verifier-0")
        if known is not None and known.rows.steps and fleet.verifiers["verifier-0"] is doomed:
            fleet.kill("verifier-0")
            fleet.start("verifier-0", respond)

    fleet.on_look = restart_once_busy
    finished = play(fleet)
    check(finished)
    assert len(finished.deaths) == 1
    (part,) = finished.parts
    for rows in (part.rows.steps, part.rows.verifications):
        steps = [row.step for row in rows]
        assert steps[0] == 0, "all that the first one had was the first step of its requests"
        assert 0 not in steps[steps.index(1) :], "steps of one worker never go back"


def test_requests_move_from_a_slow_worker_to_a_fast_one(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "Limits", partial(Limits, dwell_s=0.0))
    slow, fast = fleet.start("verifier-0", stall), fleet.start("verifier-1", respond)

    def publish() -> None:
        for verifier, running, step_s in ((slow, 4, 9.0), (fast, 0, 0.01)):
            stats = VerifierStats(verifier.name, 1000.0, "sync", 4, running=running, prefill_tokens=1000, prefill_s=0.1)
            stats.speed = Speed(step_s, 0.0)
            fleet.call(partial(verifier.publish, stats))

    fleet.on_look = publish
    finished = play(fleet, balance_interval_s=0.05)
    check(finished)
    assert not finished.deaths
    left, done = (next(part for part in finished.parts if part.number == number) for number in (0, 1))
    assert finished.moves == len(left.numbers) > 0
    assert not left.completed
    assert sum(row.tokens for row in left.rows.verifications) > 0, "what it had done stays in its tables"
    assert len(done.completed) == len(LENGTHS)


def test_no_request_moves_while_others_wait(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A free place is for one that waits; only the rest of a round is spread."""
    monkeypatch.setattr(run_module, "Limits", partial(Limits, dwell_s=0.0))
    looks = 0
    moved_early: list[str] = []

    async def later(verifier: FakeVerifier, sequence: Sequence) -> None:
        while looks < 10:
            await asyncio.sleep(0.01)
        await respond(verifier, sequence)

    slow, fast = fleet.start("verifier-0", stall), fleet.start("verifier-1", later)

    def publish() -> None:
        nonlocal looks
        looks += 1
        if looks < 10:
            moved_early.extend(each.request_id for each in fast.sequences if each.emitted)
        for verifier, step_s in ((slow, 9.0), (fast, 0.01)):
            stats = VerifierStats(verifier.name, 1000.0, "sync", 4, running=1, prefill_tokens=1000, prefill_s=0.1)
            stats.speed = Speed(step_s, 0.0)
            fleet.call(partial(verifier.publish, stats))

    fleet.on_look = publish
    finished = play(fleet, window=2, balance_interval_s=0.01)
    check(finished)
    assert not moved_early
    assert finished.moves == 2


def test_a_stop_string_ends_a_response_that_two_verifiers_wrote(fleet: Fleet, front: Front, tokenizer: Tokenizer) -> None:
    """The first one dies between the two halves of the stop string; the second one has emitted more than it."""
    written = tokenizer.response("    return value + other\n\n\nclass Other:\n")
    prompt = tokenizer.prompt("def add(value, other):\n")
    text = tokenizer.text(written)
    half = next(n for n in range(len(written)) if "return val" in tokenizer.text(written[:n]))
    params = front.params(prompt, {"stop": [text[text.index("val") :][:12]], "logprobs": 1, "max_tokens": 200})

    def emit(sequence: Sequence, tokens: list[int]) -> None:
        places = len(tokens)
        logprobs = LogprobsLists(
            np.array([[token, 9] for token in tokens]), np.array([[-0.5, -1.5]] * places), np.array([1] * places)
        )
        sequence.emit(tokens, logprobs=logprobs)

    async def begin(verifier: FakeVerifier, sequence: Sequence) -> None:
        emit(sequence, written[:half])

    async def go_on(verifier: FakeVerifier, sequence: Sequence) -> None:
        assert sequence.emitted == written[:half]
        emit(sequence, written[half:])
        await sequence.aborted.wait()
        verifier.rows.requests.append(RequestRow(sequence.request_id, 0.0, 0.0, 1.0, 3, 99, 1, 0, 0, "abort", False, half))

    doomed = fleet.start("verifier-0", begin)

    def replace_it() -> None:
        known = fleet.workers.present.get("verifier-0") if fleet.workers is not None else None
        if (
            known is not None
            and fleet.verifiers["verifier-0"] is doomed
            and any(a.tokens for a in known.client.answers.values())
        ):
            fleet.kill("verifier-0")
            fleet.start("verifier-0", go_on)

    fleet.on_look = replace_it
    finished = run(fleet, [Request(0, Case(0, "p", ""), prompt, None, params, 50)], front.responses())
    row = response_row(finished.responses[0])
    assert row["text"] == text[: text.index("val")]
    assert (row["finish_reason"], row["stop_reason"]) == ("stop", params.stop[0])
    kept = len(row["token_ids"])
    assert half < kept < len(written)
    assert row["token_ids"] == written[:kept], "what came after the stop string is gone"
    assert len(row["logprobs"]["content"]) == kept
    assert row["logprobs"]["content"][-1] == {
        "token_id": written[kept - 1],
        "logprob": -0.5,
        "rank": 1,
        "top_logprobs": [
            {"token_id": written[kept - 1], "logprob": -0.5, "rank": 1},
            {"token_id": 9, "logprob": -1.5, "rank": 1},
        ],
    }
    assert whole_requests(finished)[0][0].tokens == kept


def test_a_seed_makes_a_seed_of_every_free_response(fleet: Fleet, front: Front) -> None:
    verifier = fleet.start("verifier-0", count_and_tell)
    params = front.params([1, 2], {"max_tokens": 2})
    asked = [Request(n, Case(n, "p", ""), [1, 2], None, params, 2, seed) for n, seed in ((0, None), (1, None), (2, 7))]
    workers = fleet.workers = Workers(fleet, None)  # type: ignore[arg-type]
    try:
        workers.look()
        RoundRunner(0, asked, workers, 3, front.responses(), Bar(io.StringIO(), "", 3), seed=5).run()
    finally:
        workers.close()
    seeds = {each.request_id: each.request.sampling_params.seed for each in verifier.sequences}
    assert seeds["0-2-1"] == 7, "a prompt's own seed comes first"
    assert len(set(seeds.values())) == 3
    assert None not in seeds.values()


async def count_and_tell(verifier: FakeVerifier, sequence: Sequence) -> None:
    await count_up(verifier, sequence)
    verifier.rows.requests.append(RequestRow(sequence.request_id, 0.0, 0.0, 1.0, 2, 2, 2, 0, 0, "length", False))


@pytest.fixture(scope="module")
def front() -> Front:
    return Front(Settings(), str(TARGET_DIR))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(TARGET_DIR))


def test_weights_follow_those_that_gateways_have_had_loaded(fleet: Fleet) -> None:
    """A rollout that has joined a fleet counts on where its gateways are, and goes back to their weights."""
    first, second = fleet.start("verifier-0", respond), fleet.start("verifier-1", respond)
    theirs = Weights(5, "five", "/w/five")
    first.weights = second.weights = theirs
    workers = Workers(fleet, None, target_dir="/target")  # type: ignore[arg-type]
    try:
        workers.look()
        assert workers.weights == theirs
        second.failure = "ValueError: no such directory"
        assert workers.load(Path("/w/step-1"))
        assert first.utilities == [("reload_weights", ["/w/step-1", "step-1", 6]), ("reload_weights", ["/w/five", "five", 7])]
        second.failure = None
        assert workers.load(Path("/w/step-2")) == ""
        assert first.weights == second.weights == Weights(8, "step-2", "/w/step-2")
    finally:
        workers.close()


def test_verifiers_hear_of_a_rollout_whose_weights_another_one_still_loads(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.start("verifier-0", respond)
    slow = fleet.start("verifier-1", respond)
    pings = Counter[str]()

    def end_when_pinged() -> None:
        if pings["verifier-0"] >= 2 and "verifier-1" in fleet.verifiers:
            fleet.kill("verifier-1")

    workers = Workers(fleet, None)  # type: ignore[arg-type]
    try:
        workers.look()
        slow.hung = True
        client = workers.present["verifier-0"].client
        monkeypatch.setattr(client, "ping", lambda: (pings.update(["verifier-0"]), EngineClient.ping(client)))
        fleet.on_look = end_when_pinged
        assert workers.load(Path("/w/step-1")) == ""
    finally:
        workers.close()


def test_weights_that_came_as_tensors_cannot_come_back(fleet: Fleet) -> None:
    first, second = fleet.start("verifier-0", respond), fleet.start("verifier-1", respond)
    first.weights = second.weights = Weights(5, "five", None)
    workers = Workers(fleet, None, target_dir="/target")  # type: ignore[arg-type]
    try:
        workers.look()
        second.failure = "ValueError: no such directory"
        with pytest.raises(CommandError, match="/w/step-1: not all verifiers could load it, and the weights before came as"):
            workers.load(Path("/w/step-1"))
        fleet.start("verifier-2", respond)
        workers.look()
        assert "verifier-2" not in workers.present, "it has the weights of the start"
    finally:
        workers.close()


def test_new_weights_are_all_verifiers_or_none(fleet: Fleet) -> None:
    first, second = fleet.start("verifier-0", respond), fleet.start("verifier-1", respond)
    workers = Workers(fleet, None, target_dir="/target")  # type: ignore[arg-type]
    try:
        workers.look()
        assert workers.load(Path("/w/step-3")) == ""
        assert first.utilities == second.utilities == [("reload_weights", ["/w/step-3", "step-3", 1])]
        second.failure = "ValueError: no such directory"
        assert workers.load(Path("/w/step-4")) == "verifier-1: ValueError: no such directory"
        assert (workers.version, workers.weights) == ("step-3", Weights(3, "step-3", "/w/step-3"))
        fleet.kill("verifier-0")
        renewed = fleet.start("verifier-0", respond)
        workers.look()
        workers.look()
        assert renewed.utilities == [("catch_up", ["/w/step-3", "step-3", 3])]
        assert sorted(workers.present) == ["verifier-0", "verifier-1"]
    finally:
        workers.close()


def test_an_answer_without_its_row_is_complete_when_its_verifier_is_gone(fleet: Fleet) -> None:
    """The verifier dies between the last token and the row: that is made of the rest, so that tables and answers agree."""

    async def forget_rows(verifier: FakeVerifier, sequence: Sequence) -> None:
        await respond(verifier, sequence, with_row=False)

    fleet.start("verifier-0", respond)
    doomed = fleet.start("verifier-1", forget_rows)
    looks = 0

    def die_later() -> None:
        nonlocal looks
        looks += bool(doomed.sequences)
        if looks > 3 and "verifier-1" in fleet.verifiers:
            fleet.kill("verifier-1")

    fleet.on_look = die_later
    finished = play(fleet)
    check(finished)
    (part,) = [each for each in finished.parts if each.number == 1]
    assert part.completed
    assert {row.request_id for row in part.rows.requests} == part.completed


def test_an_aborted_request_is_sent_again(fleet: Fleet) -> None:
    async def abort_first(verifier: FakeVerifier, sequence: Sequence) -> None:
        if sequence.request.request_id.endswith("-1"):
            sequence.emit([], FinishReason.ABORT)
        else:
            await respond(verifier, sequence)

    fleet.start("verifier-0", abort_first)
    finished = play(fleet)
    check(finished)
    assert all(request_id.endswith("-2") for request_id in finished.parts[0].completed)


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


def test_the_bar_draws_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    bar = Bar(stream, "round 1", 8)
    bar.show(1, 10)
    assert stream.getvalue() == "", "not yet due"
    bar.end(8, 44)
    assert "round 1 [########################] 8/8 requests, 44 tokens" in stream.getvalue()
    assert stream.getvalue().endswith("\n")


def test_the_bar_draws_over_itself_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    bar = Bar(stream, "round 1", 8)
    bar.show(2, 10)
    bar.end(8, 44)
    first, second = stream.getvalue().split("\r")[1:]
    assert "2/8 requests" in first
    assert "\n" not in first
    assert "8/8 requests" in second
