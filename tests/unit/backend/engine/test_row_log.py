"""Whatever happens, each drafter gets each row of its requests once and in order, as far as the logs have it."""

from collections import deque
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from backend.engine import feature_link, features, row_log
from backend.engine.features import FeatureShipper
from backend.engine.row_log import AT_ONCE, MOST_WAITING, RowLogs, StepRows
from backend.fleet import DrafterRef
from backend.models.head_config import CheckpointError
from backend.speculation.pairing import Pairing
from backend.transport import Wire
from backend.wire.drafting import (
    HELLO_FIRST,
    Close,
    Commit,
    Hello,
    NextItem,
    Open,
    Refused,
    Round,
    Unknown,
    decode_to_drafter,
    encode,
)
from tests.support.properties import examples
from tests.support.rows import run_step, step_of

NAMES = "abc"
TEXTS = {name: [1000 * i + position for position in range(900)] for i, name in enumerate(NAMES)}


def rows_of(name: str, start: int, count: int, rejected: int = 0) -> torch.Tensor:
    """Rows that tell request and position; those of rejected tokens are not numbers."""
    final = torch.tensor([[float(ord(name)), float(position)] for position in range(start, start + count)]).view(count, 2)
    return torch.cat([final, torch.full((rejected, 2), float("nan"))])


class Drafter:
    """A socket and the drafter behind it, which checks every round."""

    def __init__(self) -> None:
        self.is_full = False
        self.refused = 0
        self.inbox: deque[list[bytes]] = deque()
        self.rounds: list[Round] = []
        self.texts: dict[str, int] = {}
        """Tokens of each request that is open here."""
        self.rows: dict[str, list[int]] = {}
        """Positions of the rows that came since then."""

    def send(self, header: bytes, frame: bytes = b"") -> bool:
        message = decode_to_drafter(header)
        if isinstance(message, Hello):
            return True
        if self.is_full:
            self.refused += 1
            return False
        assert isinstance(message, Round)
        self.rounds.append(message)
        rows = torch.frombuffer(bytearray(frame), dtype=torch.float32).view(-1, 2).tolist() if frame else []
        for item in message.items:
            if isinstance(item, Close):
                self.texts.pop(item.request_id, None)
                continue
            its, rows = rows[: item.rows], rows[item.rows :]
            self._take(item, its)
        assert not rows
        return True

    def _take(self, item: Open | Commit, rows: list[list[float]]) -> None:
        name, start, before = item.request_id, item.base_len - 1 - item.rows, item.base_len - len(item.tokens)
        assert rows == rows_of(name, start, item.rows).tolist()
        assert item.tokens == TEXTS[name][before : item.base_len]
        if isinstance(item, Open):
            assert before == 0
            self.rows[name] = []
        elif name not in self.texts:
            self.inbox.append([encode(Unknown([name]))])
            return
        else:
            assert before == self.texts[name], "each token comes once"
            assert start >= before - 1, "each row comes once"
        self.texts[name] = item.base_len
        self.rows[name] += range(start, item.base_len - 1)

    def receive(self) -> list[bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def close(self) -> None:
        self.texts.clear()
        self.inbox.clear()


BOTH = st.sampled_from(["d0", "d1"])
STEPS = st.tuples(
    st.just("step"),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), min_size=1),
    st.sampled_from(["early", "plain", "needed"]),
)
OTHERS = st.one_of(
    st.tuples(st.just("full"), BOTH, st.booleans()),
    st.tuples(st.just("forgets"), BOTH, st.sampled_from([*NAMES, "all"])),
    st.tuples(st.just("assign"), st.sets(BOTH), st.booleans()),
    st.tuples(st.just("preempt"), st.sampled_from(NAMES), st.integers(0, 9)),
    st.tuples(st.just("finish"), st.sampled_from(NAMES), st.just(0)),
)


@examples(400)
@given(
    st.lists(st.one_of(STEPS, STEPS, OTHERS), min_size=9, max_size=30),
    st.sampled_from([0, 8 * 7, 1 << 20]),
    st.sampled_from([(1, 1), (20, 1), (20, 6)]),
    st.sampled_from([4, 64]),
)
def test_each_drafter_gets_all_that_the_logs_have_of_its_requests(
    events: list[tuple[str, Any, Any]], capacity: int, bounds: tuple[int, int], most_rows: int
) -> None:
    drafters = {"d0": Drafter(), "d1": Drafter()}
    refs = {name: DrafterRef(name, "i", name, "", 1) for name in drafters}
    ends = dict.fromkeys(NAMES, 0)
    shipper = FeatureShipper(lambda head: None, handover_bytes=capacity)
    log = shipper._logs

    def step(counts: dict[str, int], kind: str) -> None:
        shipper.features_needed, rejected = kind == "needed", int(kind != "early")
        layer = torch.cat([rows_of(name, ends[name], count, rejected) for name, count in counts.items()])
        rows = step_of([(name, ends[name], count, TEXTS[name]) for name, count in counts.items()], rejected)
        run_step(shipper, rows, [layer], kind == "early")
        assert log.held <= capacity or kind != "needed"
        for name, count in counts.items():
            ends[name] += count
        assert log.waiting < bounds[0] + bounds[1]

    with (
        mock.patch.object(feature_link, "connect_dealer", lambda _, address, *__: address),
        mock.patch.object(feature_link, "Dealer", drafters.__getitem__),
        mock.patch.object(feature_link, "GREET_EVERY_S", 0.0),
        mock.patch.object(features, "HANDOVER_ROWS", most_rows),
        mock.patch.multiple(row_log, MOST_WAITING=bounds[0], AT_ONCE=bounds[1]),
    ):
        shipper.set_drafters(Wire(), "v", {refs["d0"]: 0})
        for number, (kind, what, more) in enumerate(events):
            match kind:
                case "step":
                    step(what, more)
                case "full":
                    drafters[what].is_full = more
                case "forgets" if more == "all":
                    drafters[what].texts.clear()
                    drafters[what].inbox.append([encode(Refused(HELLO_FIRST))])
                case "forgets":
                    drafters[what].texts.pop(more, None)
                case "assign":
                    shipper.set_drafters(Wire(), "v", {refs[name]: number if more else 0 for name in sorted(what)})
                case "preempt":
                    ends[what] = min(more, ends[what])
                case "finish":
                    shipper.finish([what])
                    ends[what] = 0
        shipper.set_drafters(Wire(), "v", {refs["d0"]: 0})
        drafters["d0"].is_full = False
        # All are computed again as far as they were before.
        step({name: max(log[name].end - end, 0) + 1 if name in log else 1 for name, end in ends.items()}, "needed")
        # What it forgot is known after the first; then one request's turn comes in each.
        for _ in range(2 + len(NAMES)):
            step(dict.fromkeys(NAMES, 1), "needed")
        for name, end in ends.items():
            assert set(drafters["d0"].rows[name]) >= set(range(log[name].start, end))
            assert capacity < 1 << 20 or log[name].start == 0
            assert drafters["d0"].texts[name] > end
        shipper.finish(NAMES)
        assert log.held == 0
        shipper.ship(step_of([]))
        assert not drafters["d0"].texts, "it is told of those that have ended"
        counted = shipper.take_counters()
        assert all(counted[name].dropped.get("overflow", 0) == each.refused for name, each in drafters.items())


def test_rows_of_requests_that_have_ended_are_never_projected() -> None:
    projected: list[list[float]] = []

    def project(rows: torch.Tensor) -> torch.Tensor:
        projected.extend(rows.tolist())
        return rows

    log = RowLogs(1 << 20, lambda name: project)
    add(log, step_of([("b", 0, 2, [])]), [rows_of("b", 0, 2)])
    add(log, step_of([(name, 0, 2, []) for name in "ac"]), [torch.cat([rows_of(name, 0, 2) for name in "ac"])])
    log.forget(["b", "stranger"])
    log.settle()
    assert log.fresh == {"a": 0, "c": 0}
    assert projected == [*rows_of("a", 0, 2).tolist(), *rows_of("c", 0, 2).tolist()]


@given(
    st.lists(
        st.tuples(st.integers(1, 2 * MOST_WAITING), st.sampled_from(["early", "plain", "needed"])), min_size=1, max_size=30
    )
)
@example([(1, "plain"), (AT_ONCE, "plain"), (AT_ONCE + 1, "plain")])
@example([(AT_ONCE, "plain")] * 10)
def test_few_rows_wait_and_fewer_are_projected_at_once(steps: list[tuple[int, str]]) -> None:
    projected: list[int] = []

    def project(rows: torch.Tensor) -> torch.Tensor:
        projected.append(len(rows))
        return rows

    shipper = FeatureShipper(lambda head: project)
    at = 0
    for count, kind in steps:
        before = sum(projected)
        shipper.features_needed = kind == "needed"
        run_step(shipper, step_of([("r", at, count, [])]), [torch.zeros(count, 1)], kind == "early")
        at += count
        assert max(projected, default=0) <= AT_ONCE
        is_kept = kind != "needed" and count <= AT_ONCE
        assert at - sum(projected) == shipper._logs.waiting < (MOST_WAITING + AT_ONCE if is_kept else 1), "nothing is left out"
        assert not is_kept or sum(projected) == before or AT_ONCE <= sum(projected) - before < 3 * AT_ONCE, "seldom"


def test_each_head_gets_rows_of_its_own_projection() -> None:
    log = RowLogs(1 << 20, {"a": lambda rows: rows * 2, "b": None}.__getitem__)
    for start in (0, 2):
        add(log, step_of([(name, start, 2, []) for name in "ab"]), [torch.cat([rows_of(name, start, 2) for name in "ab"])])
    log.settle()
    assert log.fresh == {"a": 0, "b": 0}
    assert b"".join(log["a"].part(1, 4)) == (rows_of("a", 1, 3) * 2).numpy().tobytes()
    assert b"".join(log["b"].part(0, 4)) == rows_of("b", 0, 4).numpy().tobytes()


@pytest.mark.parametrize("rejected", [0, 1])
def test_logged_rows_are_copies_of_all_layers_side_by_side(rejected: int) -> None:
    layers = [torch.arange(6.0).view(6, 1), torch.arange(6.0).view(6, 1) + 10]
    log = RowLogs(1 << 20, lambda name: None)
    add(log, step_of([("a", 0, 2, []), ("b", 5, 1, [])], rejected), layers)
    for layer in layers:
        layer.zero_()  # the runner reuses its memory
    log.settle()
    last = 2 + rejected
    assert b"".join(log["a"].part(0, 2)) == torch.tensor([[0.0, 10.0], [1.0, 11.0]]).numpy().tobytes()
    assert b"".join(log["b"].part(5, 6)) == torch.tensor([[last, 10.0 + last]]).numpy().tobytes()


def add(log: RowLogs, step: StepRows, layers: list[torch.Tensor]) -> None:
    """A step's rows, which drafters are in no hurry for."""
    log.begin(step.request_ids, sum(step.computed), layers, False)
    log.end(step)


class Bench:
    """A verifier's worker and two drafters, with requests that advance by rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, projection: Any = lambda head: None, handover_bytes: int = 0) -> None:
        self.drafters = {"d0": Drafter(), "d1": Drafter()}
        monkeypatch.setattr(feature_link, "connect_dealer", lambda _, address, *__: address)
        monkeypatch.setattr(feature_link, "Dealer", self.drafters.__getitem__)
        self.shipper = FeatureShipper(projection, handover_bytes=handover_bytes)
        self.epoch, self.epochs = 0, dict[DrafterRef, int]()
        self.ends = dict.fromkeys(NAMES, 0)

    def assign(self, heads: dict[str, str], weights: int = 0) -> None:
        self.epoch += 1
        refs = [DrafterRef(name, "i", name, "", 1, head=head) for name, head in heads.items()]
        self.epochs = {ref: self.epochs.get(ref, self.epoch) for ref in refs}
        self.shipper.set_drafters(Wire(), "v", self.epochs, weights)

    def live(self, steps: int = 2) -> None:
        for n in range(steps):
            counts = {name: 1 + (n + i) % 4 if self.ends[name] else 40 + 7 * i for i, name in enumerate(NAMES)}
            rows = torch.cat([rows_of(name, self.ends[name], count) for name, count in counts.items()])
            step = step_of([(name, self.ends[name], count, TEXTS[name]) for name, count in counts.items()])
            run_step(self.shipper, step, [rows])
            for name, count in counts.items():
                self.ends[name] += count


def test_drafts_are_asked_for_with_the_last_rows_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "HANDOVER_ROWS", 16)
    bench = Bench(monkeypatch)
    bench.assign({"d0": "", "d1": ""})
    bench.shipper.asks = {"a": (3, 0.25), "c": (2, 0.0), "gone": (1, 0.0)}
    bench.shipper.chance_weights = {name: [[float(i)] * 3] * 3 for i, name in enumerate(bench.drafters)}
    bench.live(1)
    asked: dict[str, NextItem] = {}
    for i, drafter in enumerate(bench.drafters.values()):
        for earlier in drafter.rounds[:-1]:
            assert earlier.next is None, "more rows follow"
        if drafter.rounds and (following := drafter.rounds[-1].next) is not None:
            assert following.chance_weights == [[float(i)] * 3] * 3
            asked |= {item.request_id: item for item in following.items}
    assert asked == {"a": NextItem("a", 41, 3, [], 0, 0.25), "c": NextItem("c", 55, 2, [], 0, 0.0)}


def test_hand_overs_are_counted_and_bring_all_that_was_computed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, handover_bytes=1 << 20)
    bench.assign({"d0": ""})
    bench.live()
    before = sum(bench.ends.values())
    bench.assign({"d1": ""})
    bench.live(1)
    assert bench.drafters["d1"].rows == {name: [*range(end)] for name, end in bench.ends.items()}
    given = bench.shipper.take_counters()["d1"]
    assert (given.handovers, given.handover_rows, given.handover_bytes) == (len(NAMES), before, 8 * before)
    assert given.handover_bytes < given.bytes_sent


def test_nothing_is_handed_over_to_another_head_nor_of_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    projections = {"": lambda rows: rows.clone(), "/other": lambda rows: rows.clone()}
    bench = Bench(monkeypatch, projections.__getitem__, 1 << 20)

    def gets_rows(drafter: str, head: str, weights: int = 0) -> bool:
        bench.assign({drafter: head}, weights)
        bench.live()
        return any(counts.handovers for counts in bench.shipper.take_counters().values())

    gets_rows("d0", "")
    assert not gets_rows("d1", "/other")
    assert gets_rows("d0", "/other"), "from one head to its like"
    assert not gets_rows("d1", "")
    assert not gets_rows("d0", "", weights=1)
    assert gets_rows("d1", "", weights=1)


def test_the_projection_of_the_fleets_own_head_is_read_where_drafters_connect_and_not_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = mock.Mock(side_effect=lambda head: lambda rows: rows.clone())
    bench = Bench(monkeypatch, read, 1 << 20)
    bench.live()
    bench.assign({"d0": ""})
    bench.live()
    newest = bench.shipper._links["d0"].project
    bench.assign({})
    bench.live()
    assert {log.project for log in bench.shipper._logs.values()} == {newest}
    assert read.call_args_list == 2 * [mock.call("")]


def test_a_drafter_whose_projection_does_not_load_gets_nothing_and_takes_nobody_elses_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def projection(head: str) -> None:
        if head and bench.epoch < 3:
            raise CheckpointError(f"{head}: gone") if bench.epoch == 1 else FileNotFoundError(head)

    bench = Bench(monkeypatch, projection)
    bench.assign({"d0": "", "d1": "/other"})
    bench.live()
    mine = {name for name in NAMES if Pairing(name).drafter({"d0": "", "d1": ""}) == "d0"}
    assert 0 < len(mine) < len(NAMES)
    assert bench.drafters["d0"].texts.keys() == mine
    assert not bench.drafters["d1"].texts
    for _ in range(2):
        bench.assign({"d0": "", "d1": "/other"})
    # It loads later: features come at the epoch of its other link.
    assert {name: link.hello.epoch for name, link in bench.shipper._links.items()} == {"d0": 1, "d1": 1}


def test_rows_of_steps_that_began_early_never_reach_a_drafter_with_another_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_log, "MOST_WAITING", 10)
    monkeypatch.setattr(row_log, "AT_ONCE", 8)
    bench = Bench(monkeypatch, {"": lambda rows: rows + 1, "/other": lambda rows: rows.clone()}.__getitem__, 1 << 20)
    bench.assign({"d0": ""})
    for position, count in ((0, 8), (8, 2), (10, 1), (11, 1), (12, 1)):
        if position == 11:
            bench.assign({"d1": "/other"})
        bench.shipper.features_needed = position == 12
        run_step(bench.shipper, step_of([("a", position, count, TEXTS["a"])]), [rows_of("a", position, count)], position < 11)
    assert bench.drafters["d1"].rows == {"a": [8, 9, 10, 11, 12]}, "the others were projected for another head"
