"""Heads that draft in one pass: their drafts follow the documented equations, and what cannot be read is refused by name."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.drafter.dflash import DFlashProposer
from backend.drafter.proposer import GREEDY, Drafted, DraftRequest, Premise, Sampling, Until
from backend.models.check import find_misfits, why_not_learning
from backend.models.checkpoint import load_drafter, load_fc
from backend.models.head_config import MASK_EMBEDDING, CheckpointError, OnePassDrafting, load_config
from tests.support.drafter_heads import Reference, TinyHead, check, make_one_pass, write_head, write_target
from tests.support.drafter_sessions import Session, tokens_of
from tests.support.true_noise import true_gumbel
from tests.unit.backend.drafter.test_independent import decode

MASK, CLOSE_CALL = 3, 1e-3
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
HEADS = {
    "each sees all": TinyHead(kind="dflash", layers=2),
    "reduced vocabulary, biases": TinyHead(kind="dflash", layers=3, draft_vocab=23, bias=True),
    "causal": TinyHead(kind="dflash", layers=2, dflash={"is_causal": True}),
    "causal with a window": TinyHead(kind="dflash", layers=2, dflash=SLIDING),
    "mixed": TinyHead(kind="dflash", layers=2, dflash=SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}),
    "Markov": TinyHead(kind="dspark", layers=2),
    "Markov, reduced vocabulary, biases": TinyHead(kind="dspark", layers=2, draft_vocab=23, bias=True),
    "Markov, causal with a window": TinyHead(kind="dspark", layers=2, dflash=SLIDING),
    "Markov, masks draw in their places": TinyHead(kind="dspark", dflash={"sample_from_anchor": False, "block_size": 9}),
}


class BlockReference(Reference):
    """The equations of heads that draft in one pass."""

    def __init__(self, head: TinyHead) -> None:
        super().__init__(head)
        kinds = head.dflash.get("layer_types") or ["full_attention"] * head.layers
        self.windows = [head.dflash.get("sliding_window") if "sliding" in kind else None for kind in kinds]
        self.causal = [head.dflash.get("is_causal", "sliding" in kind) for kind in kinds]
        self.anchored = head.kind == "dspark" and head.dflash.get("sample_from_anchor", True)

    def logits(self, tokens: list[int], features: Mapping[int, Tensor], drafts: list[int]) -> Tensor:
        """`[k, draft vocabulary]`: of the tokens in the next k places, of which a draft has been drawn."""
        known, begin, k = sorted(features), len(tokens) - 1, len(drafts)
        masks = k - 1 if self.anchored else k
        context = self._norm(torch.stack([features[p].double() for p in known]), "hidden_norm")
        hidden = self.w["target.embed"][[tokens[-1], *[MASK] * masks]]
        places = torch.tensor([*known, *range(begin, begin + masks + 1)], dtype=torch.float64)
        for i in range(self.head.layers):
            name = f"layers.{i}"
            inputs, behind = self._norm(hidden, f"{name}.input_layernorm"), places[-len(hidden) :].unsqueeze(1) - places
            unseen = (behind < 0) & self.causal[i]
            if (window := self.windows[i]) is not None:
                unseen |= behind >= window
            attended = self._attention(name, inputs, torch.cat((context, inputs)), places, unseen)
            hidden = self._finish(name, hidden + attended)
        found = self._norm(hidden[-k:], "norm") @ self.w.get("lm_head.weight", self.w["target.lm_head"]).T
        if self.head.kind == "dspark":
            before = self.w["markov_head.markov_w1.weight"][[tokens[-1], *drafts[:-1]]]
            found = found + before @ self.w["markov_head.markov_w2.weight"].T
        return found

    def ids(self) -> list[int]:
        """The target's id of each column."""
        offsets = self.w.get("d2t", torch.zeros(self.head.vocab))
        return [own + int(offset) for own, offset in enumerate(offsets)]


def check_draft(session: Session, reference: BlockReference, drafted: Drafted, k: int) -> None:
    """Compares a draft, token by token but for close calls, and its signs."""
    assert len(drafted.tokens) == k
    logits, sampling = reference.logits(session.tokens, session.seen, drafted.tokens), session.sampling
    values = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    ids, signs = reference.ids(), []
    for place, (own, draft) in enumerate(zip(values, drafted.tokens, strict=True)):
        if sampling.temperature:
            noise = [true_gumbel(sampling.seed, len(session.tokens) + place, token) for token in ids]
            own = own + torch.tensor(noise)
        best, second = own.topk(2).values.tolist()
        assert best - second < CLOSE_CALL or draft == ids[int(own.argmax())]
        signs += [best, best - second]
    assert drafted.signs == pytest.approx(signs, abs=CLOSE_CALL)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_ragged_batches_draft_by_the_book(tmp_path: Path, head: TinyHead) -> None:
    """A stretch of the cache has 64 rows, of which two neighbours have 62 each: their blocks take no rows of the other."""
    proposer, reference = make_one_pass(tmp_path, head), BlockReference(head)
    hot = Sampling.of(7, 0.8)
    kinds = [(63, 0, GREEDY), (63, 0, GREEDY), (40, 11, GREEDY), (2, 0, hot)]
    sessions = [Session(proposer, i, tokens_of(i, length), skip, each) for i, (length, skip, each) in enumerate(kinds)]
    ks = [4, 1, 6, 8]
    for step in range(4):
        asked = list(zip(sessions, ks, strict=True))[step % 2 :]
        found = proposer.draft([session.ask(k) for session, k in asked])
        for (session, k), drafted in zip(asked, found, strict=True):
            check_draft(session, reference, drafted, k)
        for i, session in enumerate(sessions):
            session.commit(tokens_of(100 * step + i, 1 + (i + step) % 3))
        ks = ks[1:] + ks[:1]


def test_a_draft_ends_at_the_floor_and_at_the_trained_length(tmp_path: Path) -> None:
    proposer = make_one_pass(tmp_path, HEADS["each sees all"])
    (whole,) = proposer.draft([Session(proposer, 1, tokens_of(1, 12)).ask(30)])
    assert len(whole.tokens) == 8, "block_size is 9"
    unsure = [[0.0, 0.0, -9.0]] * 3
    (cut,) = proposer.draft([DraftRequest(1, 12, 0, None, Until(8, 0.5, unsure))])
    assert (cut.tokens, list(cut.first)) == ([], whole.tokens[:1])
    assert proposer.draft_outcomes([Premise(1, 12, Until(4), whole.tokens[:4], 8)]) == [[]]


@pytest.mark.parametrize("head", [HEADS["mixed"], HEADS["Markov, causal with a window"]], ids=["DFlash", "DSpark"])
def test_independent_tokens_are_drawn_from_the_distributions_that_are_sent(tmp_path: Path, head: TinyHead) -> None:
    k, times, hot = 3, 300, 30.0
    proposer, reference = make_one_pass(tmp_path, head), BlockReference(head)
    sampled = Session(proposer, 1, tokens_of(1, 12), 0, Sampling.of(5, hot, True))
    proposer.draft([sampled.ask(0), Session(proposer, 2, tokens_of(2, 7)).ask(0)])
    surplus, drafts = torch.zeros(k, head.vocab), set()
    for _ in range(times):
        own, greedy = proposer.draft([DraftRequest(1, 12, 0, None, Until(k)), DraftRequest(2, 7, 0, None, Until(2))])
        q = (reference.logits(sampled.tokens, sampled.seen, own.tokens) / hot).softmax(-1)
        sent = torch.zeros_like(q)
        for row, support, chances in zip(sent, *decode(own.tokens, own.proposal), strict=True):
            row[support] = torch.tensor(chances, dtype=row.dtype)
        torch.testing.assert_close(sent, q, atol=1e-4, rtol=0)
        surplus -= sent.float()
        surplus[range(k), own.tokens] += 1
        assert own.signs[::2] == pytest.approx(torch.xlogy(q, q).sum(-1).tolist(), abs=1e-3), "not of the drawn tokens"
        assert greedy.proposal == b""
        drafts.add(tuple(own.tokens))
    assert surplus.abs().max() < 0.1 * times
    assert len(drafts) > times / 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DFlash2": ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel: of heads that draft in one pass, only DFlash"),
    "no layers": ({"dflash_config": {"mask_token_id": 3}}, "the configuration names no target_layer_ids"),
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


DSPARK_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Gemma 4": ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel: of heads that draft in one pass, only"),
    "DeepSeek V4": ({"architectures": ["DSparkDraftModel"], "model_type": "deepseek_v4"}, "DSparkDraftModel: of heads"),
    "candidates": ({"dspark_draft_topk": 8}, "dspark_draft_topk is not supported"),
    "gated": ({"markov_head_type": "gated"}, "markov_head_type 'gated' is not supported"),
    "quantised": ({"quantization_config": {"quant_method": "modelopt"}}, "quantised drafters are not supported"),
    "rank": ({"markov_rank": 5}, "tensor markov_head.markov_w1.weight: shape [61, 6], expected [61, 5]"),
    "no rank": ({"markov_rank": None}, "TypeError"),
    "mask": ({"mask_token_id": 61}, "mask token: 61 is outside"),
    "wider": ({"vocab_size": 64}, "missing tensor: embed_tokens.weight"),
    "narrower": ({"vocab_size": 60}, "vocabulary: the head was made for 60 tokens, this target has 61"),
}


@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [("dflash", *each) for each in REFUSED.values()] + [("dspark", *each) for each in DSPARK_REFUSED.values()],
    ids=[*REFUSED, *(f"DSpark {name}" for name in DSPARK_REFUSED)],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, kind: str, config: dict[str, Any], said: str) -> None:
    head = TinyHead(kind=kind, layers=2, dflash=config)
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


def test_a_mask_outside_the_targets_vocabulary_is_read_and_never_drafted(tmp_path: Path) -> None:
    """Such a DSpark head has embeddings of its own; they and its matrices have more rows than the target has tokens."""
    plain = HEADS["Markov"]
    wide = replace(plain, dflash={"vocab_size": 64, "draft_vocab_size": 64, "mask_token_id": 63})
    head_dir, target = write_head(tmp_path / "wide", wide), write_target(tmp_path / "target", plain)
    tensors, targets = load_file(tmp_path / "wide/model.safetensors"), plain.weights()
    own = {"embed_tokens.weight": targets["target.embed"], "lm_head.weight": targets["target.lm_head"]}
    own |= {name: tensors[name] for name in tensors if name.startswith("markov_head")}
    loud = {name: torch.cat((tensor, 1000 * torch.ones(3, tensor.shape[1]))) for name, tensor in own.items()}
    loud["embed_tokens.weight"][63] = targets["target.embed"][MASK]
    save_file(tensors | loud, tmp_path / "wide/model.safetensors", metadata={"format": "pt"})
    assert check(head_dir, target) == []
    proposer, reference = DFlashProposer(load_drafter(head_dir, target), 4096), BlockReference(plain)
    session = Session(proposer, 1, tokens_of(1, 12))
    (drafted,) = proposer.draft([session.ask(8)])
    check_draft(session, reference, drafted, 8)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_speculators_layout_says_the_same(tmp_path: Path, kind: str) -> None:
    head = TinyHead(kind=kind, layers=2)
    block = OnePassDrafting(MASK, 8, (False, False), (0, 0), kind == "dspark", 6 if kind == "dspark" else 0)
    head_dir = write_head(tmp_path, head)
    plain, fc = load_config(head_dir), load_fc(head_dir)
    assert plain.block == block
    assert plain.aux_layers == fc.aux_layers == (2, 3, 4), "inputs of the layers behind those named"
    config = {
        "speculators_model_type": kind,
        "transformer_layer_config": head.layer_config() | {"model_type": "qwen3"},
        "aux_hidden_state_layer_ids": [2, 3, 4],
        "mask_token_id": MASK,
        "block_size": 9,
        "markov_rank": 6,
        "draft_vocab_size": head.vocab,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    # Without another word, masks draw the tokens in their places here.
    block = replace(block, anchored=False)
    assert replace(load_config(head_dir), norm_before_residual=False) == replace(plain, block=block)
    (tmp_path / "config.json").write_text(json.dumps(config | {"sample_from_anchor": True}))
    if kind == "dspark":
        assert load_config(head_dir).block == replace(block, anchored=True, longest=9)
    else:
        assert load_config(head_dir).unsupported == ("sample_from_anchor is not supported",)
