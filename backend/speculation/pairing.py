"""Which of a verifier's drafters serves a request.  Pure; the scheduler's and the worker's process get the same result."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple


class Pairing(NamedTuple):
    """What decides on a request's drafter."""

    key: str
    """Requests with the same key have the same drafter."""
    head: str | None = None
    """The head chosen for the request; None if all drafters have the same one."""

    def drafter(self, heads: Mapping[str, str]) -> str | None:
        """The request's drafter, by rendezvous hashing: when a drafter comes or goes, only its own requests move.

        `heads`: drafter to the name of its head.  None without drafters.
        """
        drafter_ids = having(heads, self.head)
        if len(drafter_ids) <= 1:
            return drafter_ids[0] if drafter_ids else None
        return max(drafter_ids, key=lambda drafter_id: (zlib.crc32(f"{drafter_id}/{self.key}".encode()), drafter_id))


class Pairings(dict[str, Pairing]):
    """By request.  One that is not there is paired by its own name."""

    def __missing__(self, request_id: str) -> Pairing:
        return Pairing(key_of(request_id))


def key_of(request_id: str, session: str = "") -> str:
    """What a request shares with those that begin with the same text: its session, or the request that it is a sample of.

    The verifier has that text in its prefix cache and does not compute its features again, so no other drafter gets them.
    """
    index, _, request = request_id.partition("_")  # vLLM's names of the samples of an n > 1 request
    return session or (request if request and index.isdecimal() else request_id)


def having(heads: Mapping[str, str], head: str | None) -> list[str]:
    """The drafters that have `head`; all drafters if none has it, or if `head` is None."""
    if head is None:
        return list(heads)
    return [drafter_id for drafter_id, each in heads.items() if each == head] or list(heads)
