"""Rows, accounts and times made from what a scheduler reports.

That rows add up to the stats is shown in `tests/integration/engines/test_records.py`.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from backend.engine.counting import Counters, CountingScheduler
from backend.engine.observers import UNDRAFTED, Accounts, DraftOrigin, Observer, RequestState, Verification, open_account
from backend.engine.recording import Recording
from backend.fleet import VerifierStats
from backend.records.rows import (
    LONGEST_REQUEST_ID,
    REQUEST_ID_KEY,
    DecisionRow,
    RequestRow,
    Row,
    StepRow,
    VerificationRow,
    name_for_records,
)
from backend.speculation.chances import Rule
from backend.speculation.outlook import Foresight, Prospect
from backend.speculation.waiting import Ask, Choice, Plan, StepLoad
from backend.wire.engine import Account, RequestOptions, Tally


def asked(name: str, **arguments: object) -> SimpleNamespace:
    params = SimpleNamespace(extra_args=arguments)
    return SimpleNamespace(request_id=name, sampling_params=params, arrival_time=5.0, num_prompt_tokens=7, num_output_tokens=0)


class Recorded:
    """A recording, its rows in order, and the counters that it follows."""

    def __init__(self, stats: VerifierStats | None = None) -> None:
        self.rows: list[Row] = []
        self.stats = stats or VerifierStats("v0", 0.0, "sync", 4)
        self.recording = Recording(self.rows.append, self.stats)

    def of(self, kind: type) -> list:
        return [row for row in self.rows if isinstance(row, kind)]

    def step(self, prefilled: int = 1, *verified: tuple[Verification, int, float], ended: Any = None) -> None:
        """A step of ten milliseconds."""
        self.recording.ran(prefilled)
        for verification in verified:
            self.recording.verified(*verification)
        if ended is not None:
            self.recording.ended(ended, "stop")
        self.stats.verify_s += 0.005
        self.stats.busy_s += 0.01
        self.stats.steps += 1
        self.stepped(0.01)

    def stepped(self, seconds: float) -> None:
        scheduler = SimpleNamespace(
            counters=Counters(self.stats),
            plan_in_force=lambda: Plan(4),
            get_request_counts=lambda: (1, 3),
            get_kv_cache_usage=lambda: 0.25,
        )
        self.recording.stepped(scheduler, seconds)


def test_a_request_from_prefill_to_its_end() -> None:
    made, sent = Recorded(), asked("r-suffix", **{REQUEST_ID_KEY: "r"})
    made.recording.began(sent)
    made.stats.idle_s["no_work"] += 1.5
    made.step(7, (Verification(sent, 7, 0, 0, UNDRAFTED), 1, 0.0))
    made.stats.busy_s += 0.002
    made.stats.idle_s["awaiting_draft"] += 0.25
    made.step(0, (Verification(sent, 8, 4, 4, DraftOrigin("d0", True, 0.004)), 3, 0.25), ended=sent)

    first, drafted = made.of(VerificationRow)
    assert first == VerificationRow(0, "r", 7, 0, 0, 1, "", False, False)
    assert drafted == VerificationRow(1, "r", 8, 4, 4, 3, "d0", True, False)
    (request,) = made.of(RequestRow)
    assert (request.tokens, request.verifications, request.draft_tokens, request.accepted) == (4, 2, 4, 4)
    assert (request.prompt_tokens, request.finish_reason, request.arrived_at) == (7, "stop", 5.0)
    assert request.arrived_at < request.first_token_at <= request.ended_at
    prefill, decode = made.of(StepRow)
    assert (prefill.step, prefill.prefill_tokens, prefill.requests, prefill.tokens, prefill.drafted) == (0, 7, 1, 1, 0)
    assert (prefill.idle_ms, prefill.interval_ms) == ({"no_work": 1500.0}, 0)
    assert (decode.step, decode.prefill_tokens, decode.drafted, decode.drafted_tokens, decode.plan_k) == (1, 0, 1, 3, 4)
    assert (decode.waiting, decode.kv_usage) == (3, 0.25)
    assert [decode.draft_ms, decode.busy_ms, decode.interval_ms] == pytest.approx([4, 12, 10 + 2 + 250])
    assert list(decode.idle_ms) == ["awaiting_draft"]
    assert made.rows.index(request) < made.rows.index(decode), "a step comes after what happened in it"


def test_a_step_without_an_outcome_makes_no_row_and_loses_no_time() -> None:
    made = Recorded()
    made.stats.busy_s += 0.5
    made.stepped(0.5)
    assert made.rows == []
    made.step()
    assert made.of(StepRow)[0].busy_ms == pytest.approx(510)


def test_rows_that_begin_late_leave_out_what_was_before() -> None:
    earlier = Recorded()
    earlier.stats.idle_s["no_work"] += 2.0
    earlier.step()
    late = Recorded(earlier.stats)
    for _ in range(2):
        late.stats.idle_s["no_work"] += 0.5
        late.step()
    first, second = late.of(StepRow)
    assert (first.step, second.step) == (1, 2)
    assert (first.interval_ms, first.idle_ms) == (0, {"no_work": 500.0})
    assert [first.busy_ms, second.interval_ms, first.verify_ms, second.verify_ms] == pytest.approx([10, 510, 5, 5])


def test_a_request_aborted_before_its_first_token() -> None:
    made = Recorded()
    made.recording.began(asked("r"))
    made.recording.ended(asked("r"), "abort")
    made.recording.ended(asked("began before the rows"), "abort")
    (row,) = made.of(RequestRow)
    assert (row.tokens, row.first_token_at, row.finish_reason) == (0, 0.0, "abort")


def test_a_change_of_plan_belongs_to_the_step_that_comes() -> None:
    made = Recorded()
    made.step()
    alone, drafted = Prospect((0.0, 0.5, 0.6), (0.0, 0.1, 0.2)), Prospect((0.0, 1.0, 1.8), (0.0, 0.9, 1.5))
    load = StepLoad(3, alone, drafted, Foresight(8, 2))
    made.recording.decided(Plan(2, outcomes=8), load, Choice(Ask.AHEAD, 2, 200.0), 0.01)
    made.recording.decided(Plan(0), load, Choice(Ask.PLAIN, 0, 100.0), 0.01)
    ahead, plain = made.of(DecisionRow)
    hit_rate = load.foresight.rate(8, drafted.tokens[2])
    assert ahead == DecisionRow(1, ahead.at, 3, 2, 8, 200.0, 0.01, 1.8, 2.5, hit_rate)
    assert plain == DecisionRow(1, plain.at, 3, 0, 0, 100.0, 0.01, 0.6, 1.2, 0.0), "what the text itself brings"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (None, "engine-id"),
        ({}, "engine-id"),
        ({REQUEST_ID_KEY: "mine"}, "mine"),
        ({REQUEST_ID_KEY: ""}, "engine-id"),
        ({REQUEST_ID_KEY: 7}, "engine-id"),
        ({REQUEST_ID_KEY: "x" * 999}, "x" * LONGEST_REQUEST_ID),
    ],
)
def test_rows_carry_the_clients_own_id(arguments: dict[str, object] | None, name: str) -> None:
    assert name_for_records("engine-id", arguments) == name


def client_of(gateway: int, name: str, rule: Rule, *, asks: bool = True) -> SimpleNamespace:
    state = RequestState(RequestOptions(account=asks), rule)
    return SimpleNamespace(request_id=name, client_index=gateway, outrider=state)


def of(request: object, source: str, drafted: int, accepted: int, drafter: str = "d") -> Verification:
    return Verification(request, 9, drafted, accepted, DraftOrigin(drafter, source=source))


def test_only_who_asked_is_counted_and_told_once():
    accounts = Accounts()
    one, two = client_of(4, "r", Rule.GREEDY), client_of(5, "s", Rule.SHARED)
    other = client_of(4, "other", Rule.GREEDY, asks=False)
    for request in (one, two, other):
        accounts.began(request)
    accounts.verified(of(other, "fresh", 3, 2), 3, 0.1)
    accounts.ended(other, "stop")
    assert accounts.take() == {}
    accounts.verified(Verification(one, 9, 0, 0, UNDRAFTED), 1, 0.0)
    accounts.verified(of(one, "fresh", 3, 2), 3, 0.5)
    accounts.verified(of(one, "ahead", 2, 0), 1, 0.25)
    accounts.verified(of(one, "fresh", 4, 2), 3, 0.0)
    accounts.ended(one, "stop")
    tallies = [Tally("fresh", "d", 2, 7, 4), Tally("ahead", "d", 1, 2, 0)]
    assert accounts.take() == {4: [Account("r", 8, 4, [1, 0, 2], tallies, 0.75, "greedy")]}
    assert accounts.take() == {}
    accounts.ended(two, "abort")
    assert accounts.take() == {5: [Account("s", rule="shared_noise")]}


@pytest.mark.parametrize(("emitted", "accepted"), [(9, 8), (8, 8), (2, 2), (1, 1)])
def test_draft_tokens_behind_the_requests_end_are_not_accepted(emitted: int, accepted: int):
    accounts = Accounts()
    traced = client_of(4, "r", Rule.GREEDY, asks=False)
    open_account("r", traced.outrider)
    accounts.began(traced)
    accounts.verified(of(traced, "prediction", 8, 8, ""), emitted, 0.0)
    accounts.ended(traced, "length")
    lengths, tallies = [0] * accepted + [1], [Tally("prediction", "", 1, 8, accepted)]
    assert traced.outrider.account == Account("r", emitted, 1, lengths, tallies, 0.0, "greedy")
    assert accounts.take() == {}, "no gateway has asked: it is a trace's"


def test_a_wait_and_the_work_meanwhile_lie_between_two_steps_and_a_rest_does_not() -> None:
    scheduler = CountingScheduler()
    scheduler.counters.line = line = Mock()
    stats = scheduler.counters.stats
    scheduler.count_step(0.5, ran=True)
    stats.busy_s += 0.25
    stats.idle_s["awaiting_draft"] += 1.0
    scheduler.count_step(0.5, ran=True)
    # An hour of ticks, each a little work.
    stats.busy_s += 60.0
    stats.idle_s["no_work"] += 3540.0
    scheduler.rested()
    scheduler.count_step(0.5, ran=True)
    stats.busy_s += 0.25
    scheduler.count_step(0.5, ran=True)
    seconds = [each.args[1] for each in line.note.call_args_list]
    assert seconds == pytest.approx([0.5, 1.75, 0.5, 0.75])


class Vllm:
    """The part of vLLM's scheduler that ends requests: in a step, one by its own token and another by an error."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def _free_request(self, request: Any) -> None:
        del self.requests[request.request_id]

    def finish_requests(self, request_ids: list[str], status: str) -> list[Any]:
        ended = [self.requests[each] for each in request_ids]
        for each in ended:
            each.get_finished_reason = lambda: status
            self._free_request(each)
        return ended

    def update_from_output(self, scheduled: Any, sampled: Any) -> dict[int, Any]:
        self._free_request(self.requests["one"])
        self.finish_requests(["other"], "error")
        ended: tuple[tuple[str, list[int], str], ...] = (("one", [7], "stop"), ("other", [], "error"))
        outputs = [
            SimpleNamespace(request_id=name, new_token_ids=tokens, finish_reason=reason, prefill_stats=None)
            for name, tokens, reason in ended
        ]
        return {0: SimpleNamespace(outputs=outputs)}


class Scheduler(CountingScheduler, Vllm):
    """Counts what it ends."""


def test_every_end_is_told_once_and_behind_the_last_verification() -> None:
    scheduler, observer = Scheduler(), Mock(spec=Observer)
    scheduler.observers.append(observer)
    for name in ("one", "other", "third"):
        request = client_of(0, name, Rule.GREEDY)
        request.num_tokens, request.num_prompt_tokens = 9, 5
        scheduler.add_request(request)
    scheduled = SimpleNamespace(num_scheduled_tokens={"one": 1}, scheduled_spec_decode_tokens={})
    scheduler.update_from_output(scheduled, SimpleNamespace(sampled_token_ids=[[7]], req_id_to_index={"one": 0}))
    scheduler.finish_requests(["third"], "abort")
    told = [(name, args[0]) for name, args, _ in observer.mock_calls if name in ("verified", "ended")]
    heard = [(name, getattr(what, "request", what).request_id) for name, what in told]
    assert sorted(heard) == [("ended", "one"), ("ended", "other"), ("ended", "third"), ("verified", "one")]
    assert heard.index(("verified", "one")) < heard.index(("ended", "one"))
    assert scheduler.counters.stats.requests_finished == {"stop": 1, "error": 1, "abort": 1}
    assert [each.request_id for each in scheduler.accounts.take()[0]] == ["other", "one", "third"]
