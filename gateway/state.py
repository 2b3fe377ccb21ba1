"""What all routes share: one `Gateway` per application, at `app.state.gateway`.  No globals."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request

from backend.config import Settings
from backend.engine.front import LoRARequest
from backend.engine.front.client import FleetClient
from backend.engine.front.serving import Services
from backend.tracing import Tracing
from gateway.auth.caller import caller_of
from gateway.auth.key_ring import KeyRing
from gateway.auth.quotas import Quotas
from gateway.fleet.core import FleetCore
from gateway.metrics.gateway import GatewayMetrics
from gateway.peers import Peers
from gateway.storage.batches.serving import Batches
from gateway.storage.responses.serving import ResponseService


@dataclass
class Gateway:
    """The gateway's parts.  A reload replaces `settings` and `ring`; the others stay."""

    settings: Settings
    client: FleetClient[FleetCore]
    services: Services
    metrics: GatewayMetrics
    responses: ResponseService
    ring: KeyRing
    quotas: Quotas
    batches: Batches
    tracing: Tracing | None = None
    read_settings: Callable[[], Settings] = field(init=False)
    """Reads the settings again from their sources.  Raises `ConfigError`."""
    rules_at: float = 0.0
    """When what the last reload put in force was read; monotonic seconds."""
    peers: Peers = field(default_factory=Peers)
    """The other gateway processes on this port."""
    started: float = field(default_factory=time.time)
    """Unix seconds; also when its models were "created"."""
    arriving_bytes: int = 0
    """Bytes in memory of request bodies that are not complete."""
    uploading_bytes: int = 0
    """Bytes on disk of files that are not stored yet."""
    tokenizing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Bounds the texts that are tokenized, other than prompts, which use the same threads and would wait behind them."""

    def take_adapters(self, adapters: list[Any]) -> None:
        """Takes in the adapters of another process on this port, which has had the verifiers read them."""
        for each in msgspec.convert(adapters, list[LoRARequest]):
            self.services.models.lora_requests[each.lora_name] = each

    def abort(self, request_ids: list[str] | None, verifier: str | None = None) -> dict[str, list[list[int]]]:
        """Ends requests, all or those that answers or `X-Request-Id` name so; the tokens of each one's sequences, by its id.

        With `verifier` only sequences that run there.
        """
        tokens: dict[str, list[list[int]]] = {}
        if verifier is None:
            wanted = None if request_ids is None else set().union(*map(_bare, request_ids))
            # First, because the others' ends make room.
            for claim in self.client.core.gate.abort(lambda claim: wanted is None or claim.request_id in wanted):
                tokens.setdefault(claim.request_id, []).extend([] for _ in range(claim.sequences))
        ended = []
        for record in self.client.core.sequences:
            named = record.request.external_req_id or record.request.request_id
            here = verifier is None or (record.link is not None and record.link.member.id == verifier)
            if here and (request_ids is None or not _names(named).isdisjoint(request_ids)):
                tokens.setdefault(named, []).append(list(record.emitted))
                ended.append(record)
        self.client.core.finish(ended)
        return tokens


def _names(named: str) -> set[str]:
    """The ids by which a client may know a request.  vLLM adds a route's prefix and a prompt's number to the client's id."""
    found = _bare(named)
    return found | {each.rpartition("-")[0] for each in found if named.startswith("cmpl-")}


def _bare(named: str) -> set[str]:
    """The id, and the id without a route's prefix."""
    return {named, *(named.removeprefix(before) for before in ("chatcmpl-", "cmpl-", "generate-tokens-"))}


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def owner_of(request: Request) -> str:
    """The owner whose responses, files and batches this request may see: its key's; without keys, one owner for all."""
    return caller_of(request).owner
