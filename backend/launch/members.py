"""The actor classes as the launcher starts them.  Each runs in its member's process.

The launcher cannot know the node an actor will run on: an address whose host is `node` is completed here, by the actor itself.
"""

from __future__ import annotations

from typing import Any

import ray

from backend.drafter.actor import DrafterActor
from backend.launch.plan import NODE_HOST
from backend.verifier.actor import VerifierActor


class Verifier(VerifierActor):
    """A verifier replica."""

    def __init__(self, *, address: str, **arguments: Any) -> None:
        super().__init__(address=on_this_node(address), **arguments)


class Drafter(DrafterActor):
    """A drafter."""

    def __init__(self, *, address: str, **arguments: Any) -> None:
        super().__init__(address=on_this_node(address), **arguments)


def on_this_node(address: str) -> str:
    """`tcp://node:0` with this node's Ray address in place of `node`; any other address as it is."""
    prefix = f"tcp://{NODE_HOST}:"
    if not address.startswith(prefix):
        return address
    host = str(ray.util.get_node_ip_address())
    return f"tcp://{f'[{host}]' if ':' in host else host}:{address.removeprefix(prefix)}"
