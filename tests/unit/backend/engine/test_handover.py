"""A drafter that takes over a running request drafts what the old one would have drafted, if it was handed the features."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from backend.drafter.service import DrafterService
from backend.engine import feature_link, features
from backend.engine.features import FeatureShipper
from backend.fleet import DrafterRef
from backend.models.head_config import CheckpointError
from backend.speculation.pairing import Pairing
from backend.transport import Wire
from backend.wire.drafting import (
    PROTOCOL_VERSION,
    Close,
    Commit,
    Drafts,
    Hello,
    Next,
    NextItem,
    Open,
    Round,
    decode_to_drafter,
    decode_to_verifier,
    encode,
)
from tests.support.ahead_verifier import handle
from tests.support.drafter_heads import TinyHead, make_proposer
from tests.support.rows import step_of

HEAD = TinyHead(hidden=16, heads=2, kv_heads=1)
K = 4


@dataclass
class Line:
    """Stands for a socket to a drafter: what is sent is taken in at once, and a draft asked for after each round."""

    service: DrafterService
    name: bytes = b"v/features"
    is_full: bool = False
    rounds: list[Round] = field(default_factory=list)
    drafts: dict[str, list[int]] = field(default_factory=dict)

    def send(self, *frames: bytes) -> bool:
        if self.is_full:
            return False
        message = decode_to_drafter(frames[0])
        replies = handle(self.service, self.name, frames)
        if isinstance(message, Hello):
            self.drafts.clear()
            listener = Hello(PROTOCOL_VERSION, message.verifier_id, "drafts", message.epoch)
            handle(self.service, b"v/drafts", (encode(listener),))
        else:
            assert isinstance(message, Round)
            assert bool(replies) == (message.next is not None)
            self.rounds.append(message)
            self.ask({item.request_id: item.base_len for item in message.items if not isinstance(item, Close)})
        return True

    def ask(self, lengths: dict[str, int]) -> None:
        wishes = [NextItem(request_id, length, K, [], 0) for request_id, length in lengths.items()]
        for _, payload in handle(self.service, b"v/drafts", (encode(Next(wishes)),)):
            answer = decode_to_verifier(payload)
            assert isinstance(answer, Drafts), answer
            self.drafts |= {draft.request_id: draft.tokens for draft in answer.items}

    def receive(self) -> None:
        return None

    def close(self) -> None:
        pass


class Bench:
    """A verifier's worker, its drafters behind lines, and requests whose tokens and features are drawn from a seed."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, handover_bytes: int) -> None:
        self.lines = {name: Line(DrafterService(name, make_proposer(directory / name, HEAD), 60.0)) for name in ("d0", "d1")}
        monkeypatch.setattr(feature_link, "connect_dealer", lambda wire, address, *_: address)
        monkeypatch.setattr(feature_link, "Dealer", lambda address: self.lines[address])
        self.epoch, self.epochs = 0, dict[DrafterRef, int]()
        self.shipper = FeatureShipper(lambda head: None, handover_bytes=handover_bytes)
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(HEAD.vocab, (4, 400), generator=generator).tolist()
        self.rows = torch.randn((4, 400, HEAD.hidden), generator=generator)
        self.lengths = [0] * 4

    def assign(self, *names: str) -> None:
        self.epoch += 1
        refs = [DrafterRef(name, "i", name, "", 1) for name in names]
        self.epochs = {ref: self.epochs.get(ref, self.epoch) for ref in refs}
        self.shipper.set_drafters(Wire(), "v", self.epochs)

    def step(self, advance: dict[int, int]) -> None:
        """Each of these requests advances by so many rows."""
        requests = [(f"r{i}", self.lengths[i], count, self.tokens[i]) for i, count in advance.items()]
        rows = [self.rows[i, self.lengths[i] : self.lengths[i] + count] for i, count in advance.items()]
        for i, count in advance.items():
            self.lengths[i] += count
        self.shipper.ship(step_of(requests), [torch.cat(rows)])

    def live(self, steps: int, requests: tuple[int, ...] = (0, 1)) -> None:
        for n in range(steps):
            self.step({i: 40 + 7 * i if not self.lengths[i] else 1 + (n + i) % K for i in requests})


def test_drafts_are_asked_for_with_the_last_rows_of_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "HANDOVER_ROWS", 16)
    bench = Bench(tmp_path, monkeypatch, 1 << 20)
    bench.assign("d0", "d1")
    bench.shipper.asks = {"r0": (3, 0.25), "r2": (2, 0.0), "gone": (1, 0.0)}
    bench.shipper.chance_weights = {name: [[float(i)] * 3] * 3 for i, name in enumerate(("d0", "d1"))}
    bench.live(1, (0, 1, 2))
    asked: dict[str, NextItem] = {}
    for i, line in enumerate(bench.lines.values()):
        for earlier in line.rounds[:-1]:
            assert earlier.next is None, "more rows follow"
        if (following := line.rounds[-1].next) is not None:
            assert following.chance_weights == [[float(i)] * 3] * 3
            asked |= {item.request_id: item for item in following.items}
    assert asked == {"r0": NextItem("r0", 41, 3, [], 0, 0.25), "r2": NextItem("r2", 55, 2, [], 0, 0.0)}


def drafts_after(
    directory: Path, monkeypatch: pytest.MonkeyPatch, handover_bytes: int, moved: bool
) -> tuple[Bench, dict[str, list[int]]]:
    bench = Bench(directory, monkeypatch, handover_bytes)
    bench.assign("d0")
    bench.live(10)
    bench.assign("d1" if moved else "d0")
    bench.live(2)
    return bench, bench.lines["d1" if moved else "d0"].drafts


def test_drafts_after_a_hand_over_are_those_of_a_drafter_that_was_there_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stayed = drafts_after(tmp_path / "a", monkeypatch, 1 << 20, moved=False)
    bench, warm = drafts_after(tmp_path / "b", monkeypatch, 1 << 20, moved=True)
    _, cold = drafts_after(tmp_path / "c", monkeypatch, 0, moved=True)
    assert set(stayed) == {"r0", "r1"}
    assert all(len(draft) == K for draft in stayed.values())
    assert warm == stayed
    assert cold != stayed, "without the features it does not know enough"
    given = bench.shipper.take_counters()["d1"]
    assert (given.handovers, given.handover_bytes) == (2, given.handover_rows * HEAD.hidden * 4)
    # The step after the change brings new rows of its own; all others were computed before.
    opened = [item for item in bench.lines["d1"].rounds[0].items if isinstance(item, Open)]
    assert [item.rows for item in opened] == [item.base_len - 1 for item in opened]
    assert given.handover_bytes < given.bytes_sent


def test_much_is_handed_over_in_parts_and_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "HANDOVER_ROWS", 32)
    _, stayed = drafts_after(tmp_path / "a", monkeypatch, 1 << 20, moved=False)
    bench, warm = drafts_after(tmp_path / "b", monkeypatch, 1 << 20, moved=True)
    assert warm == stayed
    rounds = bench.lines["d1"].rounds
    assert all(sum(item.rows for item in each.items if not isinstance(item, Close)) <= 32 + 2 * K for each in rounds)
    parts = [item for each in rounds for item in each.items if not isinstance(item, Close) and item.request_id == "r0"]
    assert [type(item) for item in parts[:2]] == [Open, Commit], "the second part extends the first"
    assert parts[1].base_len - 1 - parts[1].rows == parts[0].base_len - 1
    # Only one request's turn per step: the other was drafted for without its context at first.
    opens = [item for each in rounds for item in each.items if isinstance(item, Open) and item.request_id == "r1"]
    assert len(opens) == 2


def handed_to(shipper: FeatureShipper) -> set[str]:
    """The drafters that requests were handed over to since the last call."""
    return {drafter_id for drafter_id, counts in shipper.take_counters().items() if counts.handovers}


def test_nothing_is_handed_over_to_another_head_nor_of_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, monkeypatch, 1 << 20)
    projections = {"": torch.clone, "/other": torch.neg}
    monkeypatch.setattr(bench.shipper, "_projection", projections.__getitem__)

    def move(drafter: str, head: str, weights: int = 0) -> set[str]:
        bench.epoch += 1
        bench.shipper.set_drafters(Wire(), "v", {DrafterRef(drafter, "i", drafter, "", 2, head=head): bench.epoch}, weights)
        bench.live(2)
        return handed_to(bench.shipper)

    move("d0", "")
    assert not move("d1", "/other")
    assert move("d0", "/other") == {"d0"}, "from one head to its like"
    assert not move("d1", "")
    assert not move("d0", "", weights=1)
    assert move("d1", "", weights=1) == {"d1"}


def test_a_drafter_whose_projection_does_not_load_gets_nothing_and_takes_nobody_elses_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, monkeypatch, 0)

    def projection(head: str) -> None:
        if head:
            raise CheckpointError(f"{head}: gone")

    monkeypatch.setattr(bench.shipper, "_projection", projection)
    refs = [DrafterRef("d0", "i", "d0", "", 1), DrafterRef("d1", "i", "d1", "", 1, head="/other")]
    bench.shipper.set_drafters(Wire(), "v", dict.fromkeys(refs, 1))
    bench.live(3, requests=(0, 1, 2, 3))
    mine = {f"r{i}" for i in range(4) if Pairing(f"r{i}").drafter({"d0": "", "d1": ""}) == "d0"}
    assert 0 < len(mine) < 4
    assert set(bench.lines["d0"].drafts) == mine
    assert not bench.lines["d1"].drafts


def test_a_drafter_whose_projection_loads_later_gets_features_at_the_epoch_of_its_other_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, monkeypatch, 0)

    def projection(head: str) -> None:
        if bench.epoch == 1:
            raise CheckpointError("not yet")

    monkeypatch.setattr(bench.shipper, "_projection", projection)
    bench.assign("d0")
    bench.assign("d0", "d1")
    assert {name: link.hello.epoch for name, link in bench.shipper._links.items()} == {"d0": 1, "d1": 2}
