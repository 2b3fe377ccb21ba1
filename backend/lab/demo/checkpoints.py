"""Reads and writes the demo models: a transformers checkpoint for the target, the speculators layout for the drafter."""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from backend.lab.demo.model import llama_config, shape_of
from backend.lab.demo.tokenizer import BEGIN_ID, END_ID, PAD_ID
from backend.learning.head import Drafter
from backend.models.writing import speculators_config, write_checkpoint, write_json


def save_target(target: LlamaForCausalLM, directory: Path) -> None:
    """Write config, generation config and weights, in the weights' own dtype; `directory` must exist."""
    shape = shape_of(target)
    config = llama_config(shape, shape.num_hidden_layers, tied=True) | {"torch_dtype": str(target.dtype).removeprefix("torch.")}
    tensors = {name: tensor for name, tensor in target.state_dict().items() if name != "lm_head.weight"}
    write_checkpoint(directory, config, tensors)
    tokens = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    # The default for requests without a temperature: a model this small repeats itself when decoded greedily.
    generation = {**tokens, "do_sample": True, "temperature": 0.8}
    write_json(directory / "generation_config.json", generation)


def load_target(directory: Path) -> LlamaForCausalLM:
    """The target that `save_target` wrote to `directory`."""
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)


def save_drafter(drafter: Drafter, directory: Path, verifier: str) -> None:
    """Write the drafter in the speculators layout; `verifier` names the target it belongs to."""
    shape = drafter.shape.layer
    layer = llama_config(shape, layers=1, tied=False)
    config = speculators_config(layer, drafter.shape.feature_layers, verifier, ["LlamaForCausalLM"])
    write_checkpoint(directory, config, drafter.state_dict())
