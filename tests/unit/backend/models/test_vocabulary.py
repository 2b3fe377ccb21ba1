"""Two vocabularies: which tokens they share, what stands in for others, and which pairs are refused."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from backend.models.demo import DRAFT_MODEL_DIR, TARGET_DIR
from backend.models.head_config import CheckpointError, load_config
from backend.models.vocabulary import LEAST_SHARED, NO_ID, SharedVocabulary, shared_tokens
from tests.support.other_vocabulary import write_tokenizer
from tests.support.properties import examples

MODEL = load_config(str(DRAFT_MODEL_DIR), str(TARGET_DIR))
VOCABULARIES = st.lists(st.text("abcĠ", min_size=1, max_size=3), min_size=1, max_size=12, unique=True).map(
    lambda tokens: {token: number for number, token in enumerate(tokens)}
)


def compare(
    directory: Path, own: dict[str, int], target: dict[str, int], rows: int = 100, levels: str = "bb"
) -> SharedVocabulary | None:
    """`levels`: for either, `b` if it is byte-level."""
    for name, vocabulary, level in zip(("own", "target"), (own, target), levels, strict=True):
        write_tokenizer(directory / name, vocabulary, level == "b")
    model = replace(MODEL, own_vocab_size=rows, vocab_size=100)
    return shared_tokens(model, str(directory / "own"), str(directory / "target"))


@examples(100)
@given(own=VOCABULARIES, target=VOCABULARIES)
def test_shared_tokens_have_the_same_name_and_too_few_are_refused(own: dict[str, int], target: dict[str, int]) -> None:
    common = own.keys() & target.keys()
    with tempfile.TemporaryDirectory() as directory:
        if not common or len(common) < LEAST_SHARED * min(len(own), len(target)):
            with pytest.raises(CheckpointError, match=f"shares {len(common)} tokens") as error:
                compare(Path(directory), own, target)
            assert "\n" not in str(error.value)
            return
        shared = compare(Path(directory), own, target)
    if shared is None:
        assert own == target
        return
    assert shared.ids == {target[token]: own[token] for token in common}
    assert list(shared.ids) == sorted(shared.ids)
    assert shared.differ == any(own[token] != target[token] for token in common)
    read = shared.inputs()
    assert len(read) == 100
    assert all(read[number] == mine for number, mine in shared.ids.items())
    for token, number in target.items():
        if token not in own:
            # The last of its characters that the draft model knows.
            assert read[number] == next((own[letter] for letter in reversed(token) if letter in own), NO_ID)


def test_tokens_without_a_row_are_not_shared(tmp_path: Path) -> None:
    shared = compare(tmp_path, {"a": 3, "b": 1, "c": 2, "d": 0}, {"a": 0, "b": 1, "c": 100, "d": 4, "ba": 5}, rows=3)
    assert shared is not None
    assert shared.ids == {1: 1, 4: 0}, "`a` has no row in the draft model, `c` none in the target"
    assert shared.inputs()[:6] == [NO_ID, 1, NO_ID, NO_ID, 0, NO_ID]


def test_byte_level_and_sentencepiece_are_compared_by_text(tmp_path: Path) -> None:
    pieces = {"▁the": 5, "the": 6, "▁": 7, "<0x20>": 1, "<0x0A>": 2, "é": 9, "<0xC3>": 3, "Ã©": 4, "</s>": 0}
    byte_level = {"Ġthe": 0, "the": 1, "Ġ": 2, "Ċ": 3, "Ã©": 4, "Ã": 5, "</s>": 6}
    wanted = {0: 5, 1: 6, 2: 7, 3: 2, 4: 9, 6: 0}
    shared = compare(tmp_path / "a", pieces, byte_level, levels="pb")
    assert shared is not None
    assert shared.ids == wanted
    other_way = compare(tmp_path / "b", byte_level, pieces, levels="bp")
    assert other_way is not None
    assert other_way.ids == {mine: theirs for theirs, mine in sorted(wanted.items(), key=lambda pair: pair[1])}


def test_a_strange_token_is_read_as_the_last_part_of_its_text(tmp_path: Path) -> None:
    """With the demo's tokenizer, cut down to 1,200 tokens.  Padding and truncation are for other uses."""
    content = json.loads((TARGET_DIR / "tokenizer.json").read_text())
    whole, merges = content["model"]["vocab"], content["model"]["merges"]
    vocabulary = {token: i for token, i in whole.items() if i < 1200}
    content["model"] |= {"vocab": vocabulary, "merges": [pair for pair in merges if "".join(pair) in vocabulary]}
    content["truncation"] = {"max_length": 1, "direction": "Right", "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 2, "pad_type_id": 0, "pad_token": "<|pad|>"}
    content["padding"]["pad_to_multiple_of"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    shared = shared_tokens(MODEL, str(tmp_path), str(TARGET_DIR))
    assert shared is not None
    assert not shared.differ
    read, names = shared.inputs(), {i: token for token, i in vocabulary.items()}
    assert read[:1200] == list(range(1200))
    assert all(token.endswith(names[read[i]]) for token, i in whole.items() if i >= 1200)


def test_the_embedding_tells_the_size_of_a_vocabulary_that_the_target_does_not_name(tmp_path: Path) -> None:
    own, target = tmp_path / "own", tmp_path / "target"
    sizes = {"hidden_size": 4, "num_attention_heads": 1, "intermediate_size": 4, "num_hidden_layers": 1}
    for directory in (own, target):
        directory.mkdir()
    (own / "config.json").write_text(json.dumps(sizes | {"vocab_size": 9, "max_position_embeddings": 8, "model_type": "qwen2"}))
    (target / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 4}}))
    names = ("embed_tokens", "norm", "layers.0.input_layernorm")
    save_file({f"model.{name}.weight": torch.zeros(4) for name in names}, own / "model.safetensors")
    save_file({"language_model.model.embed_tokens.weight": torch.zeros(12, 4)}, target / "model.safetensors")
    found = load_config(str(own), str(target))
    assert (found.vocab_size, found.draft_vocab_size, found.own_vocab_size) == (12, 9, 9)
    save_file({"other.weight": torch.zeros(1)}, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{target}/config.json: no vocab_size"):
        load_config(str(own), str(target))
