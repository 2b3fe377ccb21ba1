"""What `--pace` can be told, and the time that passes."""

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from backend.drafter.decoding import DecodeBatch
from backend.drafter.dflash import BlockHead
from backend.drafter.draws import Rules
from backend.drafter.head import Head
from backend.drafter.proposer import Sampling
from backend.lab.bench import options as options_module
from backend.lab.bench.engines import engine_args
from backend.lab.bench.options import PROBABILISTIC
from backend.lab.bench.pace import PROFILES, Cost, HeadCost, Pace, Paced, parse_pace
from backend.lab.bench.pacing import Pacer, pace_drafter
from backend.lab.bench.plan import Configuration


def head(fixed_ms: float, token_us: float) -> HeadCost:
    return HeadCost(Cost(fixed_ms, token_us), Cost(fixed_ms, token_us))


class Machine:
    """A clock that sleeping moves, a little further than asked."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now, self.slept, self._late_s = 100.0, 0.0, late_s

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds + self._late_s


def test_a_pace_is_a_profile_or_numbers_and_both_may_be_slower() -> None:
    assert options_module.parse(["--pace", "8b"]).pace == parse_pace("8b") == PROFILES["8b"]
    assert parse_pace("8b@4").target.fixed_ms == pytest.approx(4 * PROFILES["8b"].target.fixed_ms)
    assert parse_pace("6,32") == Pace("6,32", Cost(6, 32))
    assert parse_pace("6,32,0.4,1.5").native == head(0.4, 1.5), "the same head, unless said otherwise"
    assert parse_pace("6,32,1,5,0.3,1@2") == Pace("6,32,1,5,0.3,1@2", Cost(12, 64), head(2, 10), head(0.6, 2))
    assert "6 ms + 32 us per token" in str(parse_pace("6,32"))
    assert "one-pass" in str(parse_pace("8b"))
    assert "one-pass" not in str(parse_pace("6,32,1,5"))


@pytest.mark.parametrize("text", ["", "9b", "6", "6,32,1", "6,-1", "6,x", "8b@0", "8b@x", "8b@inf", "nan,1", "1,2,3,4,5,6,7,8"])
def test_any_other_pace_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_module.parse(["--pace", text])
    assert "there are 8b, 70b, and two, four or six numbers" in capsys.readouterr().err


def test_a_pass_takes_as_long_as_stated_and_late_sleep_is_made_up_for() -> None:
    machine = Machine(late_s=0.001)
    pacer = Pacer(machine.clock, machine.sleep)
    for _ in range(100):
        pacer.launch(0.010)
        machine.now += 0.004
        pacer.finish()
    assert machine.now - 100.0 == pytest.approx(1.001)
    assert msgspec.structs.astuple(pacer.counts) == pytest.approx((100, 1.0, 0, 0.0))


def test_a_machine_that_takes_longer_is_told_of() -> None:
    machine = Machine()
    pacer = Pacer(machine.clock, machine.sleep)
    pacer.launch(0.010)
    pacer.extend(0.005)
    machine.now += 0.020
    pacer.finish()
    assert machine.slept == 0
    assert msgspec.structs.astuple(pacer.counts) == pytest.approx((1, 0.015, 1, 0.005))
    assert msgspec.structs.astuple(pacer.counts.since(Paced(1, 0.015))) == pytest.approx((0, 0, 1, 0.005))
    pacer.launch(0.0)
    machine.now += 0.020
    pacer.finish()
    assert (pacer.counts.passes, pacer.counts.overruns) == (2, 1), "no time was stated"


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a head's pass was called with.  Passes and choices take no time."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Head, "forward", lambda *given: seen.append(given))
    monkeypatch.setattr(BlockHead, "store", lambda *given: None)
    monkeypatch.setattr(DecodeBatch, "pick", lambda batch: None)
    monkeypatch.setattr(DecodeBatch, "advance_and_pick", lambda batch: (batch.advance(), batch.pick()))
    monkeypatch.setattr(DecodeBatch, "advance", lambda batch: Head.forward("head", SimpleNamespace(ids=[0] * 3), None, None))  # type: ignore[arg-type]
    return seen


def test_every_pass_of_a_head_is_paced_by_its_rows(heads: list[tuple[Any, ...]]) -> None:
    pacer = pace_drafter(parse_pace("1,1,2,1000"))
    began = time.monotonic()
    for rows in (1, 3):
        Head.forward("head", SimpleNamespace(ids=[0] * rows), "features", None)  # type: ignore[arg-type]
    assert time.monotonic() - began >= 0.008
    assert [(head, len(rows.ids), *others) for head, rows, *others in heads] == [
        ("head", 1, "features", None),
        ("head", 3, "features", None),
    ]
    assert (pacer.counts.passes, pacer.counts.overruns) == (2, 0)
    assert pacer.counts.paced_s == pytest.approx(0.008)


@pytest.mark.usefixtures("heads")
@pytest.mark.parametrize(("is_sampled", "paced_s"), [(False, 0.002 + 0.004), (True, 0.002 + 0.004 + 2 * 0.007)])
def test_a_token_is_chosen_within_the_pass_before_it(monkeypatch: pytest.MonkeyPatch, is_sampled: bool, paced_s: float) -> None:
    seen: list[str] = []
    monkeypatch.setattr(DecodeBatch, "pick", lambda batch: seen.append("pick"))
    monkeypatch.setattr(Pacer, "finish", lambda pacer: seen.append("finish"))
    cost = HeadCost(Cost(1, 1000), first=Cost(2, 0), draw=Cost(1, 2000))
    pacer, batch = pace_drafter(Pace("", Cost(1, 1), cost)), object.__new__(DecodeBatch)
    batch.rules, batch.count = Rules.needed_by([Sampling(0, 1.0, is_sampled)]), 3
    batch.pick()
    batch.advance_and_pick()
    assert seen == ["pick", "finish", "pick", "finish"]
    assert pacer.counts.passes == 2
    assert pacer.counts.paced_s == pytest.approx(paced_s)


@pytest.mark.usefixtures("heads")
def test_a_one_pass_head_takes_the_time_of_a_block_and_of_its_context() -> None:
    pace = Pace("", Cost(1, 1), HeadCost(Cost(100, 0), Cost(2, 1000), Cost(1, 500)))
    pacer, block = pace_drafter(pace), object.__new__(BlockHead)
    block.store([0] * 4, "places", "features")  # type: ignore[arg-type]
    block.forward(SimpleNamespace(ids=[0] * 3), None, None)  # type: ignore[arg-type]
    assert pacer.counts.paced_s == pytest.approx(0.003 + 0.005)


def test_a_paced_verifier_and_the_rivals_variant_are_ordinary_settings() -> None:
    rival = Configuration(PROBABILISTIC, 4)
    assert rival.served == "native"
    assert engine_args(rival, parse_pace("8b")) == {
        "worker_cls": "backend.lab.bench.paced_worker.PacedCpuWorker",
        "speculative_config": {"draft_sample_method": "probabilistic"},
    }
    assert engine_args(Configuration("off", 0), None) == {}
