"""A real EAGLE drafter, in a thread of the test, that keeps the features it received and the drafts it sent.  Tests only."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from backend.config import DraftingSettings
from backend.drafter.eagle import EagleProposer
from backend.drafter.process import DrafterModel, build_proposer
from backend.drafter.proposer import Sampling
from backend.drafter.service import DrafterService
from backend.drafter.sessions import TORCH_DTYPES
from backend.fleet import DrafterRef
from backend.models.resolve import ResolvedModels
from backend.transport import Hub, Wire
from backend.wire.drafting import Close, Drafts, Open, Round, decode_to_drafter, decode_to_verifier


def eagle(paths: ResolvedModels) -> EagleProposer:
    """A proposer with the head of `paths` and a large cache."""
    proposer = build_proposer(DrafterModel(paths.target_dir, paths.drafter_dir), DraftingSettings(cache_tokens=65536))
    assert isinstance(proposer, EagleProposer)
    return proposer


class NotingDrafter:
    """Keeps, by request: `sampling`, `features` by position, and fresh `drafts` by base length."""

    def __init__(self, address: str, paths: ResolvedModels) -> None:
        self.ref = DrafterRef("drafter-0", "noting", address, "", 1)
        self.sampling: dict[str, Sampling] = {}
        self.features: dict[str, dict[int, Tensor]] = {}
        self.drafts: dict[str, dict[int, list[int]]] = {}
        self._service = DrafterService("drafter-0", eagle(paths), 600.0)
        self._stop, self._ready = threading.Event(), threading.Event()
        self._hub: Hub
        self._thread = threading.Thread(target=self._run, args=(address,), daemon=True)
        self._thread.start()
        assert self._ready.wait(120)

    def close(self) -> None:
        self._stop.set()
        self._hub.wake()
        self._thread.join(10)

    def _run(self, address: str) -> None:
        self._hub = Hub(Wire())
        router = self._hub.router(address)
        self._ready.set()
        while not self._stop.is_set():
            if not self._service.has_work:
                self._hub.poll(0.2)
            replies = []
            while (message := router.receive()) is not None:
                self._note(message[1])
                replies += self._service.receive(*message)
            if self._service.has_work:
                replies += self._service.work()
            for identity, payload in replies:
                router.send(identity, payload)
                answer = decode_to_verifier(payload)
                for draft in answer.items if isinstance(answer, Drafts) else []:
                    self.drafts.setdefault(draft.request_id, {})[draft.base_len] = draft.tokens
        self._hub.close()

    def _note(self, frames: list[bytes]) -> None:
        message = decode_to_drafter(frames[0])
        if not isinstance(message, Round) or not frames[1]:
            return
        rows = torch.frombuffer(bytearray(frames[1]), dtype=TORCH_DTYPES[message.dtype]).view(-1, message.hidden)
        at = 0
        for item in message.items:
            if isinstance(item, Close):
                continue
            if isinstance(item, Open):
                self.sampling[item.request_id] = Sampling.of(item.seed, item.temperature)
            known = self.features.setdefault(item.request_id, {})
            for i in range(item.rows):
                known[item.base_len - 1 - item.rows + i] = rows[at + i]
            at += item.rows
