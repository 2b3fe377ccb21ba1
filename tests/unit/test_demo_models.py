"""The demo models: the drafter's two forwards agree, files reload, training resumes, the packaged pair is alive."""

import io
import json
import math
import tokenize
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import torch

from backend.lab.demo.checkpoints import load_target, save_drafter, save_target
from backend.lab.demo.drafter import new_drafter, train_drafter
from backend.lab.demo.evaluate import accept, sample
from backend.lab.demo.generate import generate
from backend.lab.demo.model import Target
from backend.lab.demo.options import DemoOptions, DrafterOptions, TargetOptions
from backend.lab.demo.target import train_target, validation_loss
from backend.lab.demo.training import Progress, Windows, rate_factor
from backend.learning.head import Drafter
from backend.learning.layers import Shape
from backend.models.demo import DRAFTER_DIR, TARGET_DIR
from backend.models.writing import DRAFT_LENGTH, replacing
from tests.support.demo_checkpoints import load_drafter

TINY = Shape(
    vocab_size=97,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=96,
    max_position_embeddings=128,
)


def stir(module: torch.nn.Module) -> None:
    """Random weights everywhere, so that nothing is equal because it is zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


@pytest.fixture
def pair() -> tuple[Target, Drafter]:
    torch.manual_seed(3)
    target = Target(TINY)
    stir(target)
    drafter = new_drafter(target)
    stir(drafter)
    return target.eval(), drafter.eval()


def counting_stream() -> np.ndarray:
    """A stream with something to learn: the numbers 3 to 96 counted over and over, by 1 and by 5."""
    steps = np.where(np.arange(6000) // 600 % 2 == 0, 1, 5)
    return (3 + np.cumsum(steps) % 94).astype(np.int32)


def tiny_options(run_dir: Path, checkpoint_s: float = 1e9) -> DemoOptions:
    return DemoOptions(
        run_dir=run_dir,
        vocab_size=97,
        device="cpu",
        compile=False,
        checkpoint_s=checkpoint_s,
        target=TargetOptions(steps=20, layers=4, hidden=128, tokens_per_step=256, length=32, long_length=64, long_share=0.2),
        drafter=DrafterOptions(steps=16, generated_tokens=2048, tokens_per_step=256, length=32, long_length=64, unroll=3),
    )


@torch.no_grad()
def test_unrolled_training_forward_equals_decoding(pair: tuple[Target, Drafter]) -> None:
    target, drafter = pair
    depth, rows = 4, 9
    tokens = torch.randint(0, 97, (2, rows + depth + 1))
    _, features = target(tokens, feature_layers=drafter.shape.feature_layers)
    assert features is not None
    unrolled = drafter.unroll(tokens[:, 1:], features[:, :rows], depth)
    for row in range(rows):
        cache = drafter.cache(2, rows + depth)
        output = drafter.step(tokens[:, 1 : row + 2], drafter.fc(features[:, : row + 1]), cache)[:, -1:]
        torch.testing.assert_close(output[:, 0], unrolled[0][:, row], atol=1e-4, rtol=1e-4)
        for step in range(1, depth):
            output = drafter.step(tokens[:, row + 1 + step : row + 2 + step], output, cache)
            torch.testing.assert_close(output[:, 0], unrolled[step][:, row], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_acceptance_is_that_of_speculative_decoding_token_by_token(pair: tuple[Target, Drafter]) -> None:
    target, drafter = pair
    prompt, new_tokens = torch.randint(0, 97, (7,)).tolist(), 40
    # Look at the target's output matrix, so that some drafts are right.
    drafter.lm_head.weight.copy_(target.model.embed_tokens.weight)
    text, drafts, accepted = [*prompt, *sample(target, torch.tensor(prompt), 1)], 0, 0
    while len(text) < len(prompt) + new_tokens:
        _, features = target(torch.tensor([text[:-1]]), feature_layers=drafter.shape.feature_layers)
        cache = drafter.cache(1, 100)
        output = drafter.step(torch.tensor([text[1:]]), drafter.fc(features), cache)[:, -1:]
        draft = [int(drafter.logits(output).argmax())]
        while len(draft) < DRAFT_LENGTH:
            output = drafter.step(torch.tensor([draft[-1:]]), output, cache)
            draft.append(int(drafter.logits(output).argmax()))
        chosen = sample(target, torch.tensor(text), DRAFT_LENGTH + 1)
        kept = next((i for i, token in enumerate(draft) if token != chosen[i]), DRAFT_LENGTH)
        text, drafts, accepted = text + chosen[: kept + 1], drafts + 1, accepted + kept
    found = accept(target, drafter, prompt, new_tokens)
    assert (found.drafts, sum(found.accepted_by_position)) == (drafts, accepted)
    assert 0 < accepted < DRAFT_LENGTH * drafts


def test_target_equals_transformers_on_its_own_files(pair: tuple[Target, Drafter], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target, drafter = pair
    save_target(target, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(0, 97, (2, 17))
    layers = drafter.shape.feature_layers
    with torch.no_grad():
        hidden, features = target(tokens, feature_layers=layers)
        expected = theirs(tokens, output_hidden_states=True)
        torch.testing.assert_close(target.logits(hidden), expected.logits, atol=1e-4, rtol=1e-4)
        states = torch.cat([expected.hidden_states[layer] for layer in layers], dim=-1)
        torch.testing.assert_close(features, states, atol=1e-4, rtol=1e-4)


def test_a_drafter_reloads_identically(pair: tuple[Target, Drafter], tmp_path: Path) -> None:
    target, drafter = pair
    save_drafter(drafter, tmp_path, "some-target")
    reloaded = load_drafter(tmp_path, target.model.embed_tokens.weight)
    assert reloaded.shape == drafter.shape
    state = reloaded.state_dict()
    assert state.keys() == drafter.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in drafter.state_dict().items())


def test_cached_generation_equals_a_full_forward(pair: tuple[Target, Drafter]) -> None:
    target, _ = pair
    text = generate(target, torch.randint(0, 97, (3, 5)), 11, torch.zeros(3), torch.Generator())
    with torch.no_grad():
        hidden, _ = target(text)
    assert torch.equal(target.logits(hidden).argmax(-1)[:, 4:-1], text[:, 5:])


def test_windows_cover_every_epoch_once_behind_a_begin_token() -> None:
    stream = np.arange(3, 3 + 1000, dtype=np.int32)
    windows = Windows(stream, 50, seed=1)
    batch = windows.batch(0, windows.per_epoch)
    assert (batch[:, 0] == 0).all()
    assert batch[:, 1:].unique().numel() == windows.per_epoch * 50
    assert torch.equal(windows.batch(5, 3), batch[5:8])


def test_rate_falls_to_zero() -> None:
    factors = [rate_factor(step / 100) for step in range(101)]
    assert max(factors) == 1.0
    assert factors[-1] == 0.0
    assert factors[50:] == sorted(factors[50:], reverse=True)


def test_target_learns_and_resumes_to_the_same_result(tmp_path: Path) -> None:
    stream = counting_stream()
    begin = validation_loss(Target(TINY), stream, 32, limit=16)
    whole, progress = train_target(tiny_options(tmp_path / "whole"), stream, stream)
    assert progress.step == 20
    assert validation_loss(whole, stream, 32, limit=16) < begin - 1.0

    class Interrupted(Exception):
        pass

    def interrupt(_: Target, at: Progress) -> None:
        if at.step == 9:
            raise Interrupted

    options = tiny_options(tmp_path / "resumed", checkpoint_s=0.0)
    with pytest.raises(Interrupted):
        train_target(options, stream, stream, interrupt)
    resumed, again = train_target(options, stream, stream)
    assert (again.step, again.tokens, again.drawn) == (20, progress.tokens, progress.drawn)
    assert all(torch.equal(value, whole.state_dict()[key]) for key, value in resumed.state_dict().items())


def test_drafter_learns_its_target(tmp_path: Path) -> None:
    stream = counting_stream()
    options = tiny_options(tmp_path)
    options = replace(options, target=replace(options.target, steps=30))
    target, _ = train_target(options, stream, stream)
    prompt = [0, *stream[100:120].tolist()]
    before = accept(target.eval(), new_drafter(target), prompt, 30).length
    drafter, progress = train_drafter(replace(options, drafter=replace(options.drafter, steps=30)), target, stream)
    assert progress.step == 30
    assert accept(target, drafter.eval(), prompt, 30).length > before + 0.5


def test_a_failed_write_leaves_the_old_directory(tmp_path: Path) -> None:
    final = tmp_path / "model"
    with replacing(final) as fresh:
        (fresh / "a").write_text("old")

    def fail() -> None:
        with replacing(final) as fresh:
            (fresh / "a").write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (final / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_packaged_target_continues_python_with_python() -> None:
    from transformers import AutoTokenizer

    tokenizer, target = AutoTokenizer.from_pretrained(TARGET_DIR), load_target(TARGET_DIR)
    prompt = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def __len__(self):\n"
    ids = tokenizer(prompt, return_tensors="pt").input_ids[0]
    continuation = tokenizer.decode(sample(target, ids, 40))
    assert continuation.startswith("        ")
    lines = (prompt + continuation).rsplit("\n", 1)[0] + "\n"
    kinds = [token.type for token in tokenize.generate_tokens(io.StringIO(lines).readline)]
    assert tokenize.ERRORTOKEN not in kinds
    assert len(set(continuation.split())) > 3
    with torch.no_grad():
        hidden, _ = target(ids[None, :-1])
        loss = torch.nn.functional.cross_entropy(target.logits(hidden)[0], ids[1:])
    assert loss < math.log(20)


def test_packaged_drafter_belongs_to_the_packaged_target() -> None:
    from transformers import AutoTokenizer

    tokenizer, target = AutoTokenizer.from_pretrained(TARGET_DIR), load_target(TARGET_DIR)
    drafter = load_drafter(DRAFTER_DIR, target.model.embed_tokens.weight)
    prompt = tokenizer("import unittest\n\n\nclass ParserTest(unittest.TestCase):\n").input_ids
    assert accept(target, drafter, prompt, 64).length > 1.8
    config = json.loads((DRAFTER_DIR / "config.json").read_text(encoding="utf-8"))
    assert config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == target.shape.vocab_size


def test_packaged_files_are_small_and_name_no_machine() -> None:
    files = [path for directory in (TARGET_DIR, DRAFTER_DIR) for path in directory.iterdir()]
    assert sum(path.stat().st_size for path in files) < 40e6
    for path in files:
        if path.suffix == ".json":
            text = path.read_text(encoding="utf-8")
            assert not any(root in text for root in ('"/home', '"/root', '"/work', '"/tmp'))
