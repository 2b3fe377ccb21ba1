"""When look-ups rest, when they wake, and what is not looked at meanwhile."""

import random
from collections.abc import Callable

import pytest

from backend.speculation.candidates import LOOKED_UP, RESTS_AFTER, Candidates
from backend.wire.engine import RequestOptions
from tests.unit.backend.speculation.driven import K, Named, speculator


def decoding(made: Named, requests: int, next_token: Callable[[], int]) -> dict[str, list[int]]:
    """Texts of that many requests, each of which has emitted a token."""
    texts = {f"r{i}": [next_token() for _ in range(20)] for i in range(requests)}
    for name, text in texts.items():
        made.ended(name, text, 19, 100.0)
    return texts


def timed(made: Named, requests: int, seconds: Callable[[int], float], times: int = 20) -> None:
    """Steps over few and many tokens take so long."""
    for _ in range(times):
        for tokens in (1, requests, requests + 1, 2 * requests, 200):
            made.step_times.observe(tokens, seconds(tokens), 0)


def plainly(made: Named, texts: dict[str, list[int]], steps: int, next_token: Callable[[str], int]) -> list[int]:
    """Runs steps with no drafter; returns how many requests were looked up in each."""
    found = []
    for _ in range(steps):
        attached = made.attach(list(texts), 0, 0.0)
        found.append(sum(request.looked_up_at == len(request.text) for request in made.candidates.requests.values()))
        made.learn()
        for name, text in texts.items():
            began = len(text)
            for token in [*attached.tokens.get(name, []), None]:
                true = next_token(name)
                text.append(true)
                if token != true:
                    break
            made.ended(name, text, began, 100.0)
        made.ask(0.0)
        made.stepped(len(texts), 0, 1e-3 * len(texts), 0.0)
    return found


def test_look_ups_rest_while_none_pays_and_wake_when_one_does() -> None:
    made, dice = Named("auto", lookups=True), random.Random(0)
    made.begin("r0", RequestOptions(prediction=[51, 52, 53]))
    timed(made, 32, lambda tokens: 1e-3 * tokens)
    texts = decoding(made, 32, lambda: dice.randrange(50))
    found = plainly(made, texts, 100, lambda name: dice.randrange(50))
    assert found[:RESTS_AFTER] == [32] * RESTS_AFTER
    assert sorted(found[-32:]) == [1] * 30 + [32] * 2, "all now and then, always the one that has a prediction"

    timed(made, 32, lambda tokens: 32e-3, times=200)
    plainly(made, texts, 3 * RESTS_AFTER, lambda name: len(texts[name]) % 5)
    assert made.attach(list(texts), 0, 0.0).tokens
    assert not made.candidates.rests


def test_a_step_whose_look_ups_do_not_pay_is_quiet() -> None:
    made, dice = Named("auto", lookups=True), random.Random(0)
    timed(made, 32, lambda tokens: 1e-3 * tokens)
    texts = decoding(made, 32, lambda: dice.randrange(3))
    plainly(made, texts, 7 * RESTS_AFTER - 1, lambda name: dice.randrange(3))
    assert made.candidates.rests
    assert made.attach(list(texts), 0, 0.0).is_quiet
    found = [request for request in made.candidates.requests.values() if request.looked_up_at == len(request.text)]
    assert len(found) == len(texts), "all were looked up"
    assert any(request.looked_up is not None for request in found)


@pytest.mark.parametrize("every", [1, 16])
def test_look_ups_stay_awake_by_what_they_gain_on_average(every: int) -> None:
    """With many requests, some step in sixteen has a look-up that pays; looking all up in each step may cost more."""
    candidates = Candidates(K, 4, True, 50)
    for candidates.steps in range(20 * RESTS_AFTER):
        candidates.rest(64, 2 * LOOKED_UP if candidates.steps % every == 0 else 0.0)
    assert candidates.rests == (every > 1)


@pytest.mark.parametrize(("requests", "wakes"), [(20, True), (100, False)])
def test_one_request_wakes_look_ups_where_its_drafts_bring_more_than_looking_all_up_costs(requests: int, wakes: bool) -> None:
    made, dice = Named("auto", lookups=True), random.Random(0)
    timed(made, requests, lambda tokens: 1e-2)
    texts = decoding(made, requests, lambda: dice.randrange(10_000))
    plainly(made, texts, 40, lambda name: dice.randrange(10_000))
    assert made.candidates.rests
    woke = False
    for _ in range(10 * RESTS_AFTER):
        plainly(made, texts, 1, lambda name: len(texts[name]) % 7 if name == "r0" else dice.randrange(10_000))
        woke = woke or not made.candidates.rests
    assert woke == wakes


def test_look_ups_rest_also_while_drafters_are_asked() -> None:
    made, dice = speculator("sync", lookups=True), random.Random(0)
    texts = decoding(made, 2 * RESTS_AFTER, lambda: dice.randrange(10_000))
    found = plainly(made, texts, 4 * RESTS_AFTER + RESTS_AFTER // 2, lambda name: dice.randrange(10_000))
    assert sorted(found[-2 * RESTS_AFTER :]) == [0] * 30 + [len(texts)] * 2
    indexed = [each.texts[0]._lookup._indexed for each in made.candidates.requests.values()]
    assert max(indexed) <= len(texts["r0"]) - RESTS_AFTER // 2, "they are not indexed at each step either"
