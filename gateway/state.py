"""What the routes share: one `Gateway` per application, found at `app.state.gateway`.  No globals."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from backend.config import Settings
from backend.engine.front.client import FleetClient
from backend.engine.front.serving import Services
from backend.tracing import Tracing
from gateway.access import Doors
from gateway.batches.serving import Batches
from gateway.fleet_core import FleetCore
from gateway.fleet_feed import FleetFeed
from gateway.keys.caller import caller_of
from gateway.metrics import GatewayMetrics
from gateway.responses.serving import Responses

if TYPE_CHECKING:
    from gateway.peers import Peers
    from gateway.reload import Reloader


@dataclass
class Gateway:
    """The gateway's parts.  They stay; a reload exchanges `settings`."""

    settings: Settings
    client: FleetClient[FleetCore]
    services: Services
    metrics: GatewayMetrics
    feed: FleetFeed
    responses: Responses
    doors: Doors
    batches: Batches
    tracing: Tracing | None = None
    reloader: Reloader | None = None
    peers: Peers | None = None
    """The other processes on this port; None: there are none."""
    started: float = field(default_factory=time.time)
    """Unix seconds; also when its models were "created"."""
    arriving_bytes: int = 0
    """In memory, of request bodies that are not complete."""
    tokenizing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Texts that are tokenized for their own sake: prompts wait for the same thread, and not for more than these."""

    def abort(self, request_ids: list[str] | None) -> dict[str, list[list[int]]]:
        """Ends requests, all or those that answers or `X-Request-Id` name so; the tokens of each one's sequences, by its id."""
        tokens: dict[str, list[list[int]]] = {}
        ended = []
        for record in self.client.core.sequences:
            named = record.request.external_req_id or record.request.request_id
            if request_ids is None or not _names(named).isdisjoint(request_ids):
                tokens.setdefault(named, []).append(list(record.emitted))
                ended.append(record)
        self.client.core.finish(ended)
        return tokens

    @property
    def max_body_bytes(self) -> int:
        return self.settings.gateway.max_body_mib << 20


def _names(named: str) -> set[str]:
    """What clients know a request by: vLLM puts its route before the id that they sent, and a prompt's number behind it."""
    found = {named, *(named.removeprefix(before) for before in ("chatcmpl-", "cmpl-", "generate-tokens-"))}
    return found | {each.rpartition("-")[0] for each in found if named.startswith("cmpl-")}


def gateway_of(request: Request) -> Gateway:
    """The gateway serving this request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


def owner_of(request: Request) -> str:
    """Whose responses, files and batches this request may see: those of its key, or of everybody where there are no keys."""
    return caller_of(request).owner
