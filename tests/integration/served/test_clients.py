"""`outrider serve` end to end: what README shows, spans, a killed drafter."""

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.collector import Collector
from tests.support.fleet_process import ROOT, ServedFleet, wait_for

pytestmark = pytest.mark.engine

PROMPTS = [f"def function_{i}(a, b):\n    " for i in range(8)]
LONG = 400
APART = {"outrider": {"learn": False}}
"""Otherwise the first answer to a prompt would draft for the next ones, and drafters would have nothing to do."""


@pytest.fixture(scope="module")
def expected(fleet: ServedFleet) -> list[str]:
    """Greedy text of all prompts, undisturbed."""
    answer = fleet.complete(PROMPTS, max_tokens=LONG, ignore_eos=True, **APART)
    return [choice["text"] for choice in answer["choices"]]


def test_the_readmes_chat_and_tool_call(fleet: ServedFleet, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    chat, tool = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    exec((chat + "print()\n" + tool).replace("http://127.0.0.1:8000", fleet.url), {})
    written, called = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert written
    assert f"It prints `{called}`" in text


def drafter(fleet: ServedFleet) -> dict[str, object]:
    (found,) = fleet.fleet()["drafters"]
    return dict(found)


def stream_all(fleet: ServedFleet, begun: threading.Barrier) -> list[str]:
    """Eight streams at once; every one passes `begun` after its first token."""

    def one(prompt: str) -> str:
        pieces: list[str] = []

        def heard(piece: str) -> None:
            pieces.append(piece)
            if len(pieces) == 1:
                begun.wait(60)

        return fleet.stream(prompt, heard, max_tokens=LONG, **APART)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(one, PROMPTS))


def test_a_traced_request_is_one_tree_of_spans(fleet: ServedFleet, collector: Collector) -> None:
    fleet.complete("def untraced(", max_tokens=4)
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    body = {"model": "demo", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    answer = fleet.http.post("/v1/completions", json=body, headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"})
    assert answer.status_code == 200
    # A drafter is told that a request is over with the round that comes next.
    wait_for(lambda: len(collector.spans) >= 6, what="the first spans")

    def drafted_for_another() -> bool:
        fleet.complete(["def untraced(", "def neither("], max_tokens=4)
        return bool(collector.named("drafter"))

    wait_for(drafted_for_another, what="the drafter's span")
    spans = {span.name: span for span in collector.spans}
    parents = {name: span.parent_id for name, span in spans.items()}
    ids = {name: span.span_id for name, span in spans.items()}
    http, verifier = "POST /v1/completions", ids["verifier"]
    assert {span.trace_id for span in collector.spans} == {trace_id}
    assert len(collector.spans) == 7
    assert parents == {
        http: "00f067aa0ba902b7",
        "sequence": ids[http],
        "verifier": ids[http],
        **dict.fromkeys(("queue", "prefill", "decode", "drafter"), verifier),
    }
    assert {spans[name].service for name in ("sequence", "verifier", "drafter")} == {
        "outrider-gateway",
        "outrider-verifier",
        "outrider-drafter",
    }
    decode, drafted = spans["decode"].attributes, spans["drafter"].attributes
    assert decode["outrider.drafts"] > 0
    assert decode["outrider.acceptance_length"] == 1 + decode["outrider.accepted_tokens"] / decode["outrider.drafts"]
    # The request's own text drafts, too.
    assert drafted["outrider.draft_tokens"] > 0
    assert drafted["outrider.drafting_ms"] > 0


def test_killed_drafter_costs_no_request_and_comes_back(fleet: ServedFleet, expected: list[str]) -> None:
    victim = drafter(fleet)
    begun = threading.Barrier(len(PROMPTS), action=lambda: os.kill(int(str(victim["pid"])), signal.SIGKILL))
    assert stream_all(fleet, begun) == expected
    wait_for(lambda: fleet.fleet()["counters"]["restarts"] >= 1, what="the restart being counted")
    wait_for(lambda: drafter(fleet)["state"] == "ready" and drafter(fleet)["pid"] != victim["pid"], what="a new drafter")
    accepted = fleet.metric("outrider_accepted_tokens_total")
    assert fleet.complete(PROMPTS[0], max_tokens=LONG, ignore_eos=True, **APART)["choices"][0]["text"] == expected[0]
    wait_for(lambda: fleet.metric("outrider_accepted_tokens_total") > accepted, what="the new drafter's drafts accepted")
