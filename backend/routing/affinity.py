"""Bounded memories of where requests went: by session, and by the beginnings of prompts.  Pure.

What a verifier remembered is forgotten with it in constant time: each entry carries the number of times its verifier had been
forgotten when it was written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

BLOCK_TOKENS = 16
"""As vLLM's own prefix cache: a block is reused whole or not at all."""
LONGEST_PREFIX_BLOCKS = 512
"""Blocks of one prompt that are looked at: beyond 8192 equal tokens there is nothing left to tell apart."""

KeyT = TypeVar("KeyT", bound=Hashable)


class RecentMap(Generic[KeyT]):
    """Key -> verifier id; beyond `entries` the key unused for longest is dropped."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._map: OrderedDict[KeyT, tuple[str, int]] = OrderedDict()
        self._forgotten: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._map)

    def get(self, key: KeyT) -> str | None:
        """The verifier last put under `key`, unless it was forgotten since."""
        found = self._map.get(key)
        if found is None:
            return None
        verifier_id, then = found
        if then != self._forgotten.get(verifier_id, 0):
            del self._map[key]
            return None
        return verifier_id

    def put(self, key: KeyT, verifier_id: str) -> None:
        """Remembers, and counts as use."""
        self._map[key] = verifier_id, self._forgotten.get(verifier_id, 0)
        self._map.move_to_end(key)
        while len(self._map) > self._entries:
            self._map.popitem(last=False)

    def forget(self, verifier_id: str) -> None:
        """Nothing put under this verifier so far is found again."""
        self._forgotten[verifier_id] = self._forgotten.get(verifier_id, 0) + 1


class PrefixMap:
    """The beginnings of prompts, block by block, and who computed them last."""

    def __init__(self, entries: int) -> None:
        self._blocks = RecentMap[int](entries)

    def __len__(self) -> int:
        return len(self._blocks)

    def longest(self, scope: str, prompt: Sequence[int]) -> str | None:
        """Who has the longest known beginning of `prompt`; None when not even its first block is known."""
        found = None
        for key in _chain(scope, prompt):
            verifier_id = self._blocks.get(key)
            if verifier_id is None:
                break
            found = verifier_id
        return found

    def put(self, scope: str, prompt: Sequence[int], verifier_id: str) -> None:
        """`verifier_id` is about to compute `prompt`."""
        # The last block first: when memory runs out, a prompt loses its end before its beginning.
        for key in reversed(_chain(scope, prompt)):
            self._blocks.put(key, verifier_id)

    def forget(self, verifier_id: str) -> None:
        """Its cache is empty."""
        self._blocks.forget(verifier_id)


def _chain(scope: str, prompt: Sequence[int]) -> list[int]:
    """A hash per whole block, each over everything up to its end.  Two prompts with one hash cost a detour, no more."""
    keys = []
    key = hash(scope)
    for start in range(0, min(len(prompt) // BLOCK_TOKENS, LONGEST_PREFIX_BLOCKS) * BLOCK_TOKENS, BLOCK_TOKENS):
        key = hash((key, *prompt[start : start + BLOCK_TOKENS]))
        keys.append(key)
    return keys
