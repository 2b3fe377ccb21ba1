"""Fits the weights of `backend.speculation.chances` for one source of drafts, while the text is generated.

Pure; scheduler's process and thread.  With shared noise the text is the same whatever is drafted.  So every draft can be
compared with it, verified or not.  Each compared position is one observation of a logistic regression.

The fit is an extended Kalman filter with a diagonal covariance (Spiegelhalter and Lauritzen 1990).  Each coefficient has a mean
and a variance, here called its doubt.  An observation moves coefficients in proportion to their doubt, and a drift keeps the
doubt from vanishing.  e_j is an offset common to all places plus a small one of its own: far places, which are seldom compared,
learn from near ones.  Each request adds another offset.
"""

from collections.abc import Sequence

from backend.speculation.chances import Chances, chances, chances_of_many, clipped

SIGN_WEIGHTS, OFFSET = (0.3, 0.5), 0.5
"""a, b and e at the start.  A token without a lead is right six times in ten: optimistic, so that a new drafter is tried."""
SIGN_DOUBT, OFFSET_DOUBT, POSITION_DOUBT = 0.1, 1.0, 0.1
"""Variances at the start.  Heads differ less in what their signs are worth than in how good they are."""
DRIFT, OFFSET_DRIFT = 2e-5, 1e-4
"""Variance that a coefficient, or the common offset, gains per observation.  The common offset follows some two hundred
positions, since text and heads change; what signs are worth follows thousands."""
REQUEST_DOUBT, REQUEST_DRIFT = 0.5, 2e-4
"""Variance of a request's own offset, and its gain per observation: texts, and parts of one, differ much in difficulty."""


Offsets = dict["Calibration", tuple[float, float]]
"""One request's own offset and its doubt, for each source whose drafts were compared with its text."""


class Calibration:
    """The weights of one source of drafts."""

    def __init__(self, positions: int) -> None:
        """`positions`: K; later places share the last offset."""
        self._means = [*SIGN_WEIGHTS, OFFSET] + [0.0] * positions
        self._doubts = [SIGN_DOUBT, SIGN_DOUBT, OFFSET_DOUBT] + [POSITION_DOUBT] * positions
        self._last = positions - 1
        self._weights = self._flat()

    @property
    def weights(self) -> list[float]:
        """`[a, b, e_0, ...]`, as for `backend.speculation.chances.chances` and on the wire.  The caller must not change it."""
        return self._weights

    def chances(self, own: Offsets, signs: Sequence[float]) -> list[float]:
        """The chances of a draft's tokens, with the request's own offset."""
        return chances(self._weights, signs, own.get(self, (0.0,))[0])

    def chances_of_many(self, own: Sequence[Offsets], drafts: Sequence[Sequence[float]]) -> Chances:
        """`chances` of one draft of each request."""
        return chances_of_many(self._weights, drafts, [each.get(self, (0.0,))[0] for each in own])

    def observe(self, own: Offsets, signs: Sequence[float], matched: int, seen: int) -> None:
        """Learns from a draft whose first `matched` tokens equal the text.  `seen`: positions compared, `matched` + 1 if one
        differed."""
        if not seen:
            return
        offset, doubt = own.get(self, (0.0, REQUEST_DOUBT))
        for j, chance in enumerate(self.chances(own, signs[: 2 * seen])):
            step, shrink = self._learn(min(j, self._last), signs[2 * j], signs[2 * j + 1], chance, j < matched, doubt)
            offset, doubt = offset + doubt * step, doubt + REQUEST_DRIFT - doubt * doubt * shrink
        own[self] = offset, doubt
        self._weights = self._flat()

    def _learn(self, position: int, value: float, lead: float, chance: float, right: bool, doubt: float) -> tuple[float, float]:
        """Takes one observation; `doubt` is that of the request's offset.

        Returns two factors: the request's offset moves by doubt times the first, and its doubt falls by doubt squared times the
        second.  Written without loops, since every draft token comes here.
        """
        means, doubts, own = self._means, self._doubts, 3 + position
        value, lead = clipped(value), clipped(lead)
        value_gain, lead_gain = doubts[0] * value, doubts[1] * lead
        common_gain, own_gain = doubts[2], doubts[own]
        curvature = chance * (1 - chance)
        scale = 1 / (1 + curvature * (value_gain * value + lead_gain * lead + common_gain + own_gain + doubt))
        step, shrink = (right - chance) * scale, curvature * scale
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
