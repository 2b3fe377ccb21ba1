"""Finds the models that a fleet runs: turns names into directories, and refuses misfits before anything heavy starts.

Runs in the launcher's process (and in `outrider check-config`); all other processes get its result, a `ResolvedModels`.  Only
headers and JSON files are read here, and neither torch nor vLLM is imported.
"""

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from backend.config import REMOTE_MODES, Settings, environment
from backend.config.sources import ConfigError, Say
from backend.models.check import find_misfits, reads_last_state, why_not_learning
from backend.models.demo import DFLASH_DIR, DRAFTER_DIR, TARGET_DIR
from backend.models.head_config import MASK_EMBEDDING, CheckpointError, load_config, read_config, same_features, text_config
from backend.models.initial_head import write_initial_head, write_widened_head
from backend.models.kinds import KINDS, WEIGHTLESS, DrafterKind

DEMO = "demo"
DEMO_DFLASH = "demo-dflash"
GROW = "grow"
NEEDS_OWN_CODE = {"MiMoForCausalLM"}
"""Architectures whose configuration vLLM reads by the checkpoint's own code."""
MODES_WITH_DRAFTS = REMOTE_MODES | {"native"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")
DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", MASK_EMBEDDING)
OTHER_COPIES = ("original/*", "metal/*")
"""Weights once more, in formats that vLLM does not read (Llama's, gpt-oss's)."""
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class ModelError(ConfigError):
    """A model cannot be used; the message is one line that says which and why."""


class OwnDrafter(msgspec.Struct, frozen=True):
    """The model of one drafter."""

    directory: str | None
    """None for a kind without weights."""
    kind: DrafterKind
    name: str = ""
    """The name given in `--drafter`; empty: all of `--drafter`."""

    @property
    def takes_features(self) -> bool:
        """Whether verifiers send features to this drafter."""
        return KINDS[self.kind].takes_features


class ResolvedModels(msgspec.Struct, frozen=True):
    """The models of a fleet, as local directories.

    If drafters have different models, `drafter_dir` and `drafter_kind` are those of the first EAGLE head, for which verifiers
    send features; without a head, those of the first drafter.
    """

    target_dir: str
    drafter_dir: str | None
    """The directory of the EAGLE head or draft model; None if `drafter_kind` has no weights."""
    drafter_kind: DrafterKind
    name: str = ""
    """The target's name: a Hugging Face id, the name of its directory, or `demo`."""
    in_turn: tuple[OwnDrafter, ...] = ()
    """If drafters have different models: `drafter-N` has entry N modulo the length.  Empty: all have the one above."""
    learning_dir: str | None = None
    """Where drafters keep the heads that they learn; None: they do not learn."""

    @property
    def has_weights(self) -> bool:
        """Whether some drafter has weights, and so needs a device."""
        return any(KINDS[each].has_weights for each in (self.drafter_kind, *(one.kind for one in self.in_turn)))

    def drafter(self, member_id: str) -> OwnDrafter:
        """The model of the drafter `drafter-N`."""
        number = member_id.rpartition("-")[2]
        if not self.in_turn or not number.isdigit():
            return OwnDrafter(self.drafter_dir, self.drafter_kind)
        return self.in_turn[int(number) % len(self.in_turn)]


def resolve(settings: Settings, say: Say) -> ResolvedModels:
    """Finds the models, downloads those whose name is not a directory, and checks that they fit together.

    Raises `ModelError`.  `say` gets warnings, and a line when a download starts.
    """
    if not _is_path(settings.model):
        # Checked before anything is downloaded.
        check_combination(settings)
    target = find("--model", settings.model, TARGET_DIR, say, trusts_code(settings))
    _check_serving(check_target(target), settings)
    check_combination(settings)
    name = settings.model if not _is_path(settings.model) else target.name
    if settings.mode not in MODES_WITH_DRAFTS:
        return ResolvedModels(str(target), None, "none", name)
    names = drafter_names(settings)
    found = [_drafter(each, target, settings, say) for each in names]
    learning_dir = None
    if GROW in names or settings.drafting.learning != "off":
        found, learning_dir = _learn(found, target, settings), str(_learning_dir(settings, target))
    first = next((each for each in found if each.takes_features), found[0])
    _check_features(found, target)
    in_turn = tuple(found) if len(found) > 1 else ()
    return ResolvedModels(str(target), first.directory, first.kind, name, in_turn, learning_dir)


def drafter_names(settings: Settings) -> list[str]:
    """The names in `--drafter`, one or several."""
    return [name.strip() for name in settings.drafter.split(",")]


def _drafter(name: str, target: Path, settings: Settings, say: Say) -> OwnDrafter:
    """Refuses a head or draft model that does not fit the target; `say` gets warnings about what merely lowers acceptance."""
    if name in WEIGHTLESS:
        return OwnDrafter(None, WEIGHTLESS[name], name)
    if name in (GROW, DEMO_DFLASH):
        directory = _initial_head(target, settings) if name == GROW else DFLASH_DIR
    else:
        directory = find("--drafter", name, DRAFTER_DIR, say, trusts_code(settings))
    if missing := missing_weights(directory):
        raise ModelError(f"--drafter {directory}: {missing}")
    found = find_misfits(str(directory), str(target))
    if found.errors:
        raise ModelError(f"--drafter {name} does not fit --model {settings.model}: {found.errors[0]}")
    for warning in found.warnings:
        say(f"warning: drafter {name}: {warning}")
    return OwnDrafter(str(directory), found.kind, name)


def _check_features(found: Sequence[OwnDrafter], target: Path) -> None:
    """Refuses heads that need other features than the first one."""
    heads = [each.directory for each in found if each.takes_features and each.directory is not None]
    configs = [load_config(head, str(target)) for head in heads]
    for head, config in zip(heads, configs, strict=True):
        if reason := same_features(config, configs[0]):
            raise ModelError(f"--drafter {head}: {reason}")


def check_combination(settings: Settings) -> None:
    """Refuses settings that contradict each other."""
    if settings.mode in REMOTE_MODES and settings.drafters == 0:
        raise ModelError(f"--mode {settings.mode} needs a drafter: give --drafters 1 or more, or --mode native or off")
    names = drafter_names(settings)
    if len(names) > 1 and settings.mode == "native":
        raise ModelError("--mode native drafts with one model: give --drafter one name")
    if len(names) > 1 and settings.mode in REMOTE_MODES and settings.drafters != "auto" and settings.drafters < len(names):
        raise ModelError(f"--drafter names {len(names)} models, and --drafters is {settings.drafters}")
    if settings.mode == "native" and names[0] in WEIGHTLESS and KINDS[WEIGHTLESS[names[0]]].native is None:
        raise ModelError(f"--mode native cannot draft with {names[0]}, which drafters alone can: give another mode")
    if GROW in names and settings.mode == "native":
        raise ModelError("--drafter grow learns on drafters of its own, which --mode native has not: give another mode")
    if settings.drafting.learning != "off" and (set(names) <= WEIGHTLESS.keys() or settings.mode not in REMOTE_MODES):
        raise ModelError("--drafting-learning needs an EAGLE head on a drafter of its own: another --drafter or --mode")
    if DEMO in names and settings.model != DEMO and settings.mode in MODES_WITH_DRAFTS:
        raise ModelError(
            f"--drafter demo fits only the demo model, not {settings.model}: "
            "give --drafter an EAGLE head or a small model with a similar tokenizer, or --drafter ngram, or --mode off"
        )


def check_without_download(settings: Settings, say: Say) -> None:
    """Checks as much as possible without network access and without writing anything.  Raises `ModelError`."""
    if all(name in (DEMO, DEMO_DFLASH, *WEIGHTLESS) or _is_path(name) for name in (settings.model, *drafter_names(settings))):
        resolve(settings, say)
    else:
        check_combination(settings)


def find(option: str, name: str, demo: Path, say: Say, code: bool = False) -> Path:
    """The directory a model name stands for; a download brings its Python files with `code`.  Raises `ModelError`."""
    if name == DEMO:
        if not (demo / "config.json").is_file():
            raise ModelError(f"{option} demo: the built-in model is not there; make it with `outrider train-demo`")
        return demo
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise ModelError(f"{option} {name}: {error}") from error
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        raise ModelError(f"{option} {name}: is a file; give the directory that holds config.json")
    if _is_path(name):
        shown = name if str(path) == name else f"{name} (that is {path})"
        raise ModelError(f"{option} {shown}: no such directory")
    return _download(option, name, say, code)


def check_target(directory: Path) -> dict[str, Any]:
    """Refuses a directory that vLLM could not load: no configuration, weights or tokenizer.  Returns the configuration."""
    config = _read(directory, "--model")
    if not config.get("architectures"):
        raise ModelError(f"--model {directory}: config.json names no architectures: not a language model's directory")
    if missing := missing_weights(directory):
        raise ModelError(f"--model {directory}: {missing}")
    if not any((directory / file).is_file() for file in TOKENIZER_FILES):
        raise ModelError(f"--model {directory}: no tokenizer ({', '.join(TOKENIZER_FILES[:2])})")
    return config


def _check_serving(config: dict[str, Any], settings: Settings) -> None:
    """Refuses a target that needs code which is not trusted, or that vLLM cannot split over the tensor-parallel ranks."""
    has_code = "AutoConfig" in (config.get("auto_map") or {})
    if has_code and NEEDS_OWN_CODE & set(config["architectures"]) and not trusts_code(settings):
        trust = "--verifier-engine-args '{\"trust_remote_code\": true}'"
        raise ModelError(f"--model {settings.model}: vLLM needs the checkpoint's own code; if you trust that: {trust}")
    heads, ranks = text_config(config).get("num_attention_heads"), settings.verifier.tensor_parallel
    if isinstance(heads, int) and heads % ranks:
        raise ModelError(f"--model {settings.model}: its {heads} attention heads cannot be dealt out to {ranks} ranks evenly")


def trusts_code(settings: Settings) -> bool:
    """Whether code that comes with a checkpoint may be run."""
    return bool(settings.verifier.engine_args.get("trust_remote_code"))


def _learn(found: Sequence[OwnDrafter], target: Path, settings: Settings) -> list[OwnDrafter]:
    """Refuses heads that cannot learn.  Returns the drafters with the heads that learning begins with."""
    learning = []
    for each in found:
        if each.takes_features and each.directory is not None:
            if reason := why_not_learning(each.directory, str(target)):
                raise ModelError(f"--drafting-learning: {each.directory}: {reason}")
            each = msgspec.structs.replace(each, directory=str(_wide_head(Path(each.directory), target, settings)))
        learning.append(each)
    if not any(each.takes_features for each in found):
        raise ModelError("--drafting-learning: only EAGLE heads learn, and --drafter names none")
    return learning


def _wide_head(head: Path, target: Path, settings: Settings) -> Path:
    """The directory of a head that reads the target's last hidden state: `head`, or a copy of it; made if there is none."""
    if reads_last_state(str(head), str(target)):
        return head
    changed = max(file.stat().st_mtime_ns for file in head.iterdir())
    digest = hashlib.sha256(f"{head} {changed}".encode()).hexdigest()[:8]
    wide = _learning_dir(settings, target) / f"start-{digest}"
    if not wide.is_dir():
        try:
            write_widened_head(str(head), str(target), wide)
        except OSError as error:
            raise ModelError(f"--drafting-learning: {wide} cannot be written: {error}") from error
    return wide


def _learning_dir(settings: Settings, target: Path) -> Path:
    """The directory for learned heads: as set, or one for each target and `--drafter`."""
    if settings.drafting.learning_dir is not None:
        return Path(settings.drafting.learning_dir)
    digest = hashlib.sha256(f"{target}\n{settings.drafter}".encode()).hexdigest()[:8]
    return environment.state_dir() / "learning" / f"{target.name}-{digest}"


def _initial_head(target: Path, settings: Settings) -> Path:
    """The directory of the head that learning begins with; makes the head if there is none yet."""
    head = _learning_dir(settings, target) / "start"
    if not head.is_dir() or find_misfits(str(head), str(target)).errors:
        try:
            write_initial_head(str(target), head, target.name)
        except CheckpointError as error:
            raise ModelError(f"--drafter grow: {error}") from error
        except OSError as error:
            raise ModelError(f"--drafter grow: {head} cannot be written: {error}") from error
    return head


def missing_weights(directory: Path) -> str | None:
    """Which of a checkpoint's weights are missing, in words; None: all are there."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        # Pickles are not read where there are safetensors, which may be one file without an index.
        if not (directory / index).is_file() or (index.startswith("pytorch") and any(directory.glob("*.safetensors"))):
            continue
        shards = sorted(set(_read(directory, "weights", index).get("weight_map", {}).values()))
        absent = [shard for shard in shards if not (directory / shard).is_file()]
        return f"{len(absent)} of {len(shards)} weight files are missing ({absent[0]})" if absent else None
    if not any(any(directory.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.pt")):
        return "no weights (*.safetensors)"
    return None


def _read(directory: Path, option: str, name: str = "config.json") -> dict[str, Any]:
    try:
        return read_config(str(directory), name)
    except CheckpointError as error:
        raise ModelError(f"{option} {error}") from error


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).exists()


def _download(option: str, name: str, say: Say, code: bool) -> Path:
    """The hub's snapshot of a repository; from the local cache if it is complete there or the hub cannot be reached."""
    if not REPOSITORY.fullmatch(name):
        raise ModelError(f"{option} {name}: neither a directory nor a Hugging Face id")
    # Imported here, since the import takes a second and the demo does without.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    offline = environment.huggingface_offline()
    if not offline:
        say(f"{name}: fetching from the Hugging Face hub (what is cached is not fetched again)")
    fetch = partial(snapshot_download, name, local_files_only=offline, ignore_patterns=[*OTHER_COPIES])
    wanted = [*DOWNLOADED, "*.py"] if code else [*DOWNLOADED]
    try:
        directory = Path(fetch(allow_patterns=wanted))
        if missing_weights(directory):
            directory = Path(fetch(allow_patterns=[*wanted, "*.bin"]))
    except GatedRepoError as error:
        raise ModelError(f"{option} {name}: the hub asks for permission (accept its terms, then set HF_TOKEN)") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{option} {name}: no such directory, and no such model on the Hugging Face hub") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if offline else "the Hugging Face hub cannot be reached"
        raise ModelError(f"{option} {name}: no such directory, not in the local cache, and {why}") from error
    except Exception as error:  # the hub client also raises errors of its HTTP library
        raise ModelError(f"{option} {name}: download failed: {' '.join(str(error).split())[:200]}") from error
    return directory
