"""Replaces keys, limits and routing of a running gateway, all of them or none.  The gateway's event loop.

The settings are read again from their original sources.  All new parts are built first.  Only then do they replace the old
ones, between two requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from backend.config import Settings
from backend.config.sources import ConfigError
from backend.routing.routers import make_router
from gateway.doors import queueing_of, ring_of
from gateway.keys.ring import KeyFileError
from gateway.state import Gateway

logger = logging.getLogger(__name__)

RELOADABLE = frozenset(
    {
        "admin_key",
        "affinity",
        "api_key",
        "keys_file",
        "max_body_mib",
        "max_in_flight",
        "queue_wait_s",
        "routing",
    }
)
"""Settings of the section `gateway`.  The keys file is read again in any case."""


class ReloadError(Exception):
    """The settings or keys are wrong, and nothing has changed.  The message is one line."""


@dataclass(frozen=True)
class Reloaded:
    """What a reload did."""

    changed: list[str]
    """Settings with a new value that is in force now."""
    needs_restart: list[str]
    """Settings with a new value that takes effect only after a restart."""
    keys: int
    """Number of keys in the keys file."""


async def reload_all(gateway: Gateway) -> Reloaded:
    """Reloads in every process on this port.  `gateway` has a reloader.  Raises `ReloadError`."""
    assert gateway.reloader is not None
    done = await gateway.reloader.reload()
    if gateway.peers is not None:
        await gateway.peers.reload()
    return done


class Reloader:
    """`read` reads the settings; it may raise `ConfigError`, and runs in a thread."""

    def __init__(self, gateway: Gateway, read: Callable[[], Settings]) -> None:
        self._gateway = gateway
        self._read = read
        self._turn = asyncio.Lock()

    async def reload(self) -> Reloaded:
        """Raises `ReloadError`."""
        async with self._turn:
            try:
                done = await self._reload()
            except (ConfigError, KeyFileError) as error:
                logger.error("reload refused, nothing has changed: %s", error)
                raise ReloadError(str(error)) from None
        logger.info("reloaded: %d keys; changed: %s", done.keys, ", ".join(done.changed) or "nothing else")
        if done.needs_restart:
            logger.warning("these need a restart: %s", ", ".join(done.needs_restart))
        return done

    async def _reload(self) -> Reloaded:
        gateway, old = self._gateway, self._gateway.settings
        asked = (await asyncio.to_thread(self._read)).gateway
        different = [name for name in type(asked).model_fields if getattr(asked, name) != getattr(old.gateway, name)]
        changed = [name for name in different if name in RELOADABLE]
        section = old.gateway.model_copy(update={name: getattr(asked, name) for name in changed})
        new = old.model_copy(update={"gateway": section})
        ring = await asyncio.to_thread(ring_of, new)
        router = None
        if {"routing", "affinity"} & set(changed):
            slots = new.verifier.max_num_seqs
            router = make_router(section.routing, section.affinity, seed=secrets.randbits(32), slots=slots)
        # Nothing below fails or suspends.
        gateway.settings = new
        gateway.doors.ring, gateway.doors.max_in_flight = ring, section.max_in_flight
        gateway.client.core.gate.limit(queueing_of(new))
        if router is not None:
            gateway.client.core.choosing.reroute(router)
        restart = [f"gateway.{name}" for name in different if name not in RELOADABLE]
        return Reloaded([f"gateway.{name}" for name in changed], restart, len(ring))
