"""Which of a verifier's drafters serves a request.  Pure; the scheduler's and the worker's process get the same result."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence


def drafter_for(request_id: str, drafter_ids: Sequence[str]) -> str | None:
    """The drafter of a request, by rendezvous hashing: when a drafter comes or goes, only its own requests move.

    None without drafters.
    """
    if len(drafter_ids) <= 1:
        return drafter_ids[0] if drafter_ids else None
    return max(drafter_ids, key=lambda drafter_id: (zlib.crc32(f"{drafter_id}/{request_id}".encode()), drafter_id))


def having(heads: Mapping[str, str], head: str | None) -> list[str]:
    """The drafters that have `head`; all drafters if none has it, or if `head` is None."""
    if head is None:
        return list(heads)
    return [drafter_id for drafter_id, each in heads.items() if each == head] or list(heads)
