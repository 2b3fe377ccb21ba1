"""Learning from live traffic: heads that are made to learn, their training, and how they are put in place."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import Mock, PropertyMock

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from backend.config import Settings
from backend.config.settings import DraftingSettings
from backend.drafter import learner as learner_module
from backend.drafter.learner import Learner, ring_of
from backend.drafter.process import DrafterModel, DrafterProcess, build_proposer
from backend.drafter.proposer import DraftRequest, Until
from backend.learning import trainer as trainer_module
from backend.learning.lesson import acceptance_lengths, collate
from backend.learning.ring import Replay, ReplayRing, is_held_out
from backend.learning.rules import FEWEST, Watch
from backend.learning.trainable import Pupil, load_pupil, save_pupil, trained_tensors
from backend.learning.trainer import PASSES, Job, News, Trainer, newest_version
from backend.models.check import why_not_learning
from backend.models.demo import DRAFTER_DIR, TARGET_DIR
from backend.models.head_config import CheckpointError, load_config
from backend.models.initial_head import feature_layers, write_initial_head
from backend.models.resolve import resolve
from backend.models.tensor_files import TensorFiles
from tests.support.drafter_heads import check
from tests.support.fleet_process import wait_for

DEVICE = torch.device("cpu")
SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 512}
LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
STRETCH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4} | STRETCH

pytestmark = pytest.mark.usefixtures("in_float32")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("grow") / "start"
    write_initial_head(str(TARGET_DIR), directory, "demo")
    return str(directory)


def job_of(start: str, directory: Path) -> Job:
    return Job(str(TARGET_DIR), start, str(directory / "own"), str(directory / "ring"))


def test_versions_that_were_learned_from_another_head_are_refused(start: str, tmp_path: Path) -> None:
    shutil.copytree(DRAFTER_DIR, tmp_path / "drafter-0" / "versions" / "000001")
    model = DrafterModel(str(TARGET_DIR), start, start, str(tmp_path))
    settings = DraftingSettings(gpus=0, cache_tokens=512, learning="always")
    with pytest.raises(CheckpointError, match="000001: learned from another head, for aux_layers"):
        DrafterProcess("drafter-0", model, settings, "inproc://drafter")


def test_a_target_whose_scores_do_not_follow_from_its_last_norm_teaches_nothing(start: str, tmp_path: Path) -> None:
    shutil.copytree(TARGET_DIR, tmp_path / "target")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    for family in ("granite", "qwen3_next", "gemma3_text"):
        (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"model_type": family}))
        assert f"nothing is learned from a target of model_type {family!r}" in (
            why_not_learning(start, str(tmp_path / "target")) or ""
        )


def test_the_initial_head_fits(start: str) -> None:
    assert check(start, str(TARGET_DIR)) == []
    assert why_not_learning(start, str(TARGET_DIR)) is None
    assert load_config(start, str(TARGET_DIR)).aux_layers == feature_layers(5) == (2, 3, 5)
    assert all(len(set(feature_layers(layers))) == 3 and max(feature_layers(layers)) == layers for layers in range(2, 90))


@pytest.mark.parametrize("family", [Qwen3Config, partial(LlamaConfig, rope_parameters=LLAMA3)])
def test_a_head_in_training_computes_what_a_drafter_does(tmp_path: Path, family: Any) -> None:
    torch.manual_seed(0)
    target, head = str(tmp_path / "target"), str(tmp_path / "head")
    AutoModelForCausalLM.from_config(family(**SIZES, **LAYERS)).save_pretrained(target)
    write_initial_head(target, tmp_path / "head", "t")
    pupil = load_pupil(head, target, DEVICE)
    for tensor in trained_tensors(pupil.drafter).values():
        tensor.add_(0.1 * torch.randn_like(tensor))
    save_pupil(pupil, trained_tensors(pupil.drafter), tmp_path / "head")
    proposer = build_proposer(DrafterModel(target, head, head, "/anywhere"), DraftingSettings(gpus=0, cache_tokens=512))
    tokens, features = torch.randint(0, 300, (90,)).tolist(), torch.randn(89, 3 * 64)
    proposer.open("r", tokens, 89)
    (drafted,) = proposer.draft([DraftRequest("r", 90, 89, features, Until(4))])
    outputs = pupil.drafter.unroll(torch.tensor([[*tokens[1:], *drafted.tokens]]), features[None], 4)
    best = torch.stack([pupil.drafter.logits(each)[0, -1] for each in outputs]).log_softmax(-1).max(-1)
    assert drafted.tokens == best.indices.tolist()
    assert drafted.signs[::2] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_no_head_is_made_of_quantised_layers(tmp_path: Path, where: str) -> None:
    for file in TARGET_DIR.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((TARGET_DIR / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / where).unlink(missing_ok=True)
    (tmp_path / where).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantised layers: give an unquantised copy"):
        write_initial_head(str(tmp_path), tmp_path / "start", "m")


def test_a_given_head_is_widened_to_learn_and_drafts_the_same(tmp_path: Path) -> None:
    learning = {"learning": "always", "learning_dir": str(tmp_path / "own")}
    settings = Settings.model_validate({"drafting": learning})
    wide = resolve(settings, print).drafter_dir
    assert wide is not None
    written = Path(wide, "config.json").stat().st_mtime_ns
    assert check(wide, str(TARGET_DIR)) == []
    assert why_not_learning(wide, str(TARGET_DIR)) is None
    assert load_config(wide, str(TARGET_DIR)).aux_layers == (2, 3, 4, 5)
    features, found = torch.randn(8, 4 * 256), []
    for head in (str(DRAFTER_DIR), wide):
        model = DrafterModel(str(TARGET_DIR), head, head, str(tmp_path))
        proposer = build_proposer(model, DraftingSettings(gpus=0, cache_tokens=512))
        proposer.open("r", [5] * 9, 8)
        (drafted,) = proposer.draft([DraftRequest("r", 9, 8, features[:, : proposer.hidden], Until(4))])
        found.append(drafted.tokens)
    assert found[0] == found[1]
    teach(tmp_path / "ring", 20, 3)
    trainer = Trainer(job_of(wide, tmp_path))
    assert trainer.step()
    assert trainer.publish()
    assert resolve(settings, print).drafter_dir == wide
    assert Path(wide, "config.json").stat().st_mtime_ns == written, "it is made once"


def teach(directory: Path, count: int, others: int = 2) -> None:
    """A ring of sequences in which each token follows from the one before, with features that say what the target says."""
    ring = ReplayRing(directory, 1 << 30)
    pupil_target = load_embeddings()
    for number in range(ring.open_for_writing(), count + 1):
        generator = torch.Generator().manual_seed(number)
        begin = int(torch.randint(0, 40, (1,), generator=generator))
        tokens = 100 + (begin + 7 * torch.arange(49)) % 40
        # Position p's last hidden state points at the embedding of the token at p + 1.
        last = pupil_target[tokens[1:]] * 8
        features = torch.cat((torch.zeros(48, 256 * others), last), dim=1)
        ring.write(number, Replay(tokens.int(), features, 0, 4, 0.0))


def load_embeddings() -> torch.Tensor:
    files = TensorFiles(str(TARGET_DIR))
    name = files.find("embed_tokens.weight")
    assert name is not None
    return files.read(name).float()


def test_training_publishes_a_better_head_and_goes_on_after_a_restart(
    start: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    teach(tmp_path / "ring", 100)
    job = job_of(start, tmp_path)
    trainer = Trainer(job)
    while not trainer.is_due:
        assert trainer.step()
    examined = trainer.examine()
    assert examined is not None
    directory = examined.published
    assert newest_version(tmp_path / "own" / "versions") == (1, directory)
    assert check(directory, str(TARGET_DIR)) == []
    ring = ReplayRing(tmp_path / "ring", 0)
    held_out = collate([replay for n in ring.numbers() if is_held_out(n) and (replay := ring.read(n)) is not None], DEVICE)
    for each, expected in ((start, examined.present), (directory, examined.candidate)):
        lengths = acceptance_lengths(load_pupil(each, str(TARGET_DIR), DEVICE), held_out, 4)
        assert fmean(length for length in lengths if length is not None) == pytest.approx(expected)
    moved = Path(shutil.copytree(tmp_path / "own", tmp_path / "elsewhere" / "own"))
    there = Trainer(replace(job, head_dir=str(moved / "versions" / "000001"), directory=str(moved)))
    assert there.steps == trainer.steps
    caplog.clear()
    assert Trainer(replace(job, directory=str(moved))).steps == 0
    assert "trainer.pt is not used" in caplog.text
    again = Trainer(replace(job, head_dir=directory))
    assert again.steps == trainer.steps
    # Of a trainer that was killed while it wrote a version, nothing stays.
    (tmp_path / "own" / "versions" / ".000002-abcdef12").mkdir()
    Trainer(replace(job, head_dir=directory))
    assert [each.name for each in (tmp_path / "own" / "versions").iterdir()] == ["000001"]
    # Earlier versions are deleted in time, the one that it began with among them.
    shutil.rmtree(directory)
    assert check(again.publish(), str(TARGET_DIR)) == []


def test_steps_are_bounded_and_end_when_all_has_been_learned(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teach(tmp_path / "ring", 12)
    monkeypatch.setattr(trainer_module, "ROWS", 250)
    collated, goals = Mock(side_effect=collate), Mock(side_effect=Pupil.goals)
    monkeypatch.setattr(trainer_module, "collate", collated)
    monkeypatch.setattr(Pupil, "goals", lambda *given: goals(*given))
    trainer = Trainer(job_of(start, tmp_path))
    while trainer.step():
        assert [len(replay.features) for replay in collated.call_args.args[0]] == [48] * 5 + [10]
        # Three rows of each whole sequence say only what follows within its prompt.
        assert goals.call_args.args[1].shape == (45 * 5 + 10, 3 * 256)
    assert 0 < trainer.steps <= PASSES * 12 * 48 / 250


def test_a_trainer_keeps_what_it_learned_when_the_target_has_other_weights(start: str, tmp_path: Path) -> None:
    teach(tmp_path / "ring", 12)
    trainer = Trainer(job_of(start, tmp_path))
    assert trainer.step()
    pupil, turned = trainer._pupil, load_embeddings().flip(0).contiguous()
    learned = {name: tensor.clone() for name, tensor in trained_tensors(pupil.drafter).items()}
    rows = torch.ones(1, pupil.drafter.fc.in_features)
    newer = {"embed_tokens.weight": turned, "lm_head.weight": turned.clone(), "norm.weight": 2 * pupil.norm}
    save_file(newer, tmp_path / "target.safetensors")
    trainer.follow(str(tmp_path / "target.safetensors"))
    assert trainer.steps == 1
    kept = trained_tensors(trainer._pupil.drafter)
    assert all(torch.equal(kept[name], tensor) for name, tensor in learned.items())
    torch.testing.assert_close(trainer._pupil.goals(rows), 2 * pupil.goals(rows).flip(-1), rtol=1e-4, atol=1e-4)
    assert trainer.step()


@contextmanager
def learner(start: str, directory: Path, swap: Any = lambda head: None, learning: str = "always") -> Iterator[Learner]:
    made = Learner(directory / "drafter-0", str(TARGET_DIR), start, DraftingSettings(learning=learning), swap)
    try:
        yield made
    finally:
        made.stop()


def test_a_learners_ring_has_room_for_a_comparison_however_wide_rows_are(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "RING_BYTES", 4096)
    replay = Replay(torch.zeros(33, dtype=torch.int32), torch.zeros(32, 8), 0, 4, 0.0)
    with learner(start, tmp_path) as own:
        for _ in range(200):
            own._writer._queue.put(replay)
        wait_for(lambda: own.stats().sequences == 200)
        assert sum(map(is_held_out, ReplayRing(ring_of(tmp_path / "drafter-0"), 0).numbers())) >= FEWEST
    assert not ring_of(tmp_path / "drafter-0").exists()


def test_directories_at_one_path_in_two_containers_have_two_rings(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    first = ring_of(own)
    assert ring_of(own / ".." / "own") == first
    own.rename(tmp_path / "other")
    own.mkdir()
    assert ring_of(own) != first


def in_place_of_trainers(monkeypatch: pytest.MonkeyPatch, *reports: list[News] | None) -> list[subprocess.Popen[bytes]]:
    """Processes that say this and end, one after the other; the last ends with its input.  None: it cannot be started.

    Returns those that were started.
    """
    popen, started, told = subprocess.Popen, list[subprocess.Popen[bytes]](), iter(reports)

    def start(_: Any, **pipes: Any) -> subprocess.Popen[bytes]:
        report = next(told, ())
        if report is None:
            raise BlockingIOError("no process to be had")
        lines = b"".join(msgspec.json.encode(news) + b"\n" for news in report)
        script = 'printf %s "$0"' if report and report is not reports[-1] else 'printf %s "$0"; exec cat 3>&1 > /dev/null'
        started.append(popen(["sh", "-c", script, lines], **pipes))
        return started[-1]

    monkeypatch.setattr(learner_module, "RESTART_S", 0.0)
    monkeypatch.setattr("backend.drafter.learner.subprocess.Popen", start)
    return started


@pytest.mark.parametrize("fault", [CheckpointError, RuntimeError, OSError])
def test_a_head_that_cannot_be_loaded_is_put_away(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    refuse = Mock(side_effect=fault("spoiled"))
    spoiled = tmp_path / "drafter-0" / "versions" / "000001"
    in_place_of_trainers(monkeypatch, [News(1, 1.0, published=str(spoiled))])
    with learner(start, tmp_path, refuse) as own:
        write_initial_head(str(TARGET_DIR), spoiled, "demo")
        own.start("cpu")
        wait_for(lambda: not spoiled.exists())
        assert own.head_dir == start
        assert newest_version(spoiled.parent) == (0, None)
        with pytest.raises(CheckpointError, match="another drafter"), learner(start, tmp_path, refuse):
            pass


def test_old_versions_are_deleted_but_not_the_one_that_the_fleet_was_started_with(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = tmp_path / "drafter-0" / "versions"
    names = [f"{number:06d}" for number in range(1, 9)]
    in_place_of_trainers(monkeypatch, [News(1, 1.0, published=str(versions / name)) for name in names[1:]])
    write_initial_head(str(TARGET_DIR), versions / names[0], "demo")
    (tmp_path / "link").symlink_to(tmp_path)
    with learner(str(versions / names[0]), tmp_path / "link") as own:
        for name in names[1:]:
            shutil.copytree(versions / names[0], versions / name)
        own.start("cpu")
        wait_for(lambda: own.stats().published == len(names) - 1)
        wait_for(lambda: {each.name for each in versions.iterdir()} == {names[0], *names[4:]})


def test_steps_are_counted_from_each_trainers_first_report(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be started is tried again, and one that ends is started again."""
    in_place_of_trainers(monkeypatch, None, [News(100, 10.0), News(140, 14.0)], [News(90, 9.0), News(120, 12.0)])
    with learner(start, tmp_path) as own:
        own.start("cpu")
        wait_for(lambda: own.stats().steps == 120)
        assert (own.stats().new_steps, own.stats().new_training_s) == (70, 7)


def test_a_full_disk_keeps_the_targets_earlier_weights(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("safetensors.torch.save_file", Mock(side_effect=SafetensorError("No space left on device")))
    with learner(start, tmp_path) as own:
        own.follow({"norm.weight": torch.ones(2)})
    assert "taught by the target's earlier weights: No space left" in caplog.text


def test_a_drafter_process_starts_and_ends_its_trainer(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = in_place_of_trainers(monkeypatch)
    model = DrafterModel(str(TARGET_DIR), start, start, str(tmp_path))
    settings = DraftingSettings(gpus=0, cache_tokens=512)
    process = DrafterProcess("drafter-0", model, settings, f"ipc://{tmp_path}/d.sock")
    process.start()
    try:
        wait_for(lambda: bool(started))
        assert started[0].poll() is None
        learning = process.stats().learning
        assert learning is not None
        assert learning.version == 0
        with pytest.raises(CheckpointError, match="learns"):
            process.swap_head(start)
    finally:
        process.stop()
    assert started[0].poll() is not None


@pytest.mark.parametrize(("learning", "looks"), [("on", 3), ("always", 0), ("off", 0)])
def test_the_trainer_of_a_given_head_waits_until_it_is_needed(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learning: str, looks: int
) -> None:
    needs = PropertyMock(side_effect=[False, False, True])
    monkeypatch.setattr(Watch, "needs_learning", needs)
    monkeypatch.setattr(learner_module, "LOOK_EVERY_S", 0.01)
    started = in_place_of_trainers(monkeypatch)
    with learner(start, tmp_path, learning=learning) as own:
        own.start("cpu")
        wait_for(lambda: bool(started))
        assert needs.call_count == looks
