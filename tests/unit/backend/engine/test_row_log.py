"""Whatever happens, each drafter gets each row of its requests once and in order, as far as the logs have it."""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from backend.engine import features, row_log
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
from tests.support.rows import connected, run_step, step_of

NAMES = "abc"
TEXTS = {name: [1000 * i + position for position in range(900)] for i, name in enumerate(NAMES)}
OTHER = "/other"
"""Another head, which takes twice the features."""


def rows_of(name: str, start: int, count: int, rejected: int = 0, weights: int = 0) -> torch.Tensor:
    """Rows that tell request, the target's weights and position; those of rejected tokens are not numbers."""
    positions = range(start, start + count)
    final = torch.tensor([[256.0 * weights + ord(name), float(position)] for position in positions]).view(count, 2)
    return torch.cat([final, torch.full((rejected, 2), float("nan"))])


class Drafter:
    """A socket and the drafter behind it, which checks every round."""

    def __init__(self) -> None:
        self.is_full = False
        self.refused = 0
        self.epoch = self.weights = 0
        """The greeting's."""
        self.head = ""
        self.inbox: deque[list[bytes]] = deque()
        self.rounds: list[Round] = []
        self.texts: dict[str, int] = {}
        """Tokens of each request that is open here."""
        self.rows: dict[str, list[int]] = {}
        """Positions of the rows that came since then."""

    def send(self, header: bytes, frame: bytes = b"") -> bool:
        message = decode_to_drafter(header)
        if isinstance(message, Hello):
            self.epoch, self.weights = message.epoch, message.weights
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
        assert rows == (rows_of(name, start, item.rows, 0, self.weights) * (2 if self.head else 1)).tolist()
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


class Bench:
    """A verifier's worker and two drafters, with requests that advance by rows."""

    def __init__(self, projection: Any = lambda head: None, handover_bytes: int = 0) -> None:
        self.drafters = {"d0": Drafter(), "d1": Drafter()}
        self.shipper = FeatureShipper(projection, handover_bytes=handover_bytes)
        self.weights = 0
        self.ends = dict.fromkeys(NAMES, 0)

    def connected(self) -> AbstractContextManager[None]:
        return connected(self.drafters.__getitem__, GREET_EVERY_S=0.0)

    def assign(self, heads: dict[str, str], epoch: int = 0) -> None:
        for name, head in heads.items():
            self.drafters[name].head = head
        refs = {DrafterRef(name, "i", name, "", 1, head=head): epoch for name, head in sorted(heads.items())}
        self.shipper.set_drafters(Wire(), "v", refs, self.weights)

    def step(self, counts: dict[str, int], kind: str = "needed") -> None:
        """Each request advances by its count, and has a rejected token but in an early step."""
        self.shipper.features_needed, rejected = kind == "needed", int(kind != "early")
        both = [rows_of(name, self.ends[name], count, rejected, self.weights) for name, count in counts.items()]
        step = step_of([(name, self.ends[name], count, TEXTS[name]) for name, count in counts.items()], rejected)
        run_step(self.shipper, step, layers := torch.cat(both).split(1, dim=1), kind == "early")
        for layer in layers:
            layer.zero_()  # the runner reuses its memory
        for name, count in counts.items():
            self.ends[name] += count

    def live(self, steps: int = 2) -> None:
        for n in range(steps):
            self.step({name: 1 + (n + i) % 4 if self.ends[name] else 40 + 7 * i for i, name in enumerate(NAMES)})


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(handover_bytes=1 << 20)
    with made.connected():
        yield made


BOTH = st.sampled_from(["d0", "d1"])
STEPS = st.tuples(
    st.just("step"),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), min_size=1),
    st.sampled_from(["early", "plain", "needed"]),
)
OTHERS = st.one_of(
    st.tuples(st.just("full"), BOTH, st.booleans()),
    st.tuples(st.just("forgets"), BOTH, st.sampled_from([*NAMES, "all"])),
    st.tuples(st.just("assign"), st.dictionaries(BOTH, st.sampled_from(["", "", OTHER])), st.booleans()),
    st.tuples(st.just("weights"), st.just({"d0": ""}), st.just(0)),
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
    projections = {"": None, OTHER: lambda rows: 2 * rows}
    bench = Bench(projections.__getitem__, capacity)
    drafters, ends, is_one_head = bench.drafters, bench.ends, True

    def step(counts: dict[str, int], kind: str) -> None:
        bench.step(counts, kind)
        assert bench.shipper._logs.held <= capacity or kind != "needed"
        assert bench.shipper._logs.waiting < bounds[0] + bounds[1]

    with (
        bench.connected(),
        mock.patch.object(features, "HANDOVER_ROWS", most_rows),
        mock.patch.multiple(row_log, MOST_WAITING=bounds[0], AT_ONCE=bounds[1]),
    ):
        bench.assign({"d0": ""})
        for number, (kind, what, more) in enumerate(events, 1):
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
                    bench.assign(what, number if more else 0)
                    is_one_head &= OTHER not in what.values()
                case "weights":
                    bench.weights, is_one_head = number, False
                    bench.assign(what, number)
                case "preempt":
                    ends[what] = min(more, ends[what])
                case "finish":
                    bench.shipper.finish([what])
                    ends[what] = 0
        bench.assign({"d0": ""})
        drafters["d0"].is_full = False
        log = bench.shipper._logs
        # All are computed again as far as they were before.
        step({name: max(log[name].end - end, 0) + 1 if name in log else 1 for name, end in ends.items()}, "needed")
        # What it forgot is known after the first; then one request's turn comes in each.
        for _ in range(2 + len(NAMES)):
            step(dict.fromkeys(NAMES, 1), "needed")
        for name, end in ends.items():
            assert set(drafters["d0"].rows[name]) >= set(range(log[name].start, end))
            assert capacity < 1 << 20 or not is_one_head or log[name].start == 0
            assert drafters["d0"].texts[name] > end
        bench.shipper.finish(NAMES)
        assert log.held == 0
        bench.shipper.ship(step_of([]))
        assert not drafters["d0"].texts, "it is told of those that have ended"
        counted = bench.shipper.take_counters()
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


def add(log: RowLogs, step: StepRows, layers: list[torch.Tensor]) -> None:
    """A step's rows, which drafters are in no hurry for."""
    log.begin(step.request_ids, sum(step.computed), layers, False)
    log.end(step)


def test_drafts_are_asked_for_with_the_last_rows_of_a_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "HANDOVER_ROWS", 16)
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
    assert asked == {"a": NextItem("a", 41, 3, [], 0, 0.25, 3), "c": NextItem("c", 55, 2, [], 0, 0.0, 2)}


def test_hand_overs_are_counted_and_bring_all_that_was_computed_before(bench: Bench) -> None:
    bench.assign({"d0": ""})
    bench.live()
    before = sum(bench.ends.values())
    bench.assign({"d1": ""})
    bench.live(1)
    assert bench.drafters["d1"].rows == {name: [*range(end)] for name, end in bench.ends.items()}
    given = bench.shipper.take_counters()["d1"]
    assert (given.handovers, given.handover_rows, given.handover_bytes) == (len(NAMES), before, 8 * before)
    assert given.handover_bytes < given.bytes_sent


def test_the_projection_of_the_fleets_own_head_is_read_where_drafters_connect_and_not_in_a_step() -> None:
    first, newest = (lambda rows: rows.clone()), (lambda rows: rows.clone())
    read = mock.Mock(side_effect=[first, newest, newest])
    bench = Bench(read, 1 << 20)
    with bench.connected():
        bench.live()
        bench.assign({"d0": ""})
        begun = dict(bench.ends)
        for heads in ({"d0": ""}, {}):
            bench.assign(heads)
            bench.live()
        assert read.call_args_list == 2 * [mock.call("")]
        bench.assign({"d1": ""})
        bench.live(1)
    assert bench.drafters["d1"].rows == {name: [*range(begun[name], end)] for name, end in bench.ends.items()}


def test_a_drafter_whose_projection_does_not_load_gets_nothing_and_takes_nobody_elses_requests() -> None:
    loads = iter([CheckpointError("gone"), FileNotFoundError("gone")])

    def projection(head: str) -> None:
        if head and (failure := next(loads, None)) is not None:
            raise failure

    bench, heads = Bench(projection), {"d0": "", "d1": OTHER}
    with bench.connected():
        bench.assign(heads, 1)
        bench.live()
        mine = {name for name in NAMES if Pairing(name).drafter(dict.fromkeys(heads, "")) == "d0"}
        assert 0 < len(mine) < len(NAMES)
        assert bench.drafters["d0"].texts.keys() == mine
        assert not bench.drafters["d1"].texts
        for _ in range(2):
            bench.assign(heads, 1)
    # It loads later: features come at the epoch of its other link.
    assert {name: each.epoch for name, each in bench.drafters.items()} == {"d0": 1, "d1": 1}
