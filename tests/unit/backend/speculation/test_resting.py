"""When look-ups rest, when they wake, and what is not looked at meanwhile."""

import random
from collections.abc import Callable

import pytest

from backend.speculation.chances import Rule
from backend.speculation.speculator import RECONSIDER_EVERY, Speculator
from backend.wire.engine import RequestOptions
from tests.unit.backend.speculation.driven import LONGEST_WAIT_S, K, speculator


def plainly(made: Speculator, texts: dict[str, list[int]], steps: int, next_token: Callable[[str], int]) -> list[int]:
    """Runs steps with no drafter; returns how many requests were looked up in each."""
    found = []
    for _ in range(steps):
        attached = made.attach(list(texts), 0, 0.0)
        found.append(sum(request.looked_up_at == len(request.text) for request in made.candidates.requests.values()))
        made.learn(0.0)
        for name, text in texts.items():
            began = len(text)
            for token in [*attached.tokens.get(name, []), None]:
                true = next_token(name)
                text.append(true)
                if token != true:
                    break
            made.ended(name, text, began, Rule.GREEDY, 100.0)
        made.ask(0.0)
        made.stepped(len(texts), 1e-3 * len(texts), 0)
    return found


def test_look_ups_rest_while_none_pays_and_wake_when_one_does() -> None:
    made, dice = Speculator("auto", K, 4, True, 50, LONGEST_WAIT_S), random.Random(0)
    made.candidates.asked("r0", RequestOptions(prediction=[51, 52, 53]), 0)
    for tokens in (1, 32, 33, 64, 200):
        for _ in range(20):
            made.step_times.observe(tokens, 1e-3 * tokens, 0)
    texts = {f"r{i}": [dice.randrange(50) for _ in range(20)] for i in range(32)}
    for name, text in texts.items():
        made.ended(name, text, 19, Rule.GREEDY, 100.0)
    found = plainly(made, texts, 100, lambda name: dice.randrange(50))
    assert found[:RECONSIDER_EVERY] == [32] * RECONSIDER_EVERY
    assert sorted(found[-32:]) == [1] * 30 + [32] * 2, "all now and then, always the one that has a prediction"

    for tokens in (1, 32, 33, 64, 200):
        for _ in range(200):
            made.step_times.observe(tokens, 1e-3, 0)
    plainly(made, texts, 3 * RECONSIDER_EVERY, lambda name: len(texts[name]) % 5)
    assert made.attach(list(texts), 0, 0.0).tokens
    assert not made.candidates.rests


def test_a_step_whose_look_ups_do_not_pay_is_quiet() -> None:
    made, dice = Speculator("auto", K, 4, True, 50, LONGEST_WAIT_S), random.Random(0)
    for tokens in (1, 32, 33, 64, 200):
        for _ in range(20):
            made.step_times.observe(tokens, 1e-3 * tokens, 0)
    texts = {f"r{i}": [dice.randrange(3) for _ in range(20)] for i in range(32)}
    for name, text in texts.items():
        made.ended(name, text, 19, Rule.GREEDY, 100.0)
    plainly(made, texts, 100, lambda name: dice.randrange(3))
    assert made.attach(list(texts), 0, 0.0).is_quiet
    assert any(request.looked_up is not None for request in made.candidates.requests.values())


@pytest.mark.parametrize(("requests", "wakes"), [(20, True), (100, False)])
def test_one_request_wakes_look_ups_where_its_drafts_bring_more_than_looking_all_up_costs(requests: int, wakes: bool) -> None:
    made, dice = Speculator("auto", K, 4, True, 50, LONGEST_WAIT_S), random.Random(0)
    for tokens in (1, 20, 21, 100, 101, 200):
        for _ in range(20):
            made.step_times.observe(tokens, 1e-2, 0)
    texts = {f"r{i}": [dice.randrange(10_000) for _ in range(20)] for i in range(requests)}
    for name, text in texts.items():
        made.ended(name, text, 19, Rule.GREEDY, 100.0)
    plainly(made, texts, 40, lambda name: dice.randrange(10_000))
    assert made.candidates.rests
    woke = False
    for _ in range(10 * RECONSIDER_EVERY):
        plainly(made, texts, 1, lambda name: len(texts[name]) % 7 if name == "r0" else dice.randrange(10_000))
        woke = woke or not made.candidates.rests
    assert woke == wakes


def test_look_ups_rest_also_while_drafters_are_asked() -> None:
    made, dice = speculator("sync", lookups=True), random.Random(0)
    texts = {f"r{i}": [dice.randrange(10_000) for _ in range(20)] for i in range(2 * RECONSIDER_EVERY)}
    for name, text in texts.items():
        made.ended(name, text, 19, Rule.GREEDY, 100.0)
    found = plainly(made, texts, 4 * RECONSIDER_EVERY + RECONSIDER_EVERY // 2, lambda name: dice.randrange(10_000))
    assert sorted(found[-2 * RECONSIDER_EVERY :]) == [0] * 30 + [len(texts)] * 2
    indexed = [each.texts[0]._lookup._indexed for each in made.candidates.requests.values()]  # type: ignore[attr-defined]
    assert max(indexed) <= len(texts["r0"]) - RECONSIDER_EVERY // 2, "they are not indexed at each step either"
