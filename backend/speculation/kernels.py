"""Compiled loops over the drafts of a step.  Pure; scheduler's process and thread.

The first call compiles, for seconds.  So `Ranking` and `Candidates` call them when they are made.
"""

from typing import Any

import numpy as np

from backend.noise.cpu import compiled

ROUNDING = 1e-3
"""By how much the sum of a distribution may differ from 1."""
_MOST = np.uint32(0x3F80FFFF)
"""Bits of a float32 slightly above 1.  Those of a larger number, of a negative one and of NaN are more, unsigned."""


@compiled
def find_sound(packed: Any, chances: Any, drawn: Any, vocab_size: Any, found: Any) -> None:
    """Writes which of the drafts `drawn` `[drafts, tokens]` their distributions could have given.

    `packed` `[drafts, 2, tokens, M]`: token ids, and the bits of their probabilities; `chances` is its float32 view.
    """
    drafts, _, tokens, width = packed.shape
    for i in range(drafts):
        is_sound = True
        for j in range(tokens):
            total, was_drawn = 0.0, False
            for m in range(width):
                token, bits = packed[i, 0, j, m], packed[i, 1, j, m]
                is_sound &= token < vocab_size
                was_drawn |= (token == drawn[i, j]) & (bits > 0)
                total += chances[i, 1, j, m] if bits <= _MOST else 2.0  # No sum with NaN: these loops are compiled without it.
            is_sound &= was_drawn & (abs(total - 1) < ROUNDING)
        found[i] = is_sound


@compiled
def spend(ranked: Any, owners: Any, times: Any, lengths: Any) -> Any:
    """`budget.spend` of survivals that fall: adds to `lengths`; returns N, the tokens emitted, and the price of one more."""
    emitted = best_emitted = float(len(lengths))
    best, best_rate = 0, emitted / times[0]
    for n in range(len(ranked)):
        emitted += ranked[n]
        if emitted > best_rate * times[n + 1]:
            best, best_rate, best_emitted = n + 1, emitted / times[n + 1], emitted
    for n in range(best):
        lengths[owners[n]] += 1
    # The first draft token's time has the cost of verifying any.
    at = max(best, min(len(ranked), 1))
    return best, best_emitted, best_rate * (times[at + 1] - times[at])


@compiled
def spend_in_order(ranked: Any, owners: Any, times: Any, lengths: Any) -> Any:
    """`budget.spend_in_order`, as `spend`."""
    curve = _convex(times)
    emitted, taken = float(len(lengths)), 0
    for n in range(len(ranked)):
        if n and (emitted + ranked[n]) * curve[n] <= emitted * curve[n + 1]:
            break
        emitted, taken = emitted + ranked[n], n + 1
        lengths[owners[n]] += 1
    return taken, emitted, emitted / curve[taken] * (curve[taken + 1] - curve[taken])


@compiled
def _convex(times: Any) -> Any:
    """The greatest convex curve that is nowhere above `times[1:]`; entry 0 is that of 1.  Verifying any draft has been paid."""
    corners = np.empty(len(times), np.int64)
    count = 0
    for n in range(1, len(times)):
        while count > 1:
            a, b = corners[count - 2], corners[count - 1]
            if (times[b] - times[a]) * (n - b) < (times[n] - times[b]) * (b - a):
                break
            count -= 1
        corners[count] = n
        count += 1
    curve = np.empty(len(times))
    curve[0] = curve[1] = times[1]
    for i in range(1, count):
        a, b = corners[i - 1], corners[i]
        for n in range(a + 1, b + 1):
            curve[n] = times[a] + (times[b] - times[a]) / (b - a) * (n - a)
    return curve
