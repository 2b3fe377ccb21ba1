"""Requests go to the draft model that brings their adapter the most, and the others are tried now and then."""

import random

from backend.speculation.pairing import TOGETHER, TRY_ONE_IN, Pairing, Preference, having

HEADS = {"d0": "code", "d1": "prose", "d2": "prose"}


def choosing(heads: dict[str, str] = HEADS) -> Preference:
    preference = Preference()
    preference.set_drafters(heads)
    return preference


def serve(preference: Preference, name: str, brings: dict[str, float], adapter: str = "", session: str = "") -> str:
    """One request of 20 verifications; the head that was chosen."""
    dice = random.Random(name)
    pairing, score = preference.begin(name, adapter, session)
    head = pairing.head
    assert head is not None
    assert score is not None
    for _ in range(20):
        score.learn(int(brings[head]) + (dice.random() < brings[head] % 1))
    preference.finish(pairing)
    return head


def test_each_adapter_gets_its_own_and_the_other_is_still_tried():
    preference = choosing()
    brings = {"a": {"code": 2.0, "prose": 1.5}, "b": {"code": 1.3, "prose": 2.5}}
    for adapter, best in (("a", "code"), ("b", "prose")):
        chosen = [serve(preference, f"{adapter}{number}", brings[adapter], adapter) for number in range(200)][20:]
        assert 1 - 2 / TRY_ONE_IN <= chosen.count(best) / len(chosen) < 1
    # Another model gets better, and is found.
    brings["a"]["prose"] = 4.0
    assert [serve(preference, f"c{number}", brings["a"], "a") for number in range(400)][-100:].count("prose") > 80


def test_a_session_keeps_its_head_unless_another_is_better_by_far():
    preference = choosing()
    better = {"code": {"code": 3.0, "prose": 1.0}, "prose": {"code": 1.0, "prose": 3.0}}
    first = [serve(preference, f"a{number}", better["code"], session="one") for number in range(3)]
    assert len(set(first)) == 1, "nothing is known yet, and others would be tried by turns"
    assert {serve(preference, f"b{number}", better["code"]) for number in range(3)} == {"code", "prose"} - set(first)
    other = ({"code", "prose"} - set(first)).pop()
    later = [serve(preference, f"c{number}", better[other], session="one") for number in range(400)]
    assert later[-100:].count(other) > 80
    # By a tenth, no more than that.
    preference = choosing()
    assert [preference.begin(each, "", each)[0].head for each in ("one", "two")] == ["code", "prose"]
    for number in range(200):
        serve(preference, f"d{number}", {"code": 2.05, "prose": 2.0})
    own = [preference.begin(f"e{number}", "", "two")[0].head for number in range(100)]
    assert own.count("prose") > 80


def test_equal_drafters_are_no_choice():
    preference = choosing({"d1": "", "d0": ""})
    assert preference.begin("r", "") == (Pairing("r"), None)
    assert {preference.drafter_of(Pairing(f"r{number}")) for number in range(20)} == {"d0", "d1"}


def test_a_head_that_has_gone_is_replaced_by_any():
    preference = choosing()
    pairing, _ = preference.begin("r", "")
    assert pairing.head is not None
    assert preference.drafter_of(pairing) in having(HEADS, pairing.head) != list(HEADS)
    preference.set_drafters({"d7": "other", "d8": "another"})
    assert preference.drafter_of(pairing) in ("d7", "d8")


def test_requests_that_begin_with_the_same_text_have_the_same_drafter():
    preference = choosing({f"d{number}": "" for number in range(8)})

    def pair(names: list[str], session: str = "") -> list[Pairing]:
        return [preference.begin(each, "", session)[0] for each in names]

    def drafters(pairings: list[Pairing]) -> set[str | None]:
        return {preference.drafter_of(each) for each in pairings}

    turns, samples = [f"turn-{number}" for number in range(8)], [f"{number}_cmpl-7" for number in range(TOGETHER)]
    assert len(drafters(pair(samples))) == 1
    assert len(drafters(pair([f"{number}_cmpl-7" for number in range(TOGETHER, 40)]))) > 1, "not too many"
    assert len(drafters(pair([f"cmpl_{number}" for number in range(20)]))) > 1
    chat = pair(turns, "chat")
    assert len(drafters(chat)) == 1
    assert len(drafters(pair(turns, "chat"))) > 1, "until some are over"
    for each in chat:
        preference.finish(each)
    assert drafters(pair(turns, "chat")) == drafters(chat)
