"""Outputs of 1,500 to 2,000 tokens with the demo models: at their end the drafter drafts what a fresh one would.

A rollback that went wrong raises no error, acceptance just decays.  So the drafter's drafts of the last quarter are compared,
token by token, with those of a drafter that is given the same tokens and features at once; where they are the same, so is their
acceptance.  Sampled at temperature 1, so that drafts are rejected all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from vllm.sampling_params import SamplingParams

from backend.drafter.proposer import DraftRequest, Until
from backend.lab.bench.prompts import Prompts
from tests.support.fleet_process import free_port
from tests.support.noting_drafter import NotingDrafter, eagle
from tests.support.processes import Verifier, demo_models

pytestmark = [pytest.mark.engine, pytest.mark.campaign, pytest.mark.timeout(900)]

K = 4
LENGTHS = (1500, 1750, 2000)
COMPARED = 30
SAME = 0.97
"""Share of drafts that must be the same: features of other batch shapes differ in their last bits, and near-ties may tip."""


def matching(draft: Sequence[int], text: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    return next((i for i, (a, b) in enumerate(zip(draft, text, strict=False)) if a != b), min(len(draft), len(text)))


@pytest.mark.parametrize("mode", ["sync", "ahead"])
def test_the_drafter_at_the_end_is_as_good_as_a_fresh_one(tmp_path: Path, mode: str) -> None:
    paths = demo_models()
    settings = {
        "mode": mode,
        "num_speculative_tokens": K,
        "verifier": {"draft_deadline_ms": 5000, "lookup": False},
    }
    verifier = Verifier(tmp_path, settings)
    # By TCP there is no shared memory: all features go through the socket, where the drafter notes them.
    drafter = NotingDrafter(f"tcp://127.0.0.1:{free_port()}", paths)
    try:
        verifier.set_drafters(drafter.ref)
        prompts = [Prompts(paths.target_dir, 64).make("code", f"long/{i}") for i in range(len(LENGTHS))]
        client = verifier.client
        ids = [
            client.add(prompt, SamplingParams(temperature=1.0, seed=i, max_tokens=length, ignore_eos=True))
            for i, (prompt, length) in enumerate(zip(prompts, LENGTHS, strict=True))
        ]
        client.finish_all(800)
        texts = {request: prompt + client.answers[request].tokens for request, prompt in zip(ids, prompts, strict=True)}
    finally:
        verifier.close()
        drafter.close()
    fresh, same, compared = eagle(paths), 0, 0
    for request, text in texts.items():
        by_length = drafter.drafts[request]
        last = [n for n in sorted(by_length) if n > len(text) * 3 // 4 and n + K <= len(text) and by_length[n]]
        chosen = last[:: max(len(last) // COMPARED, 1)]
        assert len(chosen) >= 10
        rows = torch.stack([drafter.features[request][p] for p in range(max(chosen) - 1)])
        theirs, ours = 0, 0
        for n in chosen:
            fresh.open("fresh", text[:n], n - 1, 0.0, drafter.sampling[request])
            (expected,) = fresh.draft([DraftRequest("fresh", n, n - 1, rows[: n - 1], Until(K))])
            fresh.close("fresh")
            # What was not worth going on with has been left out.
            drafted, whole = by_length[n], expected.tokens
            same, compared = same + (drafted == whole[: len(drafted)]), compared + 1
            ours, theirs = ours + matching(drafted, text[n:]), theirs + matching(whole[: len(drafted)], text[n:])
        quarter = [[matching(by_length[n], text[n:]) for n in by_length if a <= n / len(text) < a + 0.25] for a in (0.0, 0.75)]
        lengths = [1 + sum(kept) / len(kept) for kept in quarter if kept]
        print(
            f"{mode} {len(text)} tokens: acceptance length by quarter {lengths}, of a fresh drafter {1 + theirs / len(chosen)}"
        )
        assert abs(ours - theirs) <= 0.1 * len(chosen)
    print(f"{mode}: {same} of {compared} drafts are a fresh drafter's")
    assert same >= SAME * compared
