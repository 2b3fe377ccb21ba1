"""Acceptance before and after a drafter is replaced in the middle of running requests, with the demo models."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from backend.bench.prompts import Prompts
from backend.demo import TARGET_DIR
from backend.fleet import DraftCounters, DrafterRef
from backend.verifier.client import sampling
from tests.support.processes import Drafter, Verifier

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

REQUESTS, PROMPT, TOKENS, CHANGE_AT = 8, 256, 160, 40


def length(after: DraftCounters, before: DraftCounters) -> float:
    return 1 + (after.accepted_tokens - before.accepted_tokens) / (after.drafts - before.drafts)


def run(verifier: Verifier, first: DrafterRef, second: DrafterRef, prompts: list[list[int]]) -> tuple[float, DraftCounters]:
    """Serves the prompts; `second` takes over when every request has `CHANGE_AT` tokens.

    Returns the acceptance length from then on, and the counters of `second`.
    """
    client = verifier.client
    verifier.set_drafters(first)
    client.run_until(lambda: not client.fresh_stats().drafters_down)
    ids = [client.add(prompt, sampling(TOKENS, 0.0)) for prompt in prompts]
    client.run_until(lambda: all(len(client.answers[i].tokens) >= CHANGE_AT for i in ids))
    verifier.set_drafters(second)
    before = client.fresh_stats().drafters.get(second.id, DraftCounters())
    client.finish_all()
    after = client.fresh_stats().drafters[second.id]
    client.answers.clear()
    return length(after, before), after


def test_acceptance_after_a_change_of_drafters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make = Prompts(str(TARGET_DIR), PROMPT)
    prompts = [make.make("code", str(i)) for i in range(REQUESTS)]
    options = {"draft_deadline_ms": 5000, "engine_args": {"enable_prefix_caching": False}}
    with ThreadPoolExecutor() as pool:
        starting = [
            pool.submit(Verifier, tmp_path, {"mode": "sync", "verifier": {**options, "handover_mib": mib}}) for mib in (64, 0)
        ]
        drafters = list(pool.map(lambda _: Drafter(tmp_path), range(3)))
        handing, bare = (each.result() for each in starting)
    refs = [msgspec.structs.replace(each.ref, id=f"drafter-{i}") for i, each in enumerate(drafters)]
    try:
        # Each drafter that takes over is new to these texts, so that nothing comes from its prefix cache.
        cold, _ = run(bare, refs[0], refs[1], prompts)
        after, counters = run(handing, refs[0], refs[2], prompts)
        warm, _ = run(handing, refs[0], refs[0], prompts)
    finally:
        for each in (handing, bare, *drafters):
            each.close()
    with capsys.disabled():
        print(
            f"\nacceptance length: undisturbed {warm:.3f}, new drafter with hand-over {after:.3f}, without {cold:.3f};"
            f" {counters.handovers} requests, {counters.handover_rows} rows, {counters.handover_bytes} bytes handed over"
        )
    assert counters.handovers == REQUESTS
    assert counters.handover_rows >= REQUESTS * (PROMPT + CHANGE_AT - 2)
    assert after == pytest.approx(warm, rel=0.05)
    assert cold < 0.95 * warm
