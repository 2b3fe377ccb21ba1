"""The chaos campaign's judgement: it must see what is wrong, or its silence means nothing."""

import copy

import pytest

from tests.chaos.workload import Case, Outcome, SequenceStatistics, failed, what_is_wrong

BODY = {"stream": True, "max_tokens": 4}


def outcome(case: Case | None = None, text: str = "abcd", finish: str = "length", **fields: object) -> Outcome:
    made = Outcome(case or Case("greedy", BODY), done=True, usage={"completion_tokens": 4})
    for index in range(made.case.body.get("n", 1)):
        made.received[index] = SequenceStatistics(text, [finish], ["a"], [-0.5])
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda o: setattr(o.received[0], "text", "abxd"), "other text from character 2"),
        (lambda o: setattr(o.received[0], "finish", ["stop"]), "other finish reason"),
        (lambda o: setattr(o.received[0], "finish", []), "0 finish reasons"),
        (lambda o: setattr(o.received[0], "finish", ["length", "length"]), "2 finish reasons"),
        (lambda o: setattr(o.received[0], "tokens", ["b"]), "other tokens"),
        (lambda o: setattr(o.received[0], "logprobs", [-0.7]), "other log-probabilities"),
        (lambda o: setattr(o, "usage", {"completion_tokens": 5}), "usage"),
        (lambda o: setattr(o, "done", False), "without [DONE]"),
        (lambda o: o.received.clear(), "indices are missing"),
    ],
)
def test_what_is_wrong_is_seen(change, reason) -> None:
    reference = outcome()
    assert what_is_wrong(copy.deepcopy(reference), reference) is None
    bad = copy.deepcopy(reference)
    change(bad)
    assert reason in (what_is_wrong(bad, reference) or "")


def test_sampled_answers_are_judged_by_what_must_hold_and_some_have_nowhere_to_go() -> None:
    case = Case("sampled", BODY)
    assert what_is_wrong(outcome(case), None) is None
    assert "usage" in (what_is_wrong(outcome(case, usage={"completion_tokens": 3}), None) or "")
    nowhere = outcome(errors=[{"code": "no_verifier_ready"}])
    poisoned = outcome(errors=[{"code": "request_poisoned"}])
    left = outcome(errors=[{"code": "connection"}], abandoned=True)
    assert failed([outcome(), nowhere, poisoned, left]) == [poisoned]
