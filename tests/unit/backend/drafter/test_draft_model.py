"""A draft model against transformers' own: every family, fed in pieces, cut back, reused and evicted, it drafts the same."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from backend.drafter.eagle import BATCH_ROWS, ModelProposer
from backend.drafter.head import LONG
from backend.drafter.proposer import DraftRequest, Premise, Sampling, Until
from backend.models.checkpoint import load_drafter
from backend.models.head_config import CheckpointError
from tests.support.drafter_sessions import tokens_of
from tests.support.other_vocabulary import write_permuted, write_tokenizer
from tests.support.properties import examples

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "llama, biases, tied": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama 3 rope": LlamaConfig(**SIZES, rope_scaling=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}


def save(directory: Path, name: str) -> tuple[str, PreTrainedModel]:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(FAMILIES[name]).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Biases and norms begin as zeros and ones, and would be missed by nobody.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            assert parameter.isfinite().all(), parameter_name
    model.save_pretrained(directory)
    return str(directory), model


def write_target(directory: Path, vocab: int = VOCAB, longest: int = 4096) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"vocab_size": vocab, "max_position_embeddings": longest}))
    return str(directory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("llama")
    path, model = save(directory / "draft", "llama")
    return path, write_target(directory / "target"), model


def make(path: str, target: str, cache_tokens: int = 8192) -> ModelProposer:
    return ModelProposer(load_drafter(path, target), cache_tokens)


@torch.inference_mode()
def by_the_book(model: PreTrainedModel, tokens: list[int], k: int) -> list[int]:
    said = list(tokens)
    for _ in range(k):
        said.append(int(model(torch.tensor([said])).logits[0, -1].argmax()))
    return said[len(tokens) :]


def names(count: int) -> dict[str, int]:
    return {f"t{number}": number for number in range(count)}


def draft(proposer: ModelProposer, key: str, base_len: int, k: int) -> list[int]:
    return proposer.draft([DraftRequest(key, base_len, 0, None, Until(k))])[0].tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_drafts_what_transformers_would_say(tmp_path: Path, family: str) -> None:
    path, model = save(tmp_path / "draft", family)
    proposer = make(path, write_target(tmp_path / "target"))
    # Two long prompts are read with a short one, and with a request that goes on.
    texts = {"a": tokens_of(1, 9), "b": tokens_of(2, LONG + 1), "c": tokens_of(3, 1), "d": tokens_of(4, 2 * LONG)}
    for key, tokens in texts.items():
        proposer.open(key, tokens[:7] if key == "a" else list(tokens), 0)
    draft(proposer, "a", 7, 1)
    proposer.commit("a", 9, texts["a"][7:], 0)
    drafted = proposer.draft([DraftRequest(key, len(tokens), 0, None, Until(5)) for key, tokens in texts.items()])
    for tokens, found in zip(texts.values(), drafted, strict=True):
        assert found.tokens == by_the_book(model, tokens, 5)
    # The verifier agrees with two of them and then says something else.
    tokens = [*texts["b"], *drafted[1].tokens[:2], (drafted[1].tokens[2] + 1) % VOCAB]
    proposer.commit("b", len(tokens), tokens[-3:], 0)
    assert draft(proposer, "b", len(tokens), 4) == by_the_book(model, tokens, 4)


@examples(25)
@given(data=st.data())
def test_fed_in_any_way_it_drafts_the_same(data: st.DataObject, llama: tuple[str, str, PreTrainedModel]) -> None:
    path, target, model = llama
    proposer = make(path, target, data.draw(st.sampled_from([64, 8192]), "cache"))
    texts: dict[str, list[int]] = {}
    common = tokens_of(0, 20)
    for turn in range(data.draw(st.integers(2, 6), "turns")):
        key = data.draw(st.sampled_from("xyz"), "key")
        if key not in texts or data.draw(st.integers(0, 4), "reopen") == 0:
            texts[key] = common[: data.draw(st.integers(1, 20), "shared")] + tokens_of(turn, 3)
            proposer.open(key, list(texts[key]), 0)
        tokens = texts[key]
        k = data.draw(st.integers(1, 4), "k")
        drafted = draft(proposer, key, len(tokens), k)
        if proposer._cache.capacity > 1000:
            assert drafted == by_the_book(model, tokens, k)
        elif drafted:
            assert drafted == by_the_book(model, tokens, len(drafted))
        ahead = data.draw(st.booleans(), "ahead")
        if drafted and ahead:
            (found,) = proposer.draft_outcomes([Premise(key, len(tokens), Until(2), drafted, 3)])
            for outcome in found:
                after = [*tokens, *drafted[: outcome.accepted], outcome.token]
                assert outcome.tokens == by_the_book(model, after, len(outcome.tokens))
        accepted = data.draw(st.integers(0, len(drafted)), "accepted")
        news = [*drafted[:accepted], data.draw(st.integers(0, VOCAB - 1), "own")]
        tokens += news
        assert proposer.commit(key, len(tokens), news, 0)


def test_rows_of_accepted_tokens_stay(llama: tuple[str, str, PreTrainedModel]) -> None:
    proposer = make(*llama[:2])
    tokens = tokens_of(5, 30)
    proposer.open("a", list(tokens), 0)
    drafted = draft(proposer, "a", len(tokens), 4)
    news = [*drafted[:2], (drafted[2] + 1) % VOCAB]
    with mock.patch.object(proposer._head, "forward", wraps=proposer._head.forward) as forward:
        proposer.commit("a", len(tokens) + 3, news, 0)
        draft(proposer, "a", len(tokens) + 3, 4)
        # Another request with the same beginning computes its own end alone.
        proposer.open("b", [*tokens[:25], 1, 2], 0)
        draft(proposer, "b", 27, 1)
    assert [len(call.args[0].ids) for call in forward.call_args_list] == [1, 1, 1, 1, 2]


def test_a_text_with_a_hole_is_asked_for_anew(llama: tuple[str, str, PreTrainedModel]) -> None:
    """A round that was never sent leaves one; there is no embedding of an unknown token."""
    proposer = make(*llama[:2])
    tokens = tokens_of(5, 30)
    proposer.open("a", list(tokens[:20]), 0)
    assert proposer.commit("a", 20, [], 0)
    assert proposer.commit("a", 22, tokens[20:22], 0)
    assert not proposer.commit("a", 30, tokens[25:], 0)
    assert proposer.length("a") is None
    proposer.open("a", list(tokens), 0)
    assert draft(proposer, "a", 30, 3) == by_the_book(llama[2], tokens, 3)


def test_a_long_prompt_lets_others_draft_meanwhile(llama: tuple[str, str, PreTrainedModel]) -> None:
    proposer = make(*llama[:2])
    long, short = tokens_of(1, BATCH_ROWS + 500), tokens_of(2, 10)
    for key, tokens in (("long", long), ("short", short)):
        proposer.open(key, list(tokens), 0)
    asks = [DraftRequest("short", 10, 0, None, Until(2)), DraftRequest("long", len(long), 0, None, Until(2))]
    first, second = proposer.draft(asks), proposer.draft(asks)
    assert [len(each.tokens) for each in (*first, *second)] == [2, 0, 2, 2]
    assert second[1].tokens == by_the_book(llama[2], long, 2)


@pytest.mark.parametrize("vocab", [VOCAB - 20, VOCAB + 20])
def test_a_vocabulary_of_another_size_serves_its_common_part(tmp_path: Path, vocab: int) -> None:
    (path, _), target = save(tmp_path / "draft", "llama"), write_target(tmp_path / "target", vocab)
    for directory, size in ((path, VOCAB), (target, vocab)):
        write_tokenizer(Path(directory), names(size))
    proposer = make(path, target)
    assert proposer.hidden == 0, "verifiers send it no features"
    tokens = [*(token % (VOCAB - 20) for token in tokens_of(1, 12)), vocab - 1]
    proposer.open("a", list(tokens), 0)
    drafted = draft(proposer, "a", len(tokens), 3)
    assert len(drafted) == 3
    assert max(drafted) < min(vocab, VOCAB)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("renamed", [range(0), range(9)])
def test_with_other_ids_it_drafts_the_same_shared_tokens(tmp_path: Path, name: str, renamed: range) -> None:
    """With the same noise, up to where the plain one drafts a token that is not shared.  One model has tied embeddings."""
    path, _ = save(tmp_path / "draft", name)
    target = write_target(tmp_path / "target")
    for directory in (path, target):
        write_tokenizer(Path(directory), names(VOCAB))
    plain, permuted = make(path, target), make(str(write_permuted(Path(path), tmp_path / "permuted", renamed)), target)
    assert (permuted._head.draft_to_target is None) == (not renamed), "a mere permutation costs nothing"
    cut = whole = 0
    for seed in range(30):
        tokens = [token if token not in renamed else 60 for token in tokens_of(seed, 12)]
        drafts = []
        for proposer in (plain, permuted):
            proposer.open(str(seed), list(tokens), 0, Sampling(seed, 1.0 if seed % 3 else 0.0))
            (drafted,) = proposer.draft([DraftRequest(str(seed), len(tokens), 0, None, Until(4))])
            drafts.append(drafted.tokens)
            (ahead,) = proposer.draft_outcomes([Premise(str(seed), len(tokens), Until(2), drafted.tokens, 4)])
            drafts.append([token for outcome in ahead for token in (outcome.token, *outcome.tokens)])
        expected, expected_ahead, found, found_ahead = drafts
        assert not {*found, *found_ahead} & {*renamed}
        same = next((i for i, token in enumerate(expected) if token in renamed), len(expected))
        assert found[:same] == expected[:same]
        cut, whole = cut + (same < 4), whole + (same == 4)
        assert renamed or found_ahead == expected_ahead
    assert whole > 3
    assert (cut > 3) == bool(renamed)
    permuted.open("strange", [*renamed, 60], 0)
    assert len(draft(permuted, "strange", len(renamed) + 1, 4)) == 4, "tokens that it does not know stop nothing"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_type": "gpt_neox"}, "model_type 'gpt_neox'"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding-window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_hidden_layers": 4}, "missing tensor: layers.3"),
        ({"hidden_size": "wide"}, "ValueError"),
        ({}, "quantised"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, changed: dict[str, object], named: str) -> None:
    path, _ = save(tmp_path / "draft", "llama")
    file = Path(path) / "config.json"
    if not changed:
        # As ModelOpt says it.
        file.with_name("hf_quant_config.json").write_text("{}")
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(CheckpointError, match=named):
        load_drafter(path, write_target(tmp_path / "target"))
