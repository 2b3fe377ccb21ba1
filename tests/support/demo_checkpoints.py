"""Reads the demo's drafter back into the module that is trained.  Tests only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from backend.learning.head import Drafter
from backend.learning.layers import LlamaSizes
from backend.models.writing import WEIGHTS


def load_drafter(directory: Path, embeddings: Tensor) -> Drafter:
    """The drafter that `save_drafter` wrote; `embeddings` `[vocab, hidden]` are its target's."""
    config = _config(directory)
    feature_layers = tuple(config["eagle_aux_hidden_state_layer_ids"])
    drafter = Drafter(_shape(config["transformer_layer_config"]), feature_layers, embeddings)
    drafter.load_state_dict(load_file(directory / WEIGHTS))
    return drafter.eval()


def _shape(config: Mapping[str, Any]) -> LlamaSizes:
    return LlamaSizes(**{name: config[name] for name in LlamaSizes.__dataclass_fields__ if name in config})


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config
