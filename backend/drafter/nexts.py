"""Keeps the items of `Next` messages until they can be worked on.  Pure; drafter thread.

A `Next` and the `Round` that makes its request `base_len` long travel on two sockets, so either may come first.  An item is
*held* until its request has that length.  Then it is *due*: for a fresh draft or, if it names a draft under verification, for
the enumeration of its outcomes.  It is dropped when a newer one for its request comes, and a fresh draft without outcomes when
the request has grown beyond it.  The answer is empty if nothing can be drafted: the verifier may wait for one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from backend.drafter.proposer import MAX_OUTCOMES, Until
from backend.wire.drafting import NextItem

Key = tuple[str, int, str]
"""Verifier id, its epoch, request id."""


@dataclass(frozen=True)
class Wanted:
    """One item of a `Next`.  `since`: when it came, or when its request reached `base_len` if that was later; seconds."""

    key: Key
    item: NextItem
    since: float
    chance_weights: Sequence[Sequence[float]] = ()

    @property
    def until(self) -> Until:
        """When the fresh draft ends or, once there is one, those for its outcomes."""
        k = self.item.fresh_k if self.item.is_fresh else self.item.k
        return Until(k, self.item.floor, self.chance_weights)


class Nexts:
    """The items of all requests, at most one per request."""

    def __init__(self) -> None:
        self._held: dict[Key, Wanted] = {}
        self._due: dict[Key, Wanted] = {}
        self._strangers: dict[Key, int] = {}
        """Requests for which nothing can be drafted up to this length: they are not known here, or too long."""

    @property
    def is_due(self) -> bool:
        """Whether any item can be worked on."""
        return bool(self._due)

    def want(self, wanted: Wanted, length: int | None) -> None:
        """Takes an item; `length` is its request's present one, None when the request is unknown."""
        key, base_len = wanted.key, wanted.item.base_len
        self._take(key)
        if (length is None or length < base_len) and self._strangers.get(key, 0) < base_len:
            # An unknown request's `Open` may be on the way, unless a `Commit` has come for it and found no such request.
            self._held[key] = wanted
        else:
            self._arrive(wanted, length or 0)

    def reached(self, key: Key, base_len: int, now: float, known: bool = True) -> None:
        """A round that came at `now` has made the request `base_len` tokens long.

        Not `known`: there is no such request here, or it is too long, and nothing can be drafted for it up to `base_len`.
        """
        if known:
            self._strangers.pop(key, None)
        else:
            self._strangers[key] = base_len
        wanted = self._take(key)
        if wanted is not None and wanted.item.base_len > base_len:
            self._held[key] = wanted
        elif wanted is not None:
            self._arrive(replace(wanted, since=max(wanted.since, now)), base_len)

    def forget(self, key: Key) -> None:
        self._strangers.pop(key, None)
        self._take(key)

    def take_fresh(self) -> list[Wanted]:
        """Takes all due items that ask for fresh drafts; their requests may be unknown."""
        return [self._due.pop(each.key) for each in list(self._due.values()) if each.item.is_fresh]

    def drafted(self, wanted: Wanted, tokens: list[int], now: float) -> None:
        """A fresh draft was made: now its outcomes are due, if they are asked for; of an empty one, the next token's."""
        if wanted.item.outcomes:
            self._due[wanted.key] = replace(wanted, item=_enumerated(wanted.item, tokens), since=now)

    def take_outcomes(self, most: int) -> list[Wanted]:
        """Takes the other due items, longest waiting first: at least one, and no more than have `most` outcomes together."""
        taken: list[Wanted] = []
        total = 0
        for wanted in self._due.values():
            total += min(wanted.item.outcomes, MAX_OUTCOMES)
            if taken and total > most:
                break
            taken.append(wanted)
        for wanted in taken:
            del self._due[wanted.key]
        return taken

    def _arrive(self, wanted: Wanted, length: int) -> None:
        if length <= wanted.item.base_len:
            self._due[wanted.key] = wanted
        elif wanted.item.outcomes:
            self._due[wanted.key] = replace(wanted, item=_enumerated(wanted.item, wanted.item.verifying))

    def _take(self, key: Key) -> Wanted | None:
        return self._due.pop(key, None) or self._held.pop(key, None)


def _enumerated(item: NextItem, verifying: list[int]) -> NextItem:
    """The item, with a fresh draft no longer asked for: outcomes of `verifying` alone."""
    return msgspec.structs.replace(item, verifying=verifying, fresh_k=0)
