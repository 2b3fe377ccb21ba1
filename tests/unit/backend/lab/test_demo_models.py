"""The demo models: training computes what drafters compute with what it writes, and learns; what is shipped fits."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from backend.config import DraftingSettings, Settings
from backend.drafter.dflash import DFlashProposer
from backend.drafter.eagle import ModelProposer
from backend.drafter.process import DrafterModel, build_proposer
from backend.drafter.proposer import DraftRequest, Until
from backend.lab.demo import dflash, draft_model, train, training
from backend.lab.demo.__main__ import parse
from backend.lab.demo.drafter import lesson, new_head, save_head, unrolled_loss
from backend.lab.demo.llama import config_of, features, generate, llama_config, load_llama, new_llama, save_llama
from backend.lab.demo.options import DrafterOptions, DraftModelOptions, TargetOptions
from backend.lab.demo.tokenizer import BEGIN_ID, END_ID
from backend.lab.demo.train import train_target, validation_loss
from backend.lab.demo.training import training_texts, windows
from backend.learning.head import Drafter
from backend.models.check import find_misfits
from backend.models.checkpoint import load_drafter
from backend.models.demo import DFLASH_DIR, DRAFT_MODEL_DIR, DRAFTER_DIR, TARGET_DIR
from backend.models.resolve import resolve
from backend.models.writing import WEIGHTS, replacing
from backend.rollout.corpus import Corpus, Document
from tests.support.drafter_heads import check

CPU = torch.device("cpu")
TINY = llama_config(vocab_size=97, hidden=128, layers=4, head_dim=64, positions=128)


def stir(module: torch.nn.Module) -> None:
    """Random weights everywhere, so that nothing is equal because it is zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


@pytest.fixture
def pair() -> tuple[LlamaForCausalLM, Drafter]:
    torch.manual_seed(3)
    target = new_llama(TINY)
    stir(target)
    drafter = new_head(target, DrafterOptions())
    stir(drafter)
    return target.eval(), drafter.eval()


def decode(drafter: Drafter, tokens: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """The last row's output `[batch, 1, hidden]`, from the tokens and features `[batch, n, hidden]` of all n rows so far."""
    embedded = torch.nn.functional.embedding(tokens, drafter.embeddings)
    rotation = drafter.rotary(embedded, torch.arange(tokens.shape[1])[None])
    joined = drafter.block.join(embedded, read)
    attended, _ = drafter.block.self_attn(joined, position_embeddings=rotation, attention_mask=None)
    return drafter.block.finish(read, attended)[:, -1:]


@torch.no_grad()
def test_unrolled_training_forward_equals_decoding(pair: tuple[LlamaForCausalLM, Drafter]) -> None:
    target, drafter = pair
    depth, rows = 4, 9
    tokens = torch.randint(0, 97, (2, rows + depth + 1))
    _, inputs = features(target, tokens, drafter.feature_layers)
    unrolled = drafter.unroll(tokens[:, 1:], inputs[:, :rows], depth)
    for row in range(rows):
        read = drafter.fc(inputs[:, : row + 1])
        for step in range(depth):
            output = decode(drafter, tokens[:, 1 : row + 2 + step], read)
            torch.testing.assert_close(output[:, 0], unrolled[step][:, row], atol=1e-4, rtol=1e-4)
            read = torch.cat((read, output), dim=1)


@pytest.mark.parametrize("shipped", [TARGET_DIR, DRAFT_MODEL_DIR, DRAFTER_DIR])
def test_files_have_the_fields_and_tensors_of_those_that_are_shipped(shipped: Path, tmp_path: Path) -> None:
    """The models that are written here have the sizes of the shipped ones, and untrained weights."""
    of = json.loads((shipped / "config.json").read_text(encoding="utf-8"))
    own = load_llama(DRAFT_MODEL_DIR if shipped == DRAFT_MODEL_DIR else TARGET_DIR)
    model = new_llama(config_of(own))
    if shipped == DRAFTER_DIR:
        save_head(new_head(model, DrafterOptions()), model, tmp_path)
    else:
        save_llama(model.to(getattr(torch, of["torch_dtype"])), tmp_path)
        generation = [json.loads((each / "generation_config.json").read_text()) for each in (tmp_path, shipped)]
        assert generation[0] == generation[1]
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert written == of
    tensors, expected = load_file(tmp_path / WEIGHTS), load_file(shipped / WEIGHTS)
    assert {name: (each.shape, each.dtype) for name, each in tensors.items()} == {
        name: (each.shape, each.dtype) for name, each in expected.items()
    }


def test_an_end_of_text_stops_no_row(pair: tuple[LlamaForCausalLM, Drafter]) -> None:
    target, _ = pair
    with torch.no_grad():
        # All hidden states have about this embedding then, and its token wins.
        target.model.norm.weight.zero_()
        text = generate(target, torch.full((2, 5), END_ID), 11, temperature=1.0)
    assert text.shape == (2, 16)
    assert text[:, 5:].unique().numel() > 5, "every token is as likely as any other"


def test_windows_are_pieces_of_the_stream_behind_a_begin_token() -> None:
    stream = np.arange(3, 3 + 1000, dtype=np.int32)
    batch, again = (windows(stream, 50, 400, np.random.default_rng(1)) for _ in range(2))
    assert batch.shape == (400, 51)
    assert (batch[:, 0] == BEGIN_ID).all()
    assert (batch[:, 2:] - batch[:, 1:-1] == 1).all()
    assert batch[:, 1].unique().numel() > 200
    assert torch.equal(again, batch)
    with pytest.raises(ValueError, match="too short"):
        windows(stream[:49], 50, 1, np.random.default_rng(0))


@pytest.mark.campaign
def test_a_target_learns_and_repeats_itself_and_a_head_learns_from_it() -> None:
    """From the numbers 3 to 96 counted over and over, by 1 and by 5."""
    steps = np.where(np.arange(6000) // 600 % 2 == 0, 1, 5)
    stream = (3 + np.cumsum(steps) % 94).astype(np.int32)
    options, sizes = parse(["--no-compile"]), {"vocab_size": 97, "layers": 4, "hidden": 128}
    options.target = TargetOptions(steps=30, tokens_per_step=256, length=32, long_length=64, long_share=0.2, **sizes)
    begin = validation_loss(new_llama(TINY), stream[:512], 32)
    target, progress = train_target(options, stream, CPU)
    assert progress.step == 30
    assert validation_loss(target, stream[:512], 32) < begin - 1.0
    again, _ = train_target(options, stream, CPU)
    assert all(torch.equal(value, target.state_dict()[key]) for key, value in again.state_dict().items())

    target.eval().requires_grad_(False)
    settings = DrafterOptions(steps=30, generated_tokens=2048, tokens_per_step=256, length=32, long_length=64, unroll=3)
    texts = training_texts(target, stream, settings, seed=0)
    torch.manual_seed(0)
    drafter, batch = new_head(target, settings), texts(32, 16, np.random.default_rng(1))
    before = unrolled_loss(drafter, target, batch, settings.unroll)[1].mean()
    progress = training.train("head", drafter, settings, 0, texts, lesson(drafter, target, settings, is_compiled=False))
    assert (progress.step, len(progress.hits)) == (30, settings.unroll)
    assert unrolled_loss(drafter, target, batch, settings.unroll)[1].mean() > before + 0.1


def test_a_failed_write_leaves_the_old_directory(tmp_path: Path) -> None:
    final = tmp_path / "model"
    with replacing(final) as fresh:
        (fresh / "a").write_text("old")
    with suppress(RuntimeError), replacing(final) as fresh:
        (fresh / "a").write_text("new")
        raise RuntimeError
    assert (final / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_packaged_files_fit_are_small_and_name_no_machine() -> None:
    assert check(str(DRAFT_MODEL_DIR), str(TARGET_DIR)) == []
    files = [path for directory in (TARGET_DIR, DRAFTER_DIR, DRAFT_MODEL_DIR) for path in directory.iterdir()]
    assert sum(path.stat().st_size for path in files) < 42.5e6
    for text in (path.read_text(encoding="utf-8") for path in files if path.suffix == ".json"):
        assert not any(root in text for root in ('"/home', '"/root', '"/work', '"/tmp'))


CLOSE_CALL = 1e-3


@torch.no_grad()
def test_a_drafter_drafts_what_the_training_predicts(tmp_path: Path) -> None:
    """With a head after two steps on random text."""
    trained = tmp_path / "dflash"
    settings = DrafterOptions(steps=2, tokens_per_step=64, length=64)
    rows = torch.randint(3, 2048, (4, 64), generator=torch.Generator().manual_seed(1))
    options = parse(["--head", "dflash", "--device", "cpu", "--drafter-dir", str(trained)])
    texts = {"training_texts": mock.Mock(return_value=lambda length, count, chance: rows[:count])}
    with mock.patch.multiple(train, load_corpus=mock.DEFAULT, token_stream=mock.DEFAULT, **texts), torch.enable_grad():
        options.drafter = settings
        train.train_demo(options)
    assert find_misfits(str(trained), str(TARGET_DIR)).errors == []
    target = load_llama(TARGET_DIR)
    head = dflash.new_head(target, DrafterOptions())
    head.load_state_dict({name: each.float() for name, each in load_file(trained / WEIGHTS).items()})
    tokens = torch.randint(3, 2048, (1, 40), generator=torch.Generator().manual_seed(2))
    _, inputs = features(target, tokens, head.feature_layers)
    anchors, lengths = [10, 25, 1], [8, 5, 2]
    scores = head(tokens, inputs, torch.tensor([anchors]), torch.tensor([lengths]))[0]
    proposer = DFlashProposer(load_drafter(str(trained), str(TARGET_DIR), raw=True), 1024)
    compared = 0
    for block, (anchor, length) in enumerate(zip(anchors, lengths, strict=True)):
        proposer.open(block, tokens[0, : anchor + 1].tolist(), anchor)
        (drafted,) = proposer.draft([DraftRequest(block, anchor + 1, anchor, inputs[0, :anchor], Until(length))])
        best = scores[block, :length].log_softmax(-1).max(-1)
        assert drafted.signs[::2] == pytest.approx(best.values.tolist(), abs=1e-3)
        sure = [place for place, lead in enumerate(drafted.signs[1::2]) if lead > CLOSE_CALL]
        assert [drafted.tokens[place] for place in sure] == best.indices[sure].tolist()
        compared += len(sure)
    assert compared > 10


def test_the_head_is_made_by_one_command_and_found() -> None:
    options = parse(["--head", "dflash", "--drafter-minutes", "2"])
    assert (options.head, options.drafter_dir, options.drafter.minutes) == ("dflash", DFLASH_DIR, 2.0)
    assert options.target.minutes == 0, "the target that is there stays"
    found = resolve(Settings.model_validate({"drafter": "demo-dflash"}), print)
    assert (found.drafter_kind, found.drafter_dir) == ("dflash", str(DFLASH_DIR))


@pytest.mark.usefixtures("in_float32")
def test_it_learns_and_drafts(tmp_path: Path, monkeypatch) -> None:
    lines = "".join(f"def double_{n}(x):\n    return 2 * x + {n}\n" for n in range(400))
    monkeypatch.setattr(train, "load_corpus", lambda: Corpus((Document("a.py", lines),), ()))
    few = DraftModelOptions(steps=2, layers=1, hidden=64, tokens_per_step=256, length=64)
    options = parse(["--draft-model", str(tmp_path / "model"), "--device", "cpu", "--no-compile"])

    def first_choices(settings: DraftModelOptions) -> float:
        """The share of the target's first choices that a training ends with, by its record."""
        options.drafter = settings
        train.train_demo(options)
        record = json.loads((tmp_path / "model" / train.RECORD).read_text(encoding="utf-8"))
        (share,) = record["first_choices_of_the_target"]
        return float(share)

    before = first_choices(few)
    assert first_choices(replace(few, steps=30)) > before + 0.1
    assert check(str(tmp_path / "model"), str(TARGET_DIR)) == []
    assert isinstance(
        build_proposer(DrafterModel(str(TARGET_DIR), str(tmp_path / "model")), DraftingSettings(gpus=0)), ModelProposer
    )


def test_it_begins_with_the_targets_words() -> None:
    target = load_llama(TARGET_DIR)
    model = draft_model.new_head(target, DraftModelOptions())
    own, theirs = (torch.nn.functional.normalize(each.model.embed_tokens.weight) for each in (model, target))
    near = (own @ own.t()).fill_diagonal_(-1).argmax(1)
    wanted = (theirs @ theirs.t()).fill_diagonal_(-1).argmax(1)
    assert float((near == wanted).float().mean()) > 0.3
