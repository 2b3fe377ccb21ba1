"""Plain steps are measured now and then while drafters are asked, so that `auto` sees when asking has become too dear,
and is near the best fixed way."""

from dataclasses import replace
from typing import Any

import pytest

from backend.speculation.outlook import Foresight, Prospect
from backend.speculation.waiting import IN_DOUBT, PROBE_EVERY, PROBE_STEPS, Ask, Asking, StepLoad, Times
from tests.unit.backend.speculation.driven import STEP_S, TOKEN_S, Drafter, Driven, speculator

DRIFT = 200
"""Steps over which asking becomes dearer: the machine's speed takes such a drift for its own."""


@pytest.mark.parametrize(("right", "asking"), [(0.6, 2.5), (0.5, 2.0), (0.4, 1.5)])
def test_drafters_whose_questions_become_too_dear_are_not_asked_any_more(right: float, asking: float) -> None:
    driven = Driven(speculator("auto"), Drafter(right))
    assert driven.run(2 * PROBE_EVERY)[-1].asks
    for step in range(6 * PROBE_EVERY):
        driven.asking = 1 + (asking - 1) * min(step / DRIFT, 1)
        driven.step()
    assert driven.speculator.choice.ask == Ask.PLAIN
    plain_s = STEP_S + TOKEN_S * driven.requests
    assert driven.speculator.step_times.at(driven.requests, asking=False) == pytest.approx(plain_s, rel=0.05)


@pytest.mark.parametrize(("prompts_s", "pays"), [(0.0, True), (2 * STEP_S, False)])
def test_what_asking_costs_where_prompts_are_computed_is_held_against_it(prompts_s: float, pays: bool) -> None:
    driven = Driven(speculator("auto"), Drafter(0.5), prompts_s=prompts_s)
    driven.run(2 * PROBE_EVERY)
    asked = []
    for _ in range(8 * PROBE_EVERY):
        driven.step()
        asked.append(driven.speculator.choice.ask != Ask.PLAIN)
    assert (sum(asked) > len(asked) / 2) is pays


@pytest.mark.parametrize("gain", [0.9 * IN_DOUBT, 1.5 * IN_DOUBT])
def test_drafters_rest_while_asking_them_is_in_doubt(gain: float) -> None:
    asking, drafted = Asking(), Prospect((0.0, 1.0), (0.0, gain - 1))
    times = Times(lambda base, drafts: 0.01, lambda base, drafts: 0.01, lambda n, k: 0.0, lambda n, k: 1.0)
    asking.choose(StepLoad(1, Prospect((0.0,), (0.0,)), drafted, Foresight(1, 1)), times)
    assert asking.choice.ask == Ask.DRAFT
    paused = []
    for _ in range(2 * PROBE_EVERY):
        asking.stepped()
        paused.append(asking.paused)
    rest = [*range(1, PROBE_STEPS + 1)]
    assert [each for each in paused if each] == (2 * rest if gain < IN_DOUBT else [])


@pytest.mark.parametrize(
    ("drafter", "load"),
    [
        pytest.param(Drafter(0.7), {"requests": 1}, id="a good drafter"),
        pytest.param(Drafter(0.6), {"requests": 8, "token_s": 1e-3}, id="rows cost much"),
        pytest.param(Drafter(0.7, draft_s=6e-3), {}, id="a slow drafter"),
        pytest.param(Drafter(0.4), {"period": 13}, id="repeating text"),
        pytest.param(Drafter(0.5), {"asking": 1.8}, id="dear to ask"),
        pytest.param(Drafter(0.45, draft_s=3e-3), {"requests": 6, "token_s": 3e-4}, id="near break-even"),
    ],
)
def test_auto_is_near_the_best_of_the_fixed_ways(drafter: Drafter, load: dict[str, Any]) -> None:
    def rate(mode: str) -> float:
        """Tokens per second, once enough has been seen."""
        driven = Driven(speculator(mode, lookups="period" in load), replace(drafter), **load)
        driven.run(400)
        began, turns = driven.now, driven.run(1000)
        return sum(turn.accepted + driven.requests for turn in turns) / (driven.now - began)

    requests = load.get("requests", 4)
    plain = requests / (STEP_S + load.get("token_s", TOKEN_S) * requests)
    assert rate("auto") > 0.96 * max(plain, rate("sync"), rate("ahead"))
