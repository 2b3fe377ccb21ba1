"""A drafter without Ray: builds the proposer, binds the socket and runs the loop on a thread of its own.

The owner of the process (the Ray actor, or a test) calls `start`, `stop` and `stats`.
"""

import logging
import pkgutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from backend.config.settings import DraftingSettings
from backend.drafter.following import Following
from backend.drafter.learner import Learner
from backend.drafter.loop import DrafterLoop
from backend.drafter.proposer import Proposer
from backend.drafter.service import DrafterService
from backend.drafter.spans import DraftSpans
from backend.fleet import DrafterStats
from backend.models.checkpoint import load_drafter
from backend.models.head_config import CheckpointError, HeadConfig, load_config, read_config, same_features, text_config
from backend.models.kinds import KINDS, DrafterKind
from backend.tracing import Tracing
from backend.transport.hub import Hub
from backend.transport.sockets import ServerKeys, Wire
from backend.wire.drafting import TargetTensor

logger = logging.getLogger(__name__)

JOIN_S = 10.0
SWAP_TIMEOUT_S = 60.0
RETRY_S = 60.0
"""Pause after the first failure to put the target's new weights in place; each further pause is twice as long."""
UNLIMITED = 2**31
"""Vocabulary size and longest position of a target whose configuration leaves them to its class, as Gemma 3's does."""
TAUGHT: frozenset[TargetTensor] = frozenset(("lm_head.weight", "norm.weight"))
"""The target's tensors that a head is trained against."""
IDLE_TTL_S = 120.0
"""A sequence without a message for so long is forgotten."""


@dataclass(frozen=True)
class DrafterModel:
    """What a drafter drafts with, and for which target.

    `head_dir`: the directory of an EAGLE head or a draft model; None: `kind` has no weights.
    `fleet_head`: the head whose features verifiers send; None: they send none.
    `learning_dir`: where drafters keep the heads they learn (features are raw then); None: they do not learn.
    `newer`: target tensors that replace those in the target's directory.
    `kind`: what drafts without a `head_dir`; with one, its configuration says what it is.
    """

    target_dir: str
    head_dir: str | None
    fleet_head: str | None = None
    learning_dir: str | None = None
    newer: Mapping[str, Tensor] = field(default_factory=dict)
    kind: DrafterKind = "ngram"


def build_proposer(model: DrafterModel, settings: DraftingSettings) -> Proposer:
    """Loads the model's weights; without weights, reads the target's configuration.  Raises `CheckpointError`."""
    if model.head_dir is None:
        target = text_config(read_config(model.target_dir))
        vocab, longest = (int(target.get(key) or UNLIMITED) for key in ("vocab_size", "max_position_embeddings"))
        return _proposer_of(model.kind)(vocab, longest, settings.cache_tokens)
    weights = load_drafter(model.head_dir, model.target_dir, model.learning_dir is not None, model.newer)
    return _proposer_of(weights.config.drafter_kind)(weights, settings.cache_tokens, _device(settings), settings.cuda_graphs)


def _proposer_of(kind: DrafterKind) -> Callable[..., Proposer]:
    found: Callable[..., Proposer] = pkgutil.resolve_name(KINDS[kind].proposer)
    return found


def _reads_features(config: HeadConfig) -> bool:
    return KINDS[config.drafter_kind].takes_features


def _device(settings: DraftingSettings) -> str:
    if settings.gpus and torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        # Raises, with the cause, where CUDA does not come up: a reserved GPU must not idle unnoticed.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    return "cuda" if settings.gpus != 0 and torch.cuda.is_available() else "cpu"


class DrafterProcess:
    """The drafting thread and its socket.  `on_crash` is called on that thread when it dies of an exception."""

    def __init__(
        self,
        drafter_id: str,
        model: DrafterModel,
        settings: DraftingSettings,
        address: str,
        wire: Wire | None = None,
        server_keys: ServerKeys | None = None,
        on_crash: Callable[[], None] | None = None,
        tracing: Tracing | None = None,
        local_address: str = "",
    ) -> None:
        self._drafter_id = drafter_id
        self._model = model
        self._settings = settings
        self._tracing = tracing
        self._on_crash = on_crash
        self._learner: Learner | None = None
        is_head = model.head_dir is not None and _reads_features(load_config(model.head_dir, model.target_dir))
        if model.learning_dir is not None and model.head_dir is not None and is_head:
            directory = Path(model.learning_dir) / drafter_id
            self._learner = Learner(directory, model.target_dir, model.head_dir, settings, self._exchange)
            newest = self._learner.head_dir
            if reason := same_features(load_config(newest, model.target_dir), load_config(model.head_dir, model.target_dir)):
                self._learner.stop()
                raise CheckpointError(
                    f"{newest}: learned from another head, for {reason}; choose another drafting.learning_dir"
                )
            model = self._model = replace(model, head_dir=newest)
        taught: frozenset[TargetTensor] = frozenset() if self._learner is None else TAUGHT
        proposer = build_proposer(model, settings)
        lessons = None if self._learner is None else self._learner.lessons
        spans = DraftSpans(tracing, drafter_id)
        self._exchanging = threading.Lock()
        self._newest: dict[str, Tensor] = {}
        following = Following(lambda: self._service.proposer.borrowed | taught, self._follow)
        self._service = DrafterService(drafter_id, proposer, IDLE_TTL_S, spans=spans, lessons=lessons, following=following)
        self._hub = Hub(wire or Wire())
        try:
            router = self._hub.router(address, server_keys, local_address)
        except (OSError, ValueError):
            self._hub.close()
            raise
        self.address = router.address
        self._stopping = threading.Event()
        self._closing = threading.Lock()
        self._is_closed = False
        self._loop = DrafterLoop(self._hub, router, self._service)
        self._thread = threading.Thread(target=self._run, name=f"drafter-{drafter_id}", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()
        if self._learner is not None:
            self._learner.start(_device(self._settings))

    def stop(self) -> None:
        """Ends serving; the socket is closed when this returns.  Does nothing after a crash or a stop."""
        self._stopping.set()
        if self._learner is not None:
            self._learner.stop()
        with self._closing:
            if not self._is_closed:
                self._loop.stop()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        if self._tracing is not None:
            self._tracing.close()

    @property
    def takes_features(self) -> bool:
        """Whether verifiers have to send features to this drafter."""
        return self._service.proposer.hidden > 0

    def swap_head(self, head_dir: str) -> None:
        """Drafts with the head or draft model in `head_dir` from the next batch on.  Any thread but the drafting one.

        Raises `CheckpointError`, and keeps the present model, if the new one does not fit the target or what verifiers send.
        Raises `TimeoutError` if the drafting thread is stuck.
        """
        if self._learner is not None:
            raise CheckpointError("this drafter learns its heads itself")
        self._exchange(head_dir)

    def _exchange(self, head_dir: str) -> None:
        if not Path(head_dir).is_dir():
            raise CheckpointError(f"{head_dir}: no such directory")
        target_dir, fleet_head = self._model.target_dir, self._model.fleet_head
        new = load_config(head_dir, target_dir)
        if _reads_features(new):
            if fleet_head is None:
                raise CheckpointError(f"{head_dir}: an EAGLE head, and this fleet's verifiers send no features")
            if reason := same_features(new, load_config(fleet_head, target_dir)):
                raise CheckpointError(f"{head_dir}: {reason}")
        with self._exchanging:
            self._put(replace(self._model, head_dir=head_dir))

    def _put(self, model: DrafterModel, retargeted: bool = False) -> None:
        try:
            proposer = build_proposer(model, self._settings)
        except torch.OutOfMemoryError as error:
            raise CheckpointError(f"{model.head_dir}: the device has no memory for it beside the present model") from error
        self._loop.replace(proposer, SWAP_TIMEOUT_S, retargeted)
        self._model = model

    def _follow(self, newer: dict[str, Tensor]) -> None:
        """Adopts the target's new weights on a new thread.  Called on the drafting thread, which goes on."""
        self._newest = newer
        threading.Thread(target=self._adopt, args=(newer,), name="following", daemon=True).start()

    def _adopt(self, newer: dict[str, Tensor]) -> None:
        """Tries until the target's new weights are in place, newer ones have come, or the drafter stops."""
        pause_s = RETRY_S
        while not self._has_adopted(newer) and not self._stopping.wait(pause_s):
            pause_s *= 2

    def _has_adopted(self, newer: dict[str, Tensor]) -> bool:
        with self._exchanging:
            if newer is not self._newest:
                return True
            try:
                self._put(replace(self._model, newer=newer), retargeted=True)
            except Exception as error:
                logger.warning("drafter %s does not follow its target's new weights yet: %r", self._drafter_id, error)
                return False
        logger.info("drafter %s drafts with %s of the target's new weights", self._drafter_id, ", ".join(sorted(newer)))
        if self._learner is not None:
            self._learner.follow(newer)
        return True

    def stats(self) -> DrafterStats:
        stats = self._loop.stats()
        return stats if self._learner is None else msgspec.structs.replace(stats, learning=self._learner.stats())

    def _run(self) -> None:
        # The socket was bound by the thread that built this object.  From now on only this thread uses it.
        try:
            self._loop.run()
        except Exception:
            logger.exception("drafter %s: the drafting thread died", self._drafter_id)
            if self._on_crash is not None:
                self._on_crash()
        finally:
            with self._closing:
                self._is_closed = True
                self._hub.close()
