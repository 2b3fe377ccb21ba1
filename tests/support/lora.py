"""A random LoRA adapter for the demo target, in PEFT's layout.  Tests only."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from backend.models.demo import TARGET_DIR

RANK = 4


def write_adapter(directory: Path, seed: int = 3) -> Path:
    """Writes an adapter that is strong enough to change greedy text; returns its directory."""
    config = json.loads((TARGET_DIR / "config.json").read_text())
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        out = config["num_attention_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * 0.3
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.3
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"})
    )
    return directory
