"""The actor classes as the launcher starts them.  Each runs in its member's process.

The launcher cannot know the node an actor will run on: an address whose host is `node` is completed here, by the actor itself,
and so is the socket at which processes of the same node reach it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from backend.drafter.actor import DrafterActor
from backend.launch import state
from backend.launch.plan import NODE_HOST
from backend.models.resolve import ResolvedModels
from backend.verifier.actor import VerifierActor


class Verifier(VerifierActor):
    """A verifier replica."""

    def __init__(self, *, address: str, local: bool, paths: ResolvedModels, **arguments: Any) -> None:
        check_models(paths)
        local_address = state.member_socket() if local else ""
        super().__init__(address=on_this_node(address), local_address=local_address, paths=paths, **arguments)


class Drafter(DrafterActor):
    """A drafter."""

    def __init__(self, *, address: str, local: bool, paths: ResolvedModels, **arguments: Any) -> None:
        check_models(paths)
        local_address = state.member_socket() if local else ""
        super().__init__(address=on_this_node(address), local_address=local_address, paths=paths, **arguments)


def check_models(paths: ResolvedModels) -> None:
    """The launcher found the models on its own node.  Raises `FileNotFoundError` when this node has them not."""
    for directory in (paths.target_dir, paths.drafter_dir):
        if directory is not None and not Path(directory).is_dir():
            node = ray.util.get_node_ip_address()
            raise FileNotFoundError(f"node {node} has no {directory}: every node needs the models at the same path")


def on_this_node(address: str) -> str:
    """`tcp://node:0` with this node's Ray address in place of `node`; any other address as it is."""
    prefix = f"tcp://{NODE_HOST}:"
    if not address.startswith(prefix):
        return address
    host = str(ray.util.get_node_ip_address())
    return f"tcp://{f'[{host}]' if ':' in host else host}:{address.removeprefix(prefix)}"
