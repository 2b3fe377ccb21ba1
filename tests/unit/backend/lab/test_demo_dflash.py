"""The training of the demo's one-pass head computes what a drafter computes with the head that it writes."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from backend.config import Settings
from backend.drafter.dflash import DFlashProposer
from backend.drafter.proposer import DraftRequest, Until
from backend.lab.demo import dflash, train
from backend.lab.demo.__main__ import parse
from backend.lab.demo.llama import features, load_llama
from backend.lab.demo.options import DrafterOptions
from backend.models.check import find_misfits
from backend.models.checkpoint import load_drafter
from backend.models.demo import DFLASH_DIR, TARGET_DIR
from backend.models.resolve import resolve
from backend.models.writing import WEIGHTS

CLOSE_CALL = 1e-3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a head after two steps on random text."""
    directory = tmp_path_factory.mktemp("head") / "dflash"
    settings = DrafterOptions(steps=2, tokens_per_step=64, length=64)
    rows = torch.randint(3, 2048, (4, 64), generator=torch.Generator().manual_seed(1))
    options = parse(["--head", "dflash", "--device", "cpu", "--drafter-dir", str(directory)])
    with (
        mock.patch.object(train, "load_corpus"),
        mock.patch.object(train, "token_stream"),
        mock.patch.object(train, "training_texts", return_value=lambda length, count, chance: rows[:count]),
    ):
        train.train_demo(replace(options, drafter=settings))
    return directory


@torch.no_grad()
def test_a_drafter_drafts_what_the_training_predicts(trained: Path) -> None:
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
