"""A widened target computes what the original computes, and its head still fits."""

import json
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from backend.lab.bench.widen import widen
from backend.models.demo import DRAFTER_DIR, TARGET_DIR
from backend.models.head_config import load_config
from tests.support.drafter_heads import check


def logits(directory: Path) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(directory).eval()
    ids = torch.randint(0, 2048, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found: torch.Tensor = model(ids).logits
    return found


def test_the_demo_pair_widened(tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    widen(TARGET_DIR, wide, 8, 1024)
    config = json.loads((wide / "config.json").read_text())
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (8, 1024)
    assert (wide / "tokenizer.json").is_file()
    assert not [line for line in check(str(DRAFTER_DIR), str(wide)) if not line.startswith("warning")]
    assert load_config(str(DRAFTER_DIR), str(wide)).aux_layers == load_config(str(DRAFTER_DIR), str(TARGET_DIR)).aux_layers
    before, after = logits(TARGET_DIR), logits(wide)
    assert float(before.abs().max()) > 1
    assert torch.allclose(before, after, atol=1e-4, rtol=0)
