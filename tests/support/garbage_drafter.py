"""A drafter that joins a running fleet and answers every request for drafts with nonsense.  Tests only.

    python -m tests.support.garbage_drafter FLEET_PID

It answers in turn with undecodable bytes, tokens outside the vocabulary, and random tokens.  It ends when its stdin closes.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile

from backend.config import sources
from backend.fleet import DrafterStats, Member
from backend.launch.finding import found_fleet
from backend.member.membership import Membership
from backend.wire.drafting import Draft, Drafts, Next, encode
from tests.support.scripted_drafter import SURE, ScriptedDrafter

turns = itertools.count()


def nonsense(message: Next) -> list[bytes]:
    """The frames to send instead of an answer."""
    turn = next(turns) % 3
    if turn == 0:
        return [b"\xc1 not a message"]
    tokens = [10**6, -5, 3] if turn == 1 else [random.randrange(2048) for _ in range(4)]
    items = [Draft(i.request_id, i.base_len, tokens, [SURE] * (2 * len(tokens))) for i in message.items]
    return [encode(Drafts(1, 0, items))]


def main() -> None:
    address = f"ipc://{tempfile.mkdtemp(prefix='g', dir='/tmp')}/d.sock"
    drafter = ScriptedDrafter(address, lambda request_id, tokens, k: [], "drafter-garbage")
    drafter.raw = nonsense
    member = Member("drafter-garbage", "drafter", "garbage", address, "", "127.0.0.1", os.getpid(), "demo", "ready")
    with found_fleet(sources.load([], "garbage"), sys.argv[1]) as (coordinator, _):
        coordinator.register(member)
        stats = DrafterStats("drafter-garbage", 0.0)
        membership = Membership(coordinator, member, lambda: stats, lambda orders: None)
        membership.join_fleet()
        print("joined", flush=True)
        sys.stdin.read()
        membership.leave_fleet()
    drafter.close()


if __name__ == "__main__":
    main()
