"""What `--pace` can be told, and the time that passes."""

from collections.abc import Callable
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
        self.now, self._late_s = 100.0, late_s
        self.pacer = Pacer(lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds + self._late_s


def test_a_pace_is_a_profile_or_numbers_and_both_may_be_slower() -> None:
    assert options_module.parse(["--pace", "8b"]).pace == parse_pace("8b") == PROFILES["8b"]
    assert parse_pace("8b@4").target.fixed_ms == pytest.approx(4 * PROFILES["8b"].target.fixed_ms)
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


def test_a_pass_takes_as_long_as_stated_late_sleep_is_made_up_for_and_overruns_are_told() -> None:
    machine = Machine(late_s=0.001)
    for _ in range(100):
        machine.pacer.launch(0.010)
        machine.now += 0.004
        machine.pacer.finish()
    assert machine.now - 100.0 == pytest.approx(1.001)
    assert msgspec.structs.astuple(machine.pacer.counts) == pytest.approx((100, 1.0, 0, 0.0))
    machine = Machine()
    pacer = machine.pacer
    for seconds, further in ((0.010, 0.005), (0.0, 0.0)):
        pacer.launch(seconds)
        pacer.extend(further)
        machine.now += 0.020
        pacer.finish()
    assert machine.now - 100.0 == pytest.approx(0.04), "nobody slept"
    assert msgspec.structs.astuple(pacer.counts) == pytest.approx((2, 0.015, 1, 0.005)), "no time was stated for the second"
    assert msgspec.structs.astuple(pacer.counts.since(Paced(1, 0.015))) == pytest.approx((1, 0, 1, 0.005))


def test_a_paced_verifier_and_the_rivals_variant_are_ordinary_settings() -> None:
    rival = Configuration(PROBABILISTIC, 4)
    assert rival.served == "native"
    assert engine_args(rival, parse_pace("8b")) == {
        "worker_cls": "backend.lab.bench.paced_worker.PacedCpuWorker",
        "speculative_config": {"draft_sample_method": "probabilistic"},
    }
    assert engine_args(Configuration("off", 0), None) == {}


COST = HeadCost(Cost(1, 1000), block=Cost(2, 1000), store=Cost(1, 500), first=Cost(2, 0), draw=Cost(1, 2000))


def rows(count: int) -> Any:
    return SimpleNamespace(ids=[0] * count)


def test_every_pass_of_a_head_is_paced_by_its_rows_with_the_choice_of_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes and choices themselves take no time."""
    seen: list[str] = []
    head, block, batch = object.__new__(Head), object.__new__(BlockHead), object.__new__(DecodeBatch)
    monkeypatch.setattr(Head, "forward", lambda *given: None)
    monkeypatch.setattr(BlockHead, "store", lambda *given: None)
    monkeypatch.setattr(DecodeBatch, "pick", lambda batch: seen.append("pick"))
    monkeypatch.setattr(DecodeBatch, "advance_and_pick", lambda batch: (Head.forward(head, rows(3), None, None), batch.pick()))
    monkeypatch.setattr(Pacer, "finish", lambda pacer: seen.append("finish"))
    pacer = pace_drafter(Pace("", Cost(1, 1), COST))
    batch.count = 3

    def paced_s(run: Callable[..., Any], *given: Any) -> float:
        before = pacer.counts.paced_s
        run(*given)
        return pacer.counts.paced_s - before

    assert [paced_s(head.forward, rows(count), None, None) for count in (1, 3)] == pytest.approx([0.002, 0.004])
    assert paced_s(block.store, [0] * 4, None, None) == pytest.approx(0.003)
    assert paced_s(block.forward, rows(3), None, None) == pytest.approx(0.005)
    for is_sampled, draw_s in ((False, 0.0), (True, 0.007)):
        batch.rules = Rules.needed_by([Sampling(0, 1.0, is_sampled)])
        seen.clear()
        assert paced_s(batch.pick) == pytest.approx(0.002 + draw_s)
        assert paced_s(batch.advance_and_pick) == pytest.approx(0.004 + draw_s)
        assert seen == ["pick", "finish"] * 2
