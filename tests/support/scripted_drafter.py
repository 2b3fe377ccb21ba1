"""A drafter whose answers a test decides.  Tests only."""

import threading
from collections.abc import Callable, Sequence
from typing import Self

from backend.drafter.loop import DrafterLoop
from backend.drafter.ngram import NgramProposer
from backend.drafter.proposer import NOTHING, Drafted, DraftRequest
from backend.drafter.service import DrafterService, Reply
from backend.fleet import DrafterRef
from backend.transport import Hub, Wire
from backend.wire.drafting import Drafts, Hello, Round, decode_to_drafter, decode_to_verifier

SURE = 8.0
"""Both signs of every token, value and lead: with these a verifier expects acceptance until it has seen rejections."""
Script = Callable[[list[int], int], list[int]]
"""Up to so many draft tokens for a request with these known tokens."""


class Scripted(NgramProposer):
    """Takes the features of the demo's head."""

    hidden = 256

    def __init__(self, script: Script) -> None:
        super().__init__(vocab_size=2048, max_position=1 << 20, cache_tokens=1 << 30)
        self.script = script

    def draft(self, batch: Sequence[DraftRequest]) -> list[Drafted]:
        return [self._drafted(ask) for ask in batch]

    def _drafted(self, ask: DraftRequest) -> Drafted:
        if not ask.until.k or self.length(ask.key) != ask.base_len:
            return NOTHING
        tokens = self.script(list(self._lookups[ask.key].tokens), ask.until.k)
        return Drafted(tokens, [SURE] * (2 * len(tokens)))


class ScriptedDrafter(DrafterService):
    """Runs the drafter's own loop in a thread of the test, until the end of a `with` block; it drafts nothing ahead."""

    def __init__(self, address: str, script: Script, drafter_id: str = "drafter-0") -> None:
        super().__init__(drafter_id, Scripted(script), idle_ttl_s=1e9)
        self.raw: Callable[[Drafts], bytes | None] | None = None
        """When set, makes the message that is sent instead of an answer; None: no message."""
        self.rounds: list[Round] = []
        self.answers = 0
        self.is_listened_to = False
        """Whether a verifier has greeted that takes drafts."""
        self.ref = DrafterRef(drafter_id, "incarnation", address, "", 1)
        self._hub = Hub(Wire())
        self._loop = DrafterLoop(self._hub, self._hub.router(address), self)
        self._thread = threading.Thread(target=self._loop.run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.stop()
        self._thread.join(10)
        self._hub.close()

    def receive(self, identity: bytes, frames: Sequence[bytes]) -> list[Reply]:
        message = decode_to_drafter(frames[0])
        if isinstance(message, Round):
            self.rounds.append(message)
        self.is_listened_to |= isinstance(message, Hello) and message.role == "drafts"
        return super().receive(identity, frames)

    def work(self) -> list[Reply]:
        return [reply for each in super().work() if (reply := self._instead(*each))]

    def _instead(self, listener: bytes, payload: bytes) -> Reply | None:
        message = decode_to_verifier(payload)
        if not isinstance(message, Drafts):
            return listener, payload
        sent = payload if self.raw is None else self.raw(message)
        self.answers += sent is not None
        return None if sent is None else (listener, sent)
