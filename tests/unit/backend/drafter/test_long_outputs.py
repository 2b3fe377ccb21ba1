"""Long outputs: after hundreds of verifications and rejections the drafter's state is that of one that was told all at once.

A rollback that went wrong raises no error; drafts just get worse.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.drafter.proposer import DraftRequest, Until
from backend.drafter.service import DrafterService
from backend.fleet import DrafterRef
from tests.support.drafter_heads import TinyHead, make_proposer
from tests.support.simulated_link import Network, SimulatedDrafter, World
from tests.support.simulated_verifier import SimulatedVerifier, Text, simulated, write_text

HEAD = TinyHead(hidden=16, heads=2, kv_heads=1, max_position=4096)
PROMPT, LENGTH, K = 20, 620, 4
COMPARED = 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("long")


@pytest.fixture(scope="module")
def texts(directory: Path) -> dict[str, Text]:
    proposer = make_proposer(directory / "author", HEAD, cache_tokens=8192)
    return {name: write_text(proposer, seed, PROMPT, LENGTH, agreement=0.7) for seed, name in enumerate(("a", "b"))}


@pytest.mark.parametrize("mode", ["sync", "ahead"])
def test_the_last_drafts_are_those_of_a_fresh_drafter(directory: Path, texts: dict[str, Text], mode: str) -> None:
    world = World(0)
    network = Network(world)

    def make() -> DrafterService:
        return DrafterService("d0", make_proposer(directory / mode, HEAD, cache_tokens=8192), 60.0, world.monotonic)

    drafter = SimulatedDrafter(network, "sim://d0", make, 0.0004)
    with simulated(world, network):
        verifier = SimulatedVerifier(world, network, mode, lookup=False)
        verifier.drafters(DrafterRef("d0", "one", "sim://d0", "", 1))
        verifier.generate(texts)
    counters = verifier.stats.drafters["d0"]
    assert counters.accepted_tokens < counters.draft_tokens, "there were rejections"
    for name, text in texts.items():
        late = sorted(n for request, n in drafter.fresh if request == name and n > LENGTH * 3 // 4)[-COMPARED:]
        assert sum(len(drafter.fresh[name, n]) for n in late) > 15
        fresh = make_proposer(directory / mode, HEAD, cache_tokens=4096)
        for n in late:
            fresh.open("fresh", text.tokens[:n], n - 1, 0.0)
            (expected,) = fresh.draft([DraftRequest("fresh", n, n - 1, text.features[: n - 1], Until(K))])
            # What was not worth going on with has been left out.
            drafted = drafter.fresh[name, n]
            assert drafted == expected.tokens[: len(drafted)], f"{name} at {n}"
            fresh.close("fresh")
