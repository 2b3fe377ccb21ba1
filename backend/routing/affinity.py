"""Remembers, within bounds, where requests went: by session, and by the beginnings of prompts.  Pure."""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Generic, TypeVar

BLOCK_TOKENS = 16
"""Tokens per block, as in vLLM's own prefix cache, which reuses a block whole or not at all."""
LONGEST_PREFIX_BLOCKS = 512
"""Only the first 512 blocks of a prompt are compared: 8192 equal tokens are enough to choose a verifier."""

KeyT = TypeVar("KeyT", bound=Hashable)


class RecentMap(Generic[KeyT]):
    """Key -> verifier id; beyond `entries` the key unused for longest is dropped."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._map: OrderedDict[KeyT, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._map)

    def get(self, key: KeyT) -> str | None:
        """The verifier last put under `key`, unless it was forgotten since."""
        return self._map.get(key)

    def put(self, key: KeyT, verifier_id: str) -> None:
        """Remembers that `key` went to this verifier; counts as a use of the key."""
        self._map[key] = verifier_id
        self._map.move_to_end(key)
        if len(self._map) > self._entries:
            self._map.popitem(last=False)

    def forget(self, verifier_ids: Collection[str]) -> None:
        """Nothing put under these verifiers so far is found again."""
        for key in [key for key, found in self._map.items() if found in verifier_ids]:
            del self._map[key]


class PrefixMap(RecentMap[int]):
    """Beginnings of prompts, block by block -> the verifier that computed them last."""

    def longest(self, scope: str, prompt: Sequence[int]) -> str | None:
        """The verifier with the longest known beginning of `prompt`; None when not even its first block is known."""
        found = None
        for key in _chain(scope, prompt):
            verifier_id = self.get(key)
            if verifier_id is None:
                break
            found = verifier_id
        return found

    def put_prompt(self, scope: str, prompt: Sequence[int], verifier_id: str) -> None:
        """Notes that `verifier_id` is about to compute `prompt`."""
        # The last block first: when memory runs out, a prompt loses its end before its beginning.
        for key in reversed(_chain(scope, prompt)):
            self.put(key, verifier_id)


def _chain(scope: str, prompt: Sequence[int]) -> list[int]:
    """A hash per whole block, over all tokens up to its end.  A collision only sends a request to a less suitable verifier."""
    keys = []
    key = hash(scope)
    for start in range(0, min(len(prompt) // BLOCK_TOKENS, LONGEST_PREFIX_BLOCKS) * BLOCK_TOKENS, BLOCK_TOKENS):
        key = hash((key, *prompt[start : start + BLOCK_TOKENS]))
        keys.append(key)
    return keys
