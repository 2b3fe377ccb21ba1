"""Builds keys, quotas and bounds of the queue from the settings.  Used at the start and by every reload."""

from __future__ import annotations

from pathlib import Path

from backend.config import Settings
from gateway.access import AccessRules
from gateway.admission.gate import Queueing
from gateway.keys.quotas import Quotas
from gateway.keys.ring import KeyRing, read_entries
from gateway.keys.sharing import open_store


def ring_of(settings: Settings) -> KeyRing:
    """The keys of the settings and the keys file.  Raises `KeyFileError`."""
    asked = settings.gateway
    entries = read_entries(Path(asked.keys_file).expanduser()) if asked.keys_file else []
    return KeyRing(asked.api_key, asked.admin_key, entries)


def queueing_of(settings: Settings) -> Queueing:
    return Queueing(settings.gateway.max_in_flight, settings.gateway.queue_wait_s)


def open_doors(settings: Settings, gateway_id: str, folder: Path | None) -> AccessRules:
    """Gateways of this host share counts of quotas in `folder`.  Raises `KeyFileError`, `OSError` or `ValueError`."""
    ring = ring_of(settings)
    # Quotas are set up even without a keys file, because a reload may add one.
    return AccessRules(ring, settings.gateway.max_in_flight, Quotas(gateway_id, open_store(settings.gateway.quota_url, folder)))
