"""Replaces keys, limits and routing of a running gateway, all of them or none.  The gateway's event loop.

The settings are read again from their original sources.  All new parts are built first, in every process on the port.  Only
then do they replace the old ones, between two requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from backend.config import Settings
from backend.config.sources import ConfigError
from backend.routing.routers import make_router
from gateway.auth.access import ring_of
from gateway.auth.key_ring import KeyFileError, KeyRing
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
    """Reloads in every process on this port, or in none.  `gateway` has a reloader.  Raises `ReloadError`."""
    assert gateway.reloader is not None
    async with gateway.reloader.turn:
        done = await gateway.reloader.prepare()
        await gateway.peers.prepare_reload()
        gateway.reloader.apply()
        await gateway.peers.apply_reload()
    return done


class Reloader:
    """`read` reads the settings; it may raise `ConfigError`, and runs in a thread."""

    def __init__(self, gateway: Gateway, read: Callable[[], Settings]) -> None:
        self.turn = asyncio.Lock()
        """Of the reloads that this process was asked for."""
        self._preparing = asyncio.Lock()
        self._gateway = gateway
        self._read = read
        self._prepared: tuple[Settings, KeyRing, Reloaded] | None = None

    async def prepare(self) -> Reloaded:
        """Makes everything new; `apply` does what is returned.  Raises `ReloadError`."""
        async with self._preparing:
            return await self._prepare()

    async def _prepare(self) -> Reloaded:
        self._prepared = None
        old = self._gateway.settings
        try:
            read = (await asyncio.to_thread(self._read)).gateway
            different = [name for name in type(read).model_fields if getattr(read, name) != getattr(old.gateway, name)]
            changed = [name for name in different if name in RELOADABLE]
            section = old.gateway.model_copy(update={name: getattr(read, name) for name in changed})
            new = old.model_copy(update={"gateway": section})
            ring = await asyncio.to_thread(ring_of, new)
        except (ConfigError, KeyFileError) as error:
            logger.error("reload refused, nothing has changed: %s", error)
            raise ReloadError(str(error)) from None
        restart = [f"gateway.{name}" for name in different if name not in RELOADABLE]
        done = Reloaded([f"gateway.{name}" for name in changed], restart, len(ring))
        self._prepared = new, ring, done
        return done

    def apply(self) -> None:
        """Puts in force what was prepared last, if that has not been done."""
        if self._prepared is None:
            return
        (new, ring, done), self._prepared = self._prepared, None
        gateway, section, old = self._gateway, new.gateway, self._gateway.settings.gateway
        if section.affinity != old.affinity:
            gateway.client.core.choosing.reroute(make_router(section))
        gateway.settings = new
        gateway.batches.max_body_bytes = gateway.max_body_bytes
        gateway.access_rules.ring, gateway.access_rules.max_in_flight = ring, section.max_in_flight
        gateway.client.core.gate.limit(section.max_in_flight, section.queue_wait_s)
        logger.info("reloaded: %d keys; changed: %s", done.keys, ", ".join(done.changed) or "nothing else")
        if done.needs_restart:
            logger.warning("these need a restart: %s", ", ".join(done.needs_restart))
