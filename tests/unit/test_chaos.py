"""The chaos campaign's judgement: it must see what is wrong, or its silence means nothing."""

from __future__ import annotations

import copy
import json
from collections import Counter

import httpx
import pytest

from tests.chaos.faults import FULL, QUICK, schedule
from tests.chaos.workload import Case, Outcome, SequenceStatistics, ask, cases, failed, what_is_wrong

BODY = {"stream": True, "max_tokens": 4}


def outcome(case: Case | None = None, text: str = "abcd", finish: str = "length", **fields: object) -> Outcome:
    made = Outcome(case or Case("greedy", "/v1/completions", BODY, True), 0.0, done=True, usage={"completion_tokens": 4})
    for index in range(made.case.body.get("n", 1)):
        made.told[index] = SequenceStatistics(text, [finish], ["a"], [-0.5])
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_the_schedule_is_repeatable_and_long_enough() -> None:
    assert schedule(FULL, 3) == schedule(FULL, 3) != schedule(FULL, 4)
    assert len(schedule(FULL, 0)) >= 30
    assert Counter(each.kind for each in schedule(QUICK, 0)) == QUICK


def test_every_kind_of_request_is_there() -> None:
    kinds = cases(100)
    assert {case.name for case in kinds if not case.exact} == {"sampled"}
    assert len({json.dumps(case.body, sort_keys=True) + case.path for case in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda o: setattr(o.told[0], "text", "abxd"), "other text from character 2"),
        (lambda o: setattr(o.told[0], "text", "abc"), "other text"),
        (lambda o: setattr(o.told[0], "finish", ["stop"]), "other finish reason"),
        (lambda o: setattr(o.told[0], "finish", []), "0 finish reasons"),
        (lambda o: setattr(o.told[0], "finish", ["length", "length"]), "2 finish reasons"),
        (lambda o: setattr(o.told[0], "tokens", ["b"]), "other tokens"),
        (lambda o: setattr(o.told[0], "logprobs", [-0.7]), "other log-probabilities"),
        (lambda o: setattr(o, "usage", {"completion_tokens": 5}), "usage"),
        (lambda o: setattr(o, "done", False), "without [DONE]"),
        (lambda o: o.told.clear(), "indices are missing"),
    ],
)
def test_what_is_wrong_is_seen(change, reason) -> None:
    reference = outcome()
    assert what_is_wrong(copy.deepcopy(reference), reference) is None
    bad = copy.deepcopy(reference)
    change(bad)
    assert reason in (what_is_wrong(bad, reference) or "")


def test_sampled_answers_are_judged_by_what_must_hold() -> None:
    case = Case("sampled", "/v1/completions", BODY, False)
    assert what_is_wrong(outcome(case), None) is None
    assert "usage" in (what_is_wrong(outcome(case, usage={"completion_tokens": 3}), None) or "")
    structured = Case("sampled json", "/v1/completions", {**BODY, "structured_outputs": {"json": {}}}, False)
    good = json.dumps({"items": ["a"] * 24, "count": 1})
    assert what_is_wrong(outcome(structured, good, "stop"), None) is None
    assert what_is_wrong(outcome(structured, good[:-5], "length"), None) is None
    assert what_is_wrong(outcome(structured, good[:-5], "stop"), None) == "no JSON"
    assert what_is_wrong(outcome(structured, '{"items": []}', "stop"), None) == "JSON of another schema"


def test_failed_or_nowhere_to_go() -> None:
    nowhere = outcome(errors=[{"code": "no_verifier_ready"}])
    poisoned = outcome(errors=[{"code": "request_poisoned"}])
    left = outcome(errors=[{"code": "connection"}], abandoned=True)
    assert failed([outcome(), nowhere, poisoned, left]) == [poisoned]


def test_silence_is_the_gap_around_a_moment() -> None:
    running = outcome(chunks=[1.0, 2.0, 5.0, 6.0])
    assert running.silence(3.0) == 3.0
    assert running.silence(1.8) == 3.0, "a chunk that was on its way came first"
    assert running.silence(1.2) == 1.0
    assert running.silence(0.5) is None
    assert running.silence(7.0) is None


async def test_streams_and_whole_answers_are_read_alike() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if not json.loads(request.content).get("stream"):
            choice = {"index": 0, "text": "ab", "finish_reason": "length", "logprobs": None}
            return httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 2}})
        chunks = [
            {"choices": [{"index": 0, "text": "a", "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "length"}]},
            {"choices": [], "usage": {"completion_tokens": 2}},
        ]
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        return httpx.Response(200, text=": keep-alive\n\n" + text + "data: [DONE]\n\n")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test") as http:
        streamed = Outcome(Case("", "/", {"stream": True}, True), 0.0)
        whole = Outcome(Case("", "/", {}, True), 0.0)
        for one in (streamed, whole):
            await ask(http, one.case, one)
        assert streamed.told == whole.told
        assert streamed.usage == whole.usage
        assert streamed.done
        assert whole.done
        assert len(streamed.chunks) == 2
