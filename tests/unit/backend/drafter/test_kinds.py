"""The table of kinds of drafters: a new kind without weights is an entry and a file of its own."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from backend.config import DraftingSettings, Settings
from backend.drafter.ngram import NgramProposer
from backend.drafter.process import DrafterModel, build_proposer
from backend.drafter.proposer import DraftRequest, Until
from backend.launch.plan import Hardware, plan
from backend.models.demo import TARGET_DIR
from backend.models.kinds import KINDS, WEIGHTLESS, Kind
from backend.models.resolve import ModelError, resolve


class Silent(NgramProposer):
    """A kind that the fleet does not know."""


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast(dict[str, Kind], KINDS), "silent", Kind(f"{__name__}:Silent"))
    monkeypatch.setitem(cast(dict[str, str], WEIGHTLESS), "silent", "silent")


def given(**changes: Any) -> Settings:
    return Settings.model_validate(changes)


@pytest.mark.usefixtures("silent")
def test_a_new_kind_is_resolved_placed_and_built(tmp_path: Path) -> None:
    settings = given(mode="sync", drafter="silent")
    models = resolve(settings, print)
    assert (models.drafter_kind, models.drafter_dir) == ("silent", None)
    decided = plan(settings, models, Hardware(cores=[0, 1], gpus=1.0, local=True), tmp_path)
    assert [member.num_gpus for member in decided.members] == [1.0, 0.0], "it computes on no device"
    own = models.drafter("drafter-0")
    assert not own.takes_features
    assert isinstance(build_proposer(DrafterModel(str(TARGET_DIR), own.directory, kind=own.kind), DraftingSettings()), Silent)


@pytest.mark.usefixtures("silent")
def test_mode_native_and_learning_refuse_a_kind_that_they_cannot_use() -> None:
    for changes, line in (
        ({"mode": "native", "drafter": "silent"}, "native cannot draft with silent"),
        ({"drafter": "silent,ngram", "drafters": 2, "drafting": {"learning": "on"}}, "needs an EAGLE head"),
    ):
        with pytest.raises(ModelError, match=line):
            resolve(given(**changes), print)


def test_look_ups_need_no_sizes_of_the_target(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    proposer = build_proposer(DrafterModel(str(tmp_path), None), DraftingSettings())
    assert (proposer.vocab_size, proposer.max_position) == (2**31, 2**31)
    proposer.open("r", [262_207, 5, 6, 7, 262_207, 5, 6], 0)
    assert proposer.draft([DraftRequest("r", 7, 0, None, Until(2))])[0].tokens == [7, 262_207]
