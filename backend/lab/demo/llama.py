"""The demo's Llama models, which are transformers' own: their sizes, files, loss and text.

A configuration is written with the field names of `config.json` that all versions of transformers and vLLM read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from backend.lab.demo.tokenizer import BEGIN_ID, END_ID, PAD_ID
from backend.learning.head import initialise
from backend.models.writing import write_checkpoint, write_json

TOKENS = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}


def llama_config(vocab_size: int, hidden: int, layers: int, head_dim: int, positions: int) -> dict[str, Any]:
    """The `config.json` of a Llama of these sizes, with two attention heads to a key-value head."""
    return TOKENS | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": hidden * 11 // 4,
        "max_position_embeddings": positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": hidden // head_dim,
        "num_hidden_layers": layers,
        "num_key_value_heads": max(1, hidden // head_dim // 2),
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def config_of(model: LlamaForCausalLM) -> dict[str, Any]:
    """The configuration from which a model was made, with the dtype that its weights have now."""
    sizes = model.config
    config = llama_config(
        sizes.vocab_size, sizes.hidden_size, sizes.num_hidden_layers, sizes.head_dim, sizes.max_position_embeddings
    )
    return config | {"torch_dtype": str(model.dtype).removeprefix("torch.")}


def new_llama(config: Mapping[str, Any]) -> LlamaForCausalLM:
    """An untrained model, whose layers at first add nothing to the residual stream."""
    model = LlamaForCausalLM(LlamaConfig.from_dict(dict(config)))
    model.model.apply(initialise)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def save_llama(model: LlamaForCausalLM, directory: Path) -> None:
    """Writes config, generation config and weights, in the weights' own dtype; `directory` must exist."""
    write_checkpoint(directory, config_of(model), dict(model.named_parameters()))
    # The default for requests without a temperature: a model this small repeats itself when decoded greedily.
    write_json(directory / "generation_config.json", TOKENS | {"do_sample": True, "temperature": 0.8})


def load_llama(directory: Path) -> LlamaForCausalLM:
    """The model in `directory`, in float32."""
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """The last three layers of a target with `layers` layers: late features predict the next token best."""
    return (layers - 3, layers - 2, layers - 1)


def features(model: LlamaForCausalLM, tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Scores `[batch, tokens, vocab]`, and the inputs of these n layers side by side, `[batch, tokens, n * hidden]`."""
    found = model(tokens, output_hidden_states=True, use_cache=False)
    return found.logits, torch.cat([found.hidden_states[layer] for layer in layers], dim=-1)


def generate(model: LlamaForCausalLM, prompts: Tensor, new_tokens: int, temperature: float = 0.0) -> Tensor:
    """Continues `prompts` `[batch, n]`; returns `[batch, n + new_tokens]`.  An end of text does not stop a row."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID)
    found: Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens, **sampling)
    return found
