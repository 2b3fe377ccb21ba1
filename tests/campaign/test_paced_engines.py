"""`--pace` on real engines: whatever they do, time passes as stated."""

import os
import tempfile
from pathlib import Path

import pytest

from backend.lab.bench.engines import Processes, TargetFleet
from backend.lab.bench.measure import Snapshot, drafting_between, sample
from backend.lab.bench.options import PROBABILISTIC
from backend.lab.bench.pace import parse_pace
from backend.lab.bench.plan import Configuration, CoreSplit
from tests.support.processes import demo_models

pytestmark = [pytest.mark.engine, pytest.mark.campaign]


def test_steps_and_drafts_of_real_engines_take_at_least_the_stated_time(tmp_path: Path) -> None:
    """Sums are compared: a step whose forerunner slept too long is shorter."""
    tokens, pace, cores = 12, parse_pace("40,1000,6,0,4,0"), sorted(os.sched_getaffinity(0))
    split = CoreSplit((cores[0],), (cores[-1],))
    directory = tempfile.TemporaryDirectory(prefix="orpc")
    found: dict[str, tuple[float, Snapshot, Snapshot]] = {}
    with directory as name:
        configurations = [Configuration(mode, 2) for mode in ("off", PROBABILISTIC, "sync")]
        with Processes(demo_models(), split, Path(name), pace=pace) as processes:
            fleet = TargetFleet(processes, configurations, 256, 1, lambda _: None)
            for each in configurations:
                fleet.warm_up(each, [[9] * 8], 8, (1,), 1)
                load, before, after = fleet.measure(each, [[7] * 20], tokens, 0.0, 1)
                found[each.mode] = load.wall_s, before, after
                counted = sample(0, each, load, before, after, split)
                assert counted.paced["cycle_ms"] >= 40
                assert counted.t_verify_ms >= 40
                # Features leave when the step is over: drafts in turn are waited for.
                assert counted.paced["awaiting_ms"] >= 1 or each.mode != "sync"
    for mode, (wall_s, before, after) in found.items():
        assert before.steps is not None
        assert after.steps is not None
        steps = after.steps.since(before.steps)
        verified = after.verifier.verifications - before.verifier.verifications
        drafts = drafting_between(before.verifier, after.verifier)
        assert steps.passes == after.verifier.steps - before.verifier.steps > 0, mode
        native_s = steps.passes * 2 * 0.004 if mode == PROBABILISTIC else 0.0
        # Twenty tokens of the prompt, then one per verification and those drafted.
        scheduled = 20 + verified - 1 + drafts.draft_tokens
        assert steps.paced_s == pytest.approx(steps.passes * 0.040 + scheduled * 0.001 + native_s), mode
        assert wall_s >= steps.paced_s + steps.overrun_s - 0.005, mode
        if mode == "sync":
            assert drafts.rounds > 0
            assert drafts.draft_s / drafts.rounds >= 0.006
            assert before.passes is not None
            assert after.passes is not None
            assert after.passes.since(before.passes).paced_s >= drafts.rounds * 0.006
