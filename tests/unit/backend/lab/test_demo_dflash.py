"""The training of the demo's one-pass head computes what a drafter computes with the head that it writes."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from backend.config import Settings
from backend.drafter.dflash import DFlashProposer
from backend.drafter.proposer import DraftRequest, Until
from backend.lab.demo import dflash
from backend.lab.demo.__main__ import parse
from backend.lab.demo.llama import features, load_llama
from backend.lab.demo.options import DemoOptions, DrafterOptions
from backend.models.check import find_misfits
from backend.models.checkpoint import load_drafter
from backend.models.demo import DFLASH_DIR, TARGET_DIR
from backend.models.resolve import resolve

CLOSE_CALL = 1e-3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dflash.BlockDrafter, Path]:
    """A head after two steps on random text, and its directory."""
    directory = tmp_path_factory.mktemp("head") / "dflash"
    settings = replace(DrafterOptions(), steps=2, tokens_per_step=64, length=64)
    rows = torch.randint(3, 2048, (4, 64), generator=torch.Generator().manual_seed(1))
    with (
        mock.patch.object(dflash, "load_corpus"),
        mock.patch.object(dflash, "token_stream"),
        mock.patch.object(dflash, "training_rows", return_value=(rows, rows)),
    ):
        head = dflash.train_head(DemoOptions(drafter_dir=directory, head="dflash", device="cpu", drafter=settings))
    return head, directory


@torch.no_grad()
def test_a_drafter_drafts_what_the_training_predicts(trained: tuple[dflash.BlockDrafter, Path]) -> None:
    head, directory = trained
    assert find_misfits(str(directory), str(TARGET_DIR)).errors == []
    # The file has fewer digits.
    head.load_state_dict({name: each.bfloat16().float() for name, each in head.state_dict().items()})
    tokens = torch.randint(3, 2048, (1, 40), generator=torch.Generator().manual_seed(2))
    _, inputs = features(load_llama(TARGET_DIR), tokens, head.feature_layers)
    anchors, lengths = [10, 25, 1], [8, 5, 2]
    scores = head(tokens, inputs, torch.tensor([anchors]), torch.tensor([lengths]))[0]
    proposer = DFlashProposer(load_drafter(str(directory), str(TARGET_DIR), raw=True), 1024)
    compared = 0
    for block, (anchor, length) in enumerate(zip(anchors, lengths, strict=True)):
        proposer.open(block, tokens[0, : anchor + 1].tolist(), anchor, 0.0)
        (drafted,) = proposer.draft([DraftRequest(block, anchor + 1, anchor, inputs[0, :anchor], Until(length))])
        best = scores[block, :length].log_softmax(-1).max(-1)
        assert drafted.signs[::2] == pytest.approx(best.values.tolist(), abs=1e-3)
        sure = [place for place, lead in enumerate(drafted.signs[1::2]) if lead > CLOSE_CALL]
        assert [drafted.tokens[place] for place in sure] == best.indices[sure].tolist()
        compared += len(sure)
    assert compared > 10


def test_the_head_is_made_by_one_command_and_found() -> None:
    options, draft_model = parse(["--head", "dflash", "--drafter-minutes", "2"])
    assert (options.head, options.drafter_dir, options.drafter.minutes, draft_model) == ("dflash", DFLASH_DIR, 2.0, None)
    found = resolve(Settings.model_validate({"drafter": "demo-dflash"}), print)
    assert (found.drafter_kind, found.drafter_dir) == ("dflash", str(DFLASH_DIR))
