"""Copies of models with another vocabulary.  Tests only."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def write_tokenizer(directory: Path, vocabulary: Mapping[str, int], is_byte_level: bool = True) -> None:
    """A tokenizer.json with these tokens.  It splits a text into characters, unless the whole text is a token."""
    tokenizer = Tokenizer(models.BPE(dict(vocabulary), [], ignore_merges=True))
    if is_byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel() if is_byte_level else decoders.Metaspace()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))


def write_permuted(model: Path, directory: Path, renamed: Collection[int] = ()) -> Path:
    """A copy of the model in which every token has another id, and the tokens `renamed` another name, too."""
    config = json.loads((model / "config.json").read_text())
    order = torch.randperm(config["vocab_size"], generator=torch.Generator().manual_seed(3))
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    new_ids = order.argsort().tolist()
    write_tokenizer(directory, {f"{token}!" * 2 if i in renamed else token: new_ids[i] for token, i in tokens.items()})
    rows = ("embed_tokens.weight", "lm_head.weight")
    tensors = load_file(model / "model.safetensors")
    permuted = {name: tensor[order] if name.endswith(rows) else tensor for name, tensor in tensors.items()}
    save_file(permuted, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory
