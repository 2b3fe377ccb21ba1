"""What the signs of one source of drafts are worth: the weights of `backend.speculation.chances`, fitted as the text goes on.

Pure; scheduler's process and thread.  With shared noise the text is the same whatever is drafted.  So every draft can be
compared with it, verified or not.  Each position so decided is one observation of a logistic regression.

The fit is an extended Kalman filter with a diagonal covariance (Spiegelhalter and Lauritzen 1990): each coefficient has a mean
and a doubt, an observation moves those in doubt, and a drift keeps the doubt from vanishing.  e_j is a common offset plus a
small own one: far positions, which are seldom decided, learn from near ones.  Each request adds an offset of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.fleet import CHANCE_BINS, Foretold
from backend.speculation.chances import chances, clipped

SIGN_WEIGHTS, OFFSET = (0.3, 0.5), 0.5
"""A fair head: a token that leads by nothing is right six times in ten.  Optimistic, so that a new drafter is tried."""
SIGN_DOUBT, OFFSET_DOUBT, POSITION_DOUBT = 0.1, 1.0, 0.1
"""Variances at the start.  What signs are worth differs less between heads than how good the heads are."""
DRIFT, OFFSET_DRIFT = 2e-5, 1e-4
"""Variance a coefficient, or the common offset, gains per observation: some two hundred positions decide how good drafts are,
for text and heads change; thousands decide what signs are worth."""
REQUEST_DOUBT, REQUEST_DRIFT = 0.5, 2e-4
"""Of a request's own offset: some texts are far easier to draft, and within a text that changes."""


class Calibration:
    """One source of drafts."""

    def __init__(self, positions: int) -> None:
        """`positions`: K; longer drafts share the last offset."""
        self._means = [*SIGN_WEIGHTS, OFFSET] + [0.0] * positions
        self._doubts = [SIGN_DOUBT, SIGN_DOUBT, OFFSET_DOUBT] + [POSITION_DOUBT] * positions
        self._requests: dict[str, tuple[float, float]] = {}
        """Offset and doubt."""
        self._last = positions - 1
        self._weights = self._flat()
        self.foretold = Foretold()

    @property
    def weights(self) -> list[float]:
        """a, b, e_1 .. e_K, as `backend.speculation.chances.chances` and the wire have them; not to be changed."""
        return self._weights

    def chances(self, request_id: str, signs: Sequence[float]) -> list[float]:
        """Of a draft for this request, with what is known of how well it can be drafted for."""
        return chances(self._weights, signs, self._requests.get(request_id, (0.0,))[0])

    def observe(self, request_id: str, signs: Sequence[float], matched: int, seen: int) -> None:
        """The first `matched` of a draft's tokens equal the text; `seen` positions are decided, matched + 1 if one differed."""
        if not seen:
            return
        offset, doubt = self._requests.get(request_id, (0.0, REQUEST_DOUBT))
        for j, chance in enumerate(self.chances(request_id, signs[: 2 * seen])):
            step, shrink = self._learn(min(j, self._last), signs[2 * j], signs[2 * j + 1], chance, j < matched, doubt)
            offset, doubt = offset + doubt * step, doubt + REQUEST_DRIFT - doubt * doubt * shrink
        self._requests[request_id] = offset, doubt
        self._weights = self._flat()

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._requests.pop(request_id, None)

    def _learn(self, position: int, value: float, lead: float, chance: float, right: bool, doubt: float) -> tuple[float, float]:
        """One observation, with the doubt of the request's offset; how far to move that, per doubt, and how much surer it is.

        Written out, since every draft token comes here.
        """
        place, foretold, error = min(int(chance * CHANCE_BINS), CHANCE_BINS - 1), self.foretold, right - chance
        foretold.chances[place] += chance
        foretold.right[place] += right
        foretold.seen[place] += 1
        foretold.squared_error += error * error
        means, doubts, own = self._means, self._doubts, 3 + position
        value, lead = clipped(value), clipped(lead)
        value_gain, lead_gain = doubts[0] * value, doubts[1] * lead
        common_gain, own_gain = doubts[2], doubts[own]
        curvature = chance * (1 - chance)
        scale = 1 / (1 + curvature * (value_gain * value + lead_gain * lead + common_gain + own_gain + doubt))
        step, shrink = error * scale, curvature * scale
        means[0] += value_gain * step
        means[1] += lead_gain * step
        means[2] += common_gain * step
        means[own] += own_gain * step
        doubts[0] += DRIFT - value_gain * value_gain * shrink
        doubts[1] += DRIFT - lead_gain * lead_gain * shrink
        doubts[2] += OFFSET_DRIFT - common_gain * common_gain * shrink
        doubts[own] += DRIFT - own_gain * own_gain * shrink
        return step, shrink

    def _flat(self) -> list[float]:
        a, b, common, *own = self._means
        return [a, b, *(common + offset for offset in own)]
