"""A verifier as a `DrafterService` sees it: `Round`s on its features socket, `Next`s on its drafts socket.  Tests only."""

from collections.abc import Sequence

import torch

from backend.drafter.service import DrafterService, Reply
from backend.wire import drafting as wire
from tests.support.drafter_heads import TinyHead

HEAD = TinyHead(hidden=16, heads=2, kv_heads=1)
TOKENS = [1, 2, 3, 4, 5, 6]


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def handle(service: DrafterService, identity: bytes, frames: Sequence[bytes]) -> list[Reply]:
    """Has a service take one message and do all work that waits.  Returns its replies."""
    replies = service.receive(identity, frames)
    while service.has_work:
        replies += service.work()
    return replies


class AheadVerifier:
    """Sends `Round`s and `Next`s to a service, and decodes its answers."""

    def __init__(self, service: DrafterService, name: str = "v", epoch: int = 1) -> None:
        self.service = service
        self.features, self.drafts = f"{name}/f/{epoch}".encode(), f"{name}/d/{epoch}".encode()
        handle(service, self.features, [wire.encode(wire.Hello(wire.PROTOCOL_VERSION, name, "features", epoch))])
        handle(service, self.drafts, [wire.encode(wire.Hello(wire.PROTOCOL_VERSION, name, "drafts", epoch))])

    def frames(
        self, *items: wire.Open | wire.Commit | wire.Close, hidden: int = HEAD.hidden, following: wire.Next | None = None
    ) -> list[bytes]:
        """A round, which may ask for drafts, too."""
        rows = [item for item in items if not isinstance(item, wire.Close)]
        pieces = [torch.randn(i.rows, hidden, generator=torch.Generator().manual_seed(i.base_len)) for i in rows]
        data = torch.cat(pieces).numpy().tobytes() if pieces else b""
        return [wire.encode(wire.Round("float32", hidden, list(items), None, following)), data]

    def receive_round(self, *items: wire.Open | wire.Commit | wire.Close) -> None:
        assert self.service.receive(self.features, self.frames(*items)) == []

    def receive_next(self, *items: wire.NextItem, chance_weights: Sequence[list[float]] = ()) -> None:
        assert self.service.receive(self.drafts, [wire.encode(wire.Next(list(items), list(chance_weights)))]) == []

    def round(self, *items: wire.Open | wire.Commit | wire.Close) -> list[wire.ToVerifier]:
        self.receive_round(*items)
        return self.work()

    def next(self, *items: wire.NextItem, chance_weights: Sequence[list[float]] = ()) -> list[wire.ToVerifier]:
        self.receive_next(*items, chance_weights=chance_weights)
        return self.work()

    def step(self) -> list[wire.ToVerifier]:
        return self.read(self.service.work())

    def work(self) -> list[wire.ToVerifier]:
        found: list[wire.ToVerifier] = []
        while self.service.has_work:
            found += self.step()
        return found

    def read(self, replies: list[Reply]) -> list[wire.ToVerifier]:
        messages = [wire.decode_to_verifier(payload) for identity, payload in replies if identity == self.drafts]
        for message in messages:
            assert isinstance(message, wire.Drafts | wire.Ahead)
        return messages


def opening(request_id: str = "a", tokens: list[int] | None = None, seed: int = 0, temperature: float = 0.0) -> wire.Open:
    tokens = TOKENS if tokens is None else tokens
    return wire.Open(request_id, len(tokens), list(tokens), len(tokens) - 1, seed, temperature)


def drafts_of(messages: list[wire.ToVerifier]) -> list[wire.Draft]:
    return [draft for m in messages if isinstance(m, wire.Drafts) for draft in m.items]


def blocks_of(messages: list[wire.ToVerifier]) -> list[wire.Block]:
    return [block for m in messages if isinstance(m, wire.Ahead) for block in m.items]
