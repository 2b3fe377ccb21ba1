"""Which of a verifier's drafters serves a request.  Pure; the scheduler's and the worker's process compute it alike."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence


def drafter_for(request_id: str, drafter_ids: Sequence[str]) -> str | None:
    """Rendezvous hashing: when a drafter comes or goes, only the requests it gains or loses move.

    None without drafters.
    """
    if len(drafter_ids) <= 1:
        return drafter_ids[0] if drafter_ids else None
    return max(drafter_ids, key=lambda drafter_id: (zlib.crc32(f"{drafter_id}/{request_id}".encode()), drafter_id))


def having(heads: Mapping[str, str], head: str | None) -> list[str]:
    """Of drafters and their heads, those with this one; all of them where none has it, or none is asked for."""
    if head is None:
        return list(heads)
    return [drafter_id for drafter_id, each in heads.items() if each == head] or list(heads)
