"""A head that drafts in one pass, with random weights, drafts the same in our runtime and in vLLM's own, token by token."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm.sampling_params import SamplingParams

from backend.drafter.dflash import DFlashProposer
from backend.drafter.proposer import DraftRequest, Until
from backend.models.checkpoint import load_drafter
from backend.models.demo import TARGET_DIR
from backend.models.head_config import load_config
from backend.models.resolve import ResolvedModels
from tests.support import run_native_drafts
from tests.support.drafter_heads import TinyHead, write_head
from tests.support.processes import Apart, Child
from tests.support.run_native_drafts import Proposed

pytestmark = pytest.mark.engine

K, CLOSE_CALL = 6, 1e-3
PROMPTS = [[7 + 31 * i + j for j in range(5 + 9 * i)] for i in range(4)]
SIZES: dict[str, Any] = {
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "inner": 128,
    "vocab": 2048,
    "draft_vocab": 2048,
    "layers": 2,
}
WINDOW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "use_sliding_window": True}
# The only key for layers of a DSpark head that vLLM's V1 runner reads, too.
LAYERS = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
IN_PLACE = LAYERS | WINDOW | {"sample_from_anchor": False}
HEADS = [
    pytest.param(TinyHead("dflash", **SIZES), id="each sees all", marks=pytest.mark.campaign),
    pytest.param(TinyHead("dflash", **SIZES, dflash=WINDOW), id="causal with a window"),
    pytest.param(TinyHead("dspark", **SIZES | {"draft_vocab": 512}, dflash=LAYERS), id="DSpark, reduced vocabulary"),
    pytest.param(TinyHead("dspark", **SIZES, dflash=IN_PLACE), id="DSpark, causal with a window, masks draw in their places"),
]


def write(directory: Path, head: TinyHead) -> str:
    """Writes a head.  Its layers share the norm of their keys: vLLM 0.32's kernel for CPUs takes the first layer's for all."""
    head_dir = write_head(directory, head)
    tensors = load_file(directory / "model.safetensors")
    tensors["layers.1.self_attn.k_norm.weight"] = tensors["layers.0.self_attn.k_norm.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return head_dir


def native_drafts(directory: Path, head_dir: str) -> list[Proposed]:
    """What vLLM proposes with this head for `PROMPTS`, all at once."""
    # What vLLM calls DFlash is a block of the latest token and as many masks as tokens, the last of which DSpark may lack.
    block = load_config(head_dir).block
    masks = K - 1 if block is not None and block.anchored else K
    speculation = {"verifier": {"engine_args": {"speculative_config": {"method": "dflash"}}}}
    settings = {"mode": "native", "num_speculative_tokens": masks} | speculation
    paths = ResolvedModels(str(TARGET_DIR), head_dir, "dflash", "demo")
    address = f"ipc://{directory}/v{os.urandom(3).hex()}.sock"
    child = Child(run_native_drafts.main, {"settings": settings, "paths": paths, "address": address}, directory)
    client = Apart(child.address)
    try:
        client.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        child.tell("what was proposed?")
        found: list[Proposed] = child.hear()
    finally:
        client.close()
        child.close()
    return found


@pytest.mark.parametrize("head", HEADS)
def test_the_same_head_drafts_the_same_as_in_vllm(tmp_path: Path, head: TinyHead) -> None:
    head_dir = write(tmp_path / "head", head)
    ours = DFlashProposer(load_drafter(head_dir, str(TARGET_DIR), raw=True), 4096)
    compared = set()
    for each in native_drafts(tmp_path, head_dir):
        new = [*each.tokens[1:], each.next_token]
        if each.positions[0] == 0:
            ours.open(each.request_id, [each.tokens[0], *new], len(new), 0.0)
        else:
            assert ours.commit(each.request_id, each.positions[-1] + 2, new, len(new), 0.0)
        (drafted,) = ours.draft([DraftRequest(each.request_id, each.positions[-1] + 2, len(new), each.features, Until(K))])
        leads = drafted.signs[1::2]
        sure = [i for i, lead in enumerate(leads) if lead > CLOSE_CALL]
        if head.kind == "dspark":
            # A token depends on the one before it.
            sure = [i for i in sure if sure[: i + 1] == list(range(i + 1))]
        assert len(leads) == len(each.draft) == K
        assert [drafted.tokens[i] for i in sure] == [each.draft[i] for i in sure]
        compared |= {(each.request_id, each.positions[-1], i) for i in sure}
    print(f"{len(compared)} draft tokens compared")
    assert len(compared) > 300
