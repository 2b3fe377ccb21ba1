"""Keeps drafts until they can be compared with the text that was generated for their request.

Pure; scheduler's process and thread.  The text depends on the seed and the prefix alone, so a draft need not be verified to be
scored: a draft that was cut, came late or was never used says as much about its source as any other.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

KEPT = 4
"""Drafts kept per request, the newest: enough for two sources with two drafts each."""


@dataclass(frozen=True)
class Resolved:
    """A fully compared draft.  `Calibration.observe` takes the last three fields."""

    source: Hashable
    signs: Sequence[float]
    matched: int
    """Leading tokens that equal the text."""
    seen: int
    """Positions that were compared: `matched` + 1 if one differed."""


@dataclass
class _Guess:
    source: Hashable
    base_len: int
    tokens: Sequence[int]
    signs: Sequence[float]
    matched: int = 0

    def compare(self, text: Sequence[int]) -> Resolved | None:
        """Goes on comparing with the request's tokens; returns the result once the draft differs or is fully compared."""
        tokens, matched, base_len = self.tokens, self.matched, self.base_len
        most = min(len(tokens), len(text) - base_len)
        while matched < most and tokens[matched] == text[base_len + matched]:
            matched += 1
        self.matched = matched
        return self.resolved(differs=matched < most) if matched < most or matched == len(tokens) else None

    def resolved(self, *, differs: bool) -> Resolved:
        return Resolved(self.source, self.signs, self.matched, self.matched + differs)


class Guesses:
    """One request's drafts that are not fully compared."""

    def __init__(self) -> None:
        self._open: list[_Guess] = []

    def note(
        self, source: Hashable, base_len: int, tokens: Sequence[int], signs: Sequence[float], text: Sequence[int]
    ) -> list[Resolved]:
        """Takes a draft from `source` behind the request's first `base_len` tokens.

        `text`: all its tokens so far; `signs`: two per token, or none.  Returns drafts whose comparison ends now: the
        new one if the text already reaches far enough, or the oldest if it has to make room.
        """
        if not tokens or base_len > len(text):
            return []
        guess = _Guess(source, base_len, tokens, signs or [0.0] * (2 * len(tokens)))
        if (known := guess.compare(text)) is not None:
            return [known]
        self._open.append(guess)
        return _resolve_partial([self._open.pop(0)]) if len(self._open) > KEPT else []

    def advance(self, text: Sequence[int]) -> list[Resolved]:
        """Compares drafts with `text`, the request's tokens; returns those now fully compared."""
        if not self._open:
            return []
        decided, still = [], []
        for guess in self._open:
            known = guess.compare(text)
            if known is None:
                still.append(guess)
            else:
                decided.append(known)
        self._open = still
        return decided

    def finish(self, text: Sequence[int]) -> list[Resolved]:
        """Call when the request is over, with its whole text.  Returns the remaining drafts, compared as far as it goes."""
        return [*self.advance(text), *_resolve_partial(self._open)]


def _resolve_partial(guesses: list[_Guess]) -> list[Resolved]:
    return [guess.resolved(differs=False) for guess in guesses if guess.matched]
