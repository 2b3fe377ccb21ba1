"""Heads that draft in one pass: their drafts follow the documented equations, and what cannot be read is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from backend.drafter.dflash import Blocks, DFlashProposer
from backend.drafter.draws import Rules
from backend.drafter.proposer import GREEDY, DraftRequest, Premise, Sampling, Until
from backend.models.check import find_misfits, why_not_learning
from backend.models.checkpoint import load_drafter, load_fc
from backend.models.head_config import MASK_EMBEDDING, CheckpointError, OnePassDrafting, load_config
from tests.support.drafter_heads import READS, Reference, TinyHead, check, tokens_of, write_head, write_target
from tests.support.true_noise import true_gumbel

MASK, CLOSE_CALL = 3, 1e-3
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
HEADS = {
    "each sees all": TinyHead(kind="dflash", layers=2),
    "reduced vocabulary, biases": TinyHead(kind="dflash", layers=3, draft_vocab=23, bias=True),
    "causal": TinyHead(kind="dflash", layers=2, dflash={"is_causal": True}),
    "causal with a window": TinyHead(kind="dflash", layers=2, dflash=SLIDING),
    "mixed": TinyHead(kind="dflash", layers=2, dflash=SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}),
}


def make(directory: Path, head: TinyHead) -> DFlashProposer:
    target = write_target(directory / "target", head)
    return DFlashProposer(load_drafter(write_head(directory / "head", head), target), 4096)


class BlockReference(Reference):
    """The equations of heads that draft in one pass."""

    def __init__(self, head: TinyHead) -> None:
        super().__init__(head)
        kinds = head.dflash.get("layer_types") or ["full_attention"] * head.layers
        self.windows = [head.dflash.get("sliding_window") if "sliding" in kind else None for kind in kinds]
        self.causal = [head.dflash.get("is_causal", "sliding" in kind) for kind in kinds]

    def logits(self, tokens: list[int], features: Mapping[int, Tensor], k: int) -> Tensor:
        """`[k, draft vocabulary]`: of the tokens in the next `k` places."""
        known, begin = sorted(features), len(tokens) - 1
        context = self._norm(torch.stack([features[p].double() for p in known]), "hidden_norm")
        hidden = self.w["target.embed"][[tokens[-1], *[MASK] * k]]
        places = torch.tensor([*known, *range(begin, begin + k + 1)], dtype=torch.float64)
        for i in range(self.head.layers):
            name = f"layers.{i}"
            hidden = hidden + self._attend(i, context, self._norm(hidden, f"{name}.input_layernorm"), places)
            normed = self._norm(hidden, f"{name}.post_attention_layernorm")
            gate = functional.silu(self._linear(f"{name}.mlp.gate_proj", normed))
            hidden = hidden + self._linear(f"{name}.mlp.down_proj", gate * self._linear(f"{name}.mlp.up_proj", normed))
        return self._norm(hidden[1:], "norm") @ self.w.get("lm_head.weight", self.w["target.lm_head"]).T

    def ids(self) -> list[int]:
        """The target's id of each column."""
        offsets = self.w.get("d2t", torch.zeros(self.head.vocab))
        return [own + int(offset) for own, offset in enumerate(offsets)]

    def _attend(self, layer: int, context: Tensor, inputs: Tensor, places: Tensor) -> Tensor:
        name, (count, dim), new = f"layers.{layer}.self_attn", (len(places), self.head.head_dim), len(inputs)
        both = torch.cat((context, inputs))
        q = self._norm(self._linear(f"{name}.q_proj", inputs).view(new, -1, dim), f"{name}.q_norm")
        k = self._norm(self._linear(f"{name}.k_proj", both).view(count, -1, dim), f"{name}.k_norm")
        v = self._linear(f"{name}.v_proj", both).view(count, -1, dim)
        q, k = self._rotate(q, places[-new:]), self._rotate(k, places)
        behind = places[-new:].unsqueeze(1) - places
        hidden = (behind < 0) & self.causal[layer]
        if (window := self.windows[layer]) is not None:
            hidden |= behind >= window
        mixed = torch.zeros_like(q)
        for h in range(self.head.heads):
            group = h // (self.head.heads // self.head.kv_heads)
            scores = (q[:, h] @ k[:, group].T / dim**0.5).masked_fill(hidden, float("-inf"))
            mixed[:, h] = scores.softmax(-1) @ v[:, group]
        return self._linear(f"{name}.o_proj", mixed.flatten(1))


class Session:
    """One request, its tokens, and the features that the drafter was given."""

    def __init__(self, proposer: DFlashProposer, key: int, length: int, skip: int = 0, sampling: Sampling = GREEDY) -> None:
        self.proposer, self.key, self.sampling, self.tokens = proposer, key, sampling, tokens_of(key, length)
        self.features = torch.randn(length + 60, proposer.hidden, generator=torch.Generator().manual_seed(key))
        proposer.open(key, list(self.tokens), length - 1 - skip, 0.0, sampling)
        self.seen = range(skip, length - 1)
        self.new = len(self.seen)

    def commit(self, tokens: list[int]) -> None:
        self.tokens += tokens
        assert self.proposer.commit(self.key, len(self.tokens), tokens, len(tokens), 0.0)
        self.seen, self.new = range(self.seen.start, len(self.tokens) - 1), len(tokens)

    def ask(self, k: int) -> DraftRequest:
        stop = len(self.tokens) - 1
        return DraftRequest(self.key, len(self.tokens), self.new, self.features[stop - self.new : stop], Until(k))

    def check(self, reference: BlockReference, drafts: list[int], k: int) -> None:
        """Compares a draft, token by token but for close calls."""
        logits = reference.logits(self.tokens, {p: self.features[p] for p in self.seen}, k)
        values = (logits / (self.sampling.temperature or 1.0)).log_softmax(-1)
        ids = reference.ids()
        assert len(drafts) == k
        for place, (own, draft) in enumerate(zip(values, drafts, strict=True)):
            if self.sampling.temperature:
                noise = [true_gumbel(self.sampling.seed, len(self.tokens) + place, token) for token in ids]
                own = own + torch.tensor(noise)
            best, second = own.topk(2).values.tolist()
            assert best - second < CLOSE_CALL or draft == ids[int(own.argmax())]


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_ragged_batches_draft_by_the_book(tmp_path: Path, head: TinyHead) -> None:
    proposer, reference = make(tmp_path, head), BlockReference(head)
    hot = Sampling.of(7, 0.8)
    sessions = [Session(proposer, 0, 9), Session(proposer, 1, 2), Session(proposer, 2, 40, 11), Session(proposer, 3, 5, 0, hot)]
    ks = [4, 1, 6, 8]
    for step in range(4):
        found = proposer.draft([session.ask(k) for session, k in zip(sessions, ks, strict=True)])
        for session, drafted, k in zip(sessions, found, ks, strict=True):
            session.check(reference, drafted.tokens, k)
        for i, session in enumerate(sessions):
            session.commit(tokens_of(100 * step + i, 1 + (i + step) % 3))
        ks = ks[1:] + ks[:1]


def test_a_draft_in_a_batch_is_that_alone_and_that_after_a_hand_over(tmp_path: Path) -> None:
    """The block of one request is seen by no other, and rows made one by one are those made at once."""
    head = HEADS["mixed"]
    first, other = make(tmp_path / "first", head), make(tmp_path / "other", head)
    sessions = [Session(first, i, 5 + 7 * i) for i in range(5)]
    first.draft([session.ask(6) for session in sessions])
    for session in sessions:
        session.commit(tokens_of(session.key, 3))
    together = first.draft([session.ask(2 + session.key) for session in sessions])
    for session, drafted in zip(sessions, together, strict=True):
        rows = len(session.tokens) - 1
        other.open(session.key, list(session.tokens), rows, 0.0)
        (alone,) = other.draft([DraftRequest(session.key, rows + 1, rows, session.features[:rows], Until(2 + session.key))])
        assert alone.tokens == drafted.tokens
        assert alone.signs == pytest.approx(drafted.signs, abs=1e-4)


def test_a_block_takes_no_rows_of_its_neighbours(tmp_path: Path) -> None:
    """A stretch of the cache has 64 rows, and each request has 62 of its own."""
    head = HEADS["each sees all"]
    proposer, reference = make(tmp_path, head), BlockReference(head)
    sessions = [Session(proposer, i, 63) for i in range(4)]
    for session, drafted in zip(sessions, proposer.draft([session.ask(8) for session in sessions]), strict=True):
        session.check(reference, drafted.tokens, 8)


def test_a_captured_pass_drafts_what_a_pass_of_the_right_size_drafts(tmp_path: Path) -> None:
    """What a GPU replays has blocks and masks to spare, is used again and again, and reads no result."""
    head = HEADS["mixed"]
    plain, padded = make(tmp_path / "plain", head), make(tmp_path / "padded", head)
    with torch.inference_mode():
        padded._captured[4, 8, False] = Blocks(padded._head, padded._block, 4, 8, Rules(independent=False))
    pairs = [[Session(proposer, i, 5 + 7 * i) for proposer in (plain, padded)] for i in range(3)]
    computed = Blocks.compute

    def watched(blocks: Blocks) -> None:
        with mock.patch.multiple(torch.Tensor, **{name: mock.Mock(side_effect=AssertionError(name)) for name in READS}):
            computed(blocks)

    with mock.patch.object(Blocks, "compute", watched):
        for step, k in enumerate((6, 8, 3)):
            one, other = ([pair[i].ask(k) for pair in pairs] for i in range(2))
            drafts = zip(plain.draft(one), padded.draft(other), strict=True)
            for (mine, theirs), pair in zip(drafts, pairs, strict=True):
                assert len(mine.tokens) == k
                assert mine.tokens == theirs.tokens
                assert mine.signs == pytest.approx(theirs.signs, abs=1e-4)
                for session in pair:
                    session.commit(tokens_of(10 * step + session.key, 2))


def test_a_draft_ends_at_the_floor_and_at_the_trained_length(tmp_path: Path) -> None:
    proposer = make(tmp_path, HEADS["each sees all"])
    session = Session(proposer, 1, 12)
    (whole,) = proposer.draft([session.ask(30)])
    assert len(whole.tokens) == 8, "block_size is 9"
    unsure = [[0.0, 0.0, -9.0]] * 3
    (cut,) = proposer.draft([DraftRequest(1, 12, 0, None, Until(8, 0.5, unsure))])
    assert (cut.tokens, list(cut.first)) == ([], whole.tokens[:1])
    assert proposer.draft_outcomes([Premise(1, 12, Until(4), whole.tokens[:4], 8)]) == [[]]


def test_independent_tokens_are_drawn_from_the_distributions_that_are_sent(tmp_path: Path) -> None:
    head, k = HEADS["each sees all"], 3
    proposer, reference = make(tmp_path, head), BlockReference(head)
    sessions = [Session(proposer, 1, 12, 0, Sampling.of(5, 30.0, True)), Session(proposer, 2, 7)]
    proposer.draft([session.ask(0) for session in sessions])
    q = (reference.logits(sessions[0].tokens, dict(enumerate(sessions[0].features[:11])), k) / 30.0).softmax(-1)
    seen = torch.zeros_like(q)
    for _ in range(300):
        own, greedy = proposer.draft([DraftRequest(1, 12, 0, None, Until(k)), DraftRequest(2, 7, 0, None, Until(2))])
        ids, bits = np.frombuffer(own.proposal, np.int32).copy().reshape(2, k, -1)
        sent = torch.zeros_like(q).scatter_(
            1, torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(bits.view(np.float32)).double()
        )
        torch.testing.assert_close(sent, q, atol=1e-4, rtol=0)
        seen[range(k), own.tokens] += 1 / 300
        assert greedy.proposal == b""
    assert (seen - q).abs().max() < 0.1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DFlash2": (
        {"architectures": ["DFlash2DraftModel"]},
        "DFlash2DraftModel: of heads that draft in one pass, only DFlashDraftModel",
    ),
    "DSpark": ({"architectures": ["Qwen3DSparkModel"]}, "Qwen3DSparkModel: of heads that draft in one pass"),
    "no layers": ({"dflash_config": {"mask_token_id": 3}}, "dflash_config names no target_layer_ids"),
    "no mask": ({"dflash_config": {"target_layer_ids": [1]}}, "TypeError"),
    "mask": ({"dflash_config": {"mask_token_id": 61, "target_layer_ids": [1, 2, 3]}}, "mask token: 61 is outside"),
    "layers": ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2, 8]}}, "feature layers: 9 is outside"),
    "window": (SLIDING | {"is_causal": False}, "sliding-window attention that is not causal is not supported"),
    "no size": (SLIDING | {"sliding_window": None}, "sliding-window attention without a size of the window"),
    "kinds": ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
    "sinks": ({"add_swa_attention_sink_bias": True}, "attention sinks is not supported"),
    "scale": ({"logit_scale": 0.5}, "logit_scale is not supported"),
    "rotary": ({"is_neox_style": False}, "is_neox_style false is not supported"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantised drafters are not supported"),
}


@pytest.mark.parametrize(("config", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    head = TinyHead(kind="dflash", layers=2, dflash=config)
    head_dir, target = write_head(tmp_path / "head", head), write_target(tmp_path / "target", head)
    assert said in "\n".join(find_misfits(head_dir, target).errors)


def test_a_mask_embedding_of_its_own_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    head = HEADS["each sees all"]
    head_dir, target = write_head(tmp_path / "head", head), write_target(tmp_path / "target", head)
    assert check(head_dir, target) == []
    assert find_misfits(head_dir, target).kind == "dflash"
    assert why_not_learning(head_dir, target) == "only EAGLE-3 heads that join hidden states of the target learn"
    (tmp_path / "head" / MASK_EMBEDDING).touch()
    with pytest.raises(CheckpointError, match=f"{MASK_EMBEDDING} is not supported"):
        load_drafter(head_dir, target)
    deeper = write_head(tmp_path / "deeper", TinyHead(kind="dflash", layers=1, dflash={"num_hidden_layers": 2}))
    assert "missing tensor: layers.1.self_attn.q_proj.weight" in check(deeper, target)


def test_speculators_layout_says_the_same(tmp_path: Path) -> None:
    head = HEADS["each sees all"]
    head_dir = write_head(tmp_path, head)
    plain, fc = load_config(head_dir), load_fc(head_dir)
    assert plain.block == OnePassDrafting(MASK, 8, (False, False), (0, 0))
    assert plain.aux_layers == fc.aux_layers == (2, 3, 4), "inputs of the layers behind those named"
    config = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": head.layer_config() | {"model_type": "qwen3"},
        "aux_hidden_state_layer_ids": [2, 3, 4],
        "mask_token_id": MASK,
        "block_size": 9,
        "draft_vocab_size": head.vocab,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert replace(load_config(head_dir), norm_before_residual=False) == plain
    (tmp_path / "config.json").write_text(json.dumps(config | {"sample_from_anchor": True}))
    assert load_config(head_dir).unsupported == ("sample_from_anchor is not supported",)
