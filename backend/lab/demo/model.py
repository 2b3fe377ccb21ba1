"""The demo's target: transformers' Llama with tied embeddings, and the features that an EAGLE head reads from it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from backend.lab.demo.tokenizer import BEGIN_ID, END_ID, PAD_ID
from backend.learning.layers import Shape, initialise


def llama_config(shape: Shape, layers: int, tied: bool) -> dict[str, Any]:
    """The `config.json` of a Llama of these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "pad_token_id": PAD_ID,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def new_target(shape: Shape) -> LlamaForCausalLM:
    """An untrained target; its layers add nothing yet."""
    target = LlamaForCausalLM(LlamaConfig(**llama_config(shape, shape.num_hidden_layers, tied=True)))
    target.model.apply(initialise)
    for block in target.model.layers:
        nn.init.zeros_(block.self_attn.o_proj.weight)
        nn.init.zeros_(block.mlp.down_proj.weight)
    return target


def shape_of(target: LlamaForCausalLM) -> Shape:
    """The sizes of a target without scaled rotary positions."""
    config = target.config
    sizes = {name: getattr(config, name) for name in Shape.__dataclass_fields__ if hasattr(config, name)}
    return Shape(**sizes, rope_theta=config.rope_parameters["rope_theta"])


def logits_and_features(target: LlamaForCausalLM, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Next-token scores `[batch, tokens, vocab]`, and features: the inputs of n layers, `[batch, tokens, n * hidden]`."""
    output = target(tokens, output_hidden_states=True, use_cache=False)
    return output.logits, torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)
