"""Requests go to the draft model that brings their kind the most, and the others are tried now and then."""

from __future__ import annotations

import random

from backend.speculation.pairing import Pairing, having
from backend.speculation.preference import CLUSTERS, TOGETHER, TRY_ONE_IN, Clusters, Preference

HEADS = {"d0": "code", "d1": "prose", "d2": "prose"}


def prompt(kind: str, dice: random.Random) -> list[int]:
    """Two kinds of text that share some of their words."""
    first = 0 if kind == "code" else 300
    return [first + dice.randrange(80) if dice.random() < 0.8 else 5000 + dice.randrange(20) for _ in range(200)]


def serve(preference: Preference, brings: dict[tuple[str, str], float], requests: int, seed: int = 0) -> list[tuple[str, str]]:
    """Requests of both kinds by turns, 20 verifications each; what was chosen for each kind."""
    dice, chosen = random.Random(seed), []
    for number in range(requests):
        kind, name = ("code", "prose")[number % 2], f"{seed}-{number}"
        head = preference.begin(name, prompt(kind, dice), "").head
        assert head is not None
        chosen.append((kind, head))
        for _ in range(20):
            preference.learn(name, 1 + (dice.random() < brings[kind, head] % 1) + int(brings[kind, head]))
        preference.forget(name)
    return chosen


def share(chosen: list[tuple[str, str]], kind: str, head: str) -> float:
    of_kind = [each for asked, each in chosen if asked == kind]
    return sum(each == head for each in of_kind) / len(of_kind)


def test_each_kind_gets_its_own_and_the_other_is_still_tried():
    preference = Preference()
    preference.set_drafters(HEADS)
    good = {("code", "code"): 2.0, ("code", "prose"): 0.5, ("prose", "prose"): 1.5, ("prose", "code"): 0.3}
    chosen = serve(preference, good, 400)[60:]
    for kind in ("code", "prose"):
        assert 1 - 1.5 / TRY_ONE_IN <= share(chosen, kind, kind) < 1
    # Another model gets better, and is found.
    good["code", "prose"] = 3.0
    assert share(serve(preference, good, 800, seed=1)[-200:], "code", "prose") > 0.8


def test_adapters_are_kinds_of_their_own():
    preference, dice = Preference(), random.Random(0)
    preference.set_drafters(HEADS)
    for number in range(200):
        for adapter, best in (("a", "code"), ("b", "prose")):
            name = f"{adapter}{number}"
            head = preference.begin(name, prompt("code", dice), adapter).head
            for _ in range(10):
                preference.learn(name, 3 if head == best else 1)
            if number > 50 and number % 16:
                assert preference.begin(name, [], "").head == head
    counts = [
        sum(preference.begin(f"{adapter}{number}", [], "").head == best for number in range(100, 200))
        for adapter, best in (("a", "code"), ("b", "prose"))
    ]
    assert min(counts) >= 90


def ask(preference: Preference, name: str, tenant: str, best: str, dice: random.Random, session: str = "") -> str:
    head = preference.begin(name, prompt("code", dice), "", tenant, session).head
    assert head is not None
    for _ in range(20):
        preference.learn(name, 3 if head == best else 1)
    preference.forget(name)
    return head


def test_a_tenant_gets_its_own_once_it_is_known_and_the_others_until_then():
    preference, dice = Preference(), random.Random(0)
    preference.set_drafters(HEADS)
    many = [ask(preference, f"a{number}", "many", "prose", dice) for number in range(400)]
    assert many.count("code") <= 400 / TRY_ONE_IN * 1.5
    # Each of these tenants comes once: none is tried with what the others know to be bad.
    once = [ask(preference, f"b{number}", f"new {number}", "prose", dice) for number in range(100)]
    assert once.count("code") <= 100 / TRY_ONE_IN * 2
    # What is best for one tenant is found, though all others want something else, and they keep theirs.
    rare = []
    for number in range(600):
        rare.append(ask(preference, f"c{number}", "rare", "code", dice))
        for each in range(3):
            ask(preference, f"d{number}-{each}", "many", "prose", dice)
    assert rare[-100:].count("code") > 80
    assert [ask(preference, f"e{number}", "many", "prose", dice) for number in range(100)].count("prose") > 80


def test_a_session_keeps_its_head_unless_another_is_better_by_far():
    preference, dice = Preference(), random.Random(0)
    preference.set_drafters(HEADS)
    first = [ask(preference, f"a{number}", "", "", dice, "one") for number in range(3)]
    assert len(set(first)) == 1, "nothing is known yet, and others would be tried by turns"
    assert {ask(preference, f"b{number}", "", "", dice) for number in range(3)} == {"code", "prose"} - set(first)
    other = ({"code", "prose"} - set(first)).pop()
    later = [ask(preference, f"c{number}", "", other, dice, "one") for number in range(400)]
    assert later[-100:].count(other) > 80
    # By a tenth, no more than that.
    preference = Preference()
    preference.set_drafters(HEADS)
    assert [preference.begin(each, [1, 2, 3], "", "", each).head for each in ("one", "two")] == ["code", "prose"]
    for number in range(200):
        head = preference.begin(f"d{number}", [1, 2, 3], "").head
        for place in range(20):
            preference.learn(f"d{number}", 2 + (head == "code" and place == 0))
    own = [preference.begin(f"e{number}", [1, 2, 3], "", "", "two").head for number in range(100)]
    assert own.count("prose") > 80


def test_equal_drafters_are_no_choice():
    preference = Preference()
    preference.set_drafters({"d1": "", "d0": ""})
    assert preference.begin("r", [1, 2], "") == Pairing("r")
    assert {preference.drafter_of(f"r{number}") for number in range(20)} == {"d0", "d1"}


def test_a_head_that_has_gone_is_replaced_by_any():
    preference = Preference()
    preference.set_drafters(HEADS)
    head = preference.begin("r", [1, 2, 3], "").head
    assert head is not None
    assert preference.drafter_of("r") in having(HEADS, head) != list(HEADS)
    preference.set_drafters({"d7": "other", "d8": "another"})
    assert preference.drafter_of("r") in ("d7", "d8")
    assert preference.begin("r", [1, 2, 3], "").head == head, "a request keeps its own, should it come back"


def test_requests_that_begin_with_the_same_text_have_the_same_drafter():
    preference = Preference()
    preference.set_drafters({f"d{number}": "" for number in range(8)})

    def drafters(names: list[str], tenant: str = "", session: str = "") -> set[str | None]:
        for each in names:
            preference.begin(each, [1, 2], "", tenant, session)
        return {preference.drafter_of(each) for each in names}

    turns, samples = [f"turn-{number}" for number in range(8)], [f"{number}_cmpl-7" for number in range(TOGETHER)]
    assert len(drafters(samples)) == 1
    assert len(drafters([f"{number}_cmpl-7" for number in range(TOGETHER, 40)])) > 1, "not too many"
    assert len(drafters([f"cmpl_{number}" for number in range(20)])) > 1
    assert len(drafters(turns, "me", "chat")) == 1
    for each in turns:
        preference.forget(each)
    assert len({preference.drafter_of(each) for each in turns}) > 1
    assert len(set.union(*(drafters([f"x{tenant}"], f"{tenant}", "chat") for tenant in range(20)))) > 1


def test_clusters_are_bounded_and_tell_texts_apart():
    clusters, dice = Clusters(), random.Random(1)
    assert len({clusters.of(prompt("code", dice)) for _ in range(50)}) == 1
    assert clusters.of(prompt("prose", dice)) != clusters.of(prompt("code", dice))
    for number in range(100):
        assert 0 <= clusters.of([number * 7 + dice.randrange(3) for _ in range(50)]) < CLUSTERS
