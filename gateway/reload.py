"""Replaces keys, limits and routing of a running gateway, all of them or none.  The gateway's event loop.

The settings are read again from their original sources, by one of the processes on the port.  It gives the others what it has
read, and each replaces its own between two requests.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from pydantic import BaseModel

from backend.config.settings import GatewaySettings
from backend.config.sources import ConfigError
from gateway.auth.key_ring import KeyEntry, KeyRing, read_entries
from gateway.state import Gateway

logger = logging.getLogger(__name__)

RELOADABLE = frozenset({"admin_key", "affinity", "api_key", "keys_file", "max_in_flight", "queue_wait_s"})
"""Settings of the section `gateway`.  The keys file is read again in any case."""


@dataclass(frozen=True)
class Reloaded:
    """What a reload did."""

    changed: list[str]
    """Settings with a new value that is in force now."""
    needs_restart: list[str]
    """Settings with a new value that takes effect only after a restart."""
    keys: int
    """Number of keys in the keys file."""


class NewRules(BaseModel):
    """What one process has read for all on its port."""

    at: float
    """When (monotonic seconds): of two reloads at a time, the later one stands in every process."""
    gateway: GatewaySettings
    keys: list[KeyEntry]


async def reload_all(gateway: Gateway) -> Reloaded:
    """Reloads in every process on this port.  Raises `ConfigError` if settings or keys are wrong; then nothing has changed."""
    rules = await read_rules(gateway)
    done = apply_rules(gateway, rules)
    # A process that is just starting reads them itself.
    await gateway.peers.tell("did not reload", "reload", rules.model_dump(mode="json"))
    return done


async def catch_up(gateway: Gateway) -> None:
    """Reloads in a process that begins to answer the others: an earlier reload may have missed it."""
    with contextlib.suppress(ConfigError):
        apply_rules(gateway, await read_rules(gateway))


async def read_rules(gateway: Gateway) -> NewRules:
    """Reads all of it again, in a thread.  Raises `ConfigError`."""
    at = time.monotonic()
    try:
        section = (await asyncio.to_thread(gateway.read_settings)).gateway
        return NewRules(at=at, gateway=section, keys=await asyncio.to_thread(read_entries, section.keys_file))
    except ConfigError as error:
        logger.error("reload refused, nothing has changed: %s", error)
        raise


def apply_rules(gateway: Gateway, rules: NewRules) -> Reloaded:
    """Puts in force what was read, unless that was before what is in force."""
    old, read = gateway.settings.gateway, rules.gateway
    different = [name for name in type(read).model_fields if getattr(read, name) != getattr(old, name)]
    changed = [f"gateway.{name}" for name in different if name in RELOADABLE]
    restart = [f"gateway.{name}" for name in different if name not in RELOADABLE]
    done = Reloaded(changed, restart, len(rules.keys))
    if rules.at < gateway.rules_at:
        return done
    section = old.model_copy(update={name: getattr(read, name) for name in RELOADABLE})
    if section.affinity != old.affinity:
        gateway.client.core.choosing.prefer(section.affinity)
    gateway.rules_at, gateway.ring = rules.at, KeyRing(read.api_key, read.admin_key, rules.keys)
    gateway.settings = gateway.settings.model_copy(update={"gateway": section})
    gateway.client.core.gate.limit(section.max_in_flight, section.queue_wait_s)
    logger.info("reloaded: %d keys; changed: %s", done.keys, ", ".join(done.changed) or "nothing else")
    if done.needs_restart:
        logger.warning("these need a restart: %s", ", ".join(done.needs_restart))
    return done
