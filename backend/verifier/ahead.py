"""Drafts made before they were needed: which outcomes the drafter has precomputed, and what to use after a verification.

Pure; scheduler's process and thread.  While a draft is being verified, its drafter enumerates likely outcomes (how many tokens
are accepted, which token follows) and drafts each.  When the outcome is known it is looked up here: a hit is the next draft, at
once and without a round trip; a miss costs only its own row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from backend.protocol import Block

FORGET = 0.98


@dataclass(frozen=True)
class Ended:
    """A verification whose next draft is not decided yet."""

    request_id: str
    verified_at: int
    """Base length of the verification."""
    base_len: int
    """Length of the request now."""
    token: int
    """Its newest token."""

    @property
    def accepted(self) -> int:
        """Draft tokens that were kept."""
        return self.base_len - self.verified_at - 1


class AheadBook:
    """Blocks by request, verifications waiting for their look-up, and how often look-ups hit."""

    def __init__(self) -> None:
        self._blocks: dict[str, Block] = {}
        self._ended: dict[str, Ended] = {}
        self.hit_rate = 0.5
        """Decayed."""

    def take(self, block: Block) -> None:
        """A block arrived; it replaces an older one."""
        self._blocks[block.request_id] = block

    def ended(self, verification: Ended) -> None:
        """A verification's outcome is known."""
        self._ended[verification.request_id] = verification

    def forget(self, request_id: str) -> None:
        """The request is finished, aborted or preempted."""
        self._blocks.pop(request_id, None)
        self._ended.pop(request_id, None)

    def settle(self, vocab_size: int) -> list[tuple[Ended, list[int]]]:
        """Every undecided verification with its next draft, empty for a miss."""
        settled = []
        for ended in self._ended.values():
            tokens = self._look_up(ended, vocab_size)
            self.hit_rate = FORGET * self.hit_rate + (1 - FORGET) * bool(tokens)
            settled.append((ended, tokens))
        self._ended.clear()
        return settled

    def has_undecided(self) -> bool:
        """Whether `settle` would return anything."""
        return bool(self._ended)

    def _look_up(self, ended: Ended, vocab_size: int) -> list[int]:
        block = self._blocks.pop(ended.request_id, None)
        if block is None or block.base_len != ended.verified_at:
            return []
        accepted, token = ended.accepted, ended.token
        if accepted < len(block.verifying) and block.verifying[accepted] == token:
            # Fewer tokens were verified than drafted: what is left of that draft still fits.
            return _valid(block.verifying[accepted + 1 :], vocab_size)
        for outcome in block.outcomes:
            if outcome.accepted == accepted and outcome.token == token:
                return _valid(outcome.tokens, vocab_size)
        return []


def worth_waiting(hits: int, misses: int, step_s: float, draft_s: float, acceptance_length: float) -> bool:
    """Whether a step should wait for the fresh drafts of its misses.

    Waiting brings every request `acceptance_length` tokens in `step_s + draft_s`; going on at once brings that to the hits and
    one token to each miss in `step_s`.
    """
    waiting = (hits + misses) * acceptance_length / (step_s + draft_s)
    return waiting > (hits * acceptance_length + misses) / step_s


def _valid(tokens: Iterable[int], vocab_size: int) -> list[int]:
    tokens = list(tokens)
    return tokens if all(0 <= token < vocab_size for token in tokens) else []
