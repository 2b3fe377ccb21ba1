"""A widened target computes what the original computes, and its head still fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from backend.lab.bench.widen import Preset, WidenError, widen, widen_pair, width_for
from backend.models.demo import DRAFTER_DIR, TARGET_DIR
from backend.models.head_config import load_config
from tests.support.drafter_heads import check

TOLERANCE = 1e-4


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A trained-looking Llama: no weight is zero."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        torch_dtype="float32",
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    directory = tmp_path / "small"
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def logits(directory: Path, vocab: int) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(directory, torch_dtype=torch.float32).eval()
    ids = torch.randint(0, vocab, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found: torch.Tensor = model(ids).logits
    return found


def test_logits_stay(small: Path, tmp_path: Path) -> None:
    widen(small, tmp_path / "wide", layers=9, width=128)
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (9, 128)
    assert (tmp_path / "wide" / "tokenizer.json").is_file()
    before, after = logits(small, 97), logits(tmp_path / "wide", 97)
    assert float(before.abs().max()) > 1
    assert torch.allclose(before, after, atol=TOLERANCE, rtol=0)


def test_smaller_than_it_is_and_other_models_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(WidenError, match="has 6 layers"):
        widen(small, tmp_path / "wide", layers=5, width=48)
    config = json.loads((small / "config.json").read_text()) | {"model_type": "gemma"}
    (small / "config.json").write_text(json.dumps(config))
    with pytest.raises(WidenError, match="only Llama"):
        widen(small, tmp_path / "wide", layers=6, width=48)


def test_the_width_meets_the_number_of_parameters(small: Path, tmp_path: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    width = width_for(config, 8, 1_000_000)
    widen(small, tmp_path / "wide", 8, width)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "wide")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1_000_000, rel=0.06)


def test_a_head_that_leaves_its_layers_to_the_depth_gets_them_spelled_out(small: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    config = json.loads((small / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 97,
        "num_hidden_layers": 1,
    }
    (head / "config.json").write_text(json.dumps(config))
    before = load_config(str(head), str(small)).aux_layers
    wide, named = widen_pair(small, head, Preset(12, 500_000), tmp_path / "pair")
    assert named is not None
    assert named != head
    assert load_config(str(named), str(wide)).aux_layers == before


@pytest.mark.skipif(not (TARGET_DIR / "config.json").is_file(), reason="the demo models are not there")
def test_the_demo_pair_widened(tmp_path: Path) -> None:
    config = json.loads((TARGET_DIR / "config.json").read_text())
    preset = Preset(int(config["num_hidden_layers"]) + 2, 10_000_000)
    wide, head = widen_pair(TARGET_DIR, DRAFTER_DIR, preset, tmp_path)
    assert head is not None
    assert not [line for line in check(str(head), str(wide)) if not line.startswith("warning")]
    assert load_config(str(head), str(wide)).aux_layers == load_config(str(DRAFTER_DIR), str(TARGET_DIR)).aux_layers
    vocab = int(config["vocab_size"])
    assert torch.allclose(logits(TARGET_DIR, vocab), logits(wide, vocab), atol=TOLERANCE, rtol=0)
