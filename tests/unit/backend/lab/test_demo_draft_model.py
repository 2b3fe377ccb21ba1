"""The demo's draft model learns what its target says, and is a draft model to a drafter."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backend.config import DraftingSettings
from backend.drafter.eagle import ModelProposer
from backend.drafter.process import DrafterModel, build_proposer
from backend.lab.demo import draft_model, train
from backend.lab.demo.__main__ import parse
from backend.lab.demo.llama import load_llama
from backend.lab.demo.options import DemoOptions, DraftModelOptions
from backend.models.demo import DRAFT_MODEL_DIR, TARGET_DIR
from backend.rollout.corpus import Corpus, Document
from tests.support.drafter_heads import check


@pytest.mark.usefixtures("in_float32")
def test_it_learns_and_drafts(tmp_path: Path, monkeypatch) -> None:
    lines = "".join(f"def double_{n}(x):\n    return 2 * x + {n}\n" for n in range(400))
    monkeypatch.setattr(train, "load_corpus", lambda: Corpus((Document("a.py", lines),), ()))
    few = DraftModelOptions(steps=2, layers=1, hidden=64, tokens_per_step=256, length=64)
    options = replace(parse(["--draft-model", str(tmp_path / "model"), "--device", "cpu", "--no-compile"]), drafter=few)

    def first_choices(options: DemoOptions) -> float:
        """The share of the target's first choices that a training ends with, by its record."""
        train.train_demo(options)
        record = json.loads((tmp_path / "model" / train.RECORD).read_text(encoding="utf-8"))
        (share,) = record["first_choices_of_the_target"]
        return float(share)

    assert options.target.minutes == 0, "the target that is there stays"
    before = first_choices(options)
    assert first_choices(replace(options, drafter=replace(few, steps=30))) > before + 0.1
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


def test_the_shipped_one_fits_and_is_small() -> None:
    assert check(str(DRAFT_MODEL_DIR), str(TARGET_DIR)) == []
    assert sum(file.stat().st_size for file in DRAFT_MODEL_DIR.iterdir()) < 2.5e6
