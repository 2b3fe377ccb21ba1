"""What a step's budget may read of sampled drafts."""

import numpy as np

from backend.speculation.candidate import Candidate, Source, candidate_of
from backend.speculation.chances import Rule
from backend.speculation.proposals import Proposal
from backend.speculation.ranking import Ranking
from backend.speculation.step_times import StepTimes

FROM_D0 = Source("d0", Rule.INDEPENDENT)
NO_PROPOSAL_NEEDED = Proposal(np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32))


def sampled(*chances: float) -> Candidate:
    return candidate_of(FROM_D0, [1, 2, 3], [0.0] * 6, list(chances), proposal=NO_PROPOSAL_NEEDED)


def steps() -> StepTimes:
    times = StepTimes()
    for tokens in range(1, 9):
        times.observe(tokens, 0.01 + 0.003 * tokens, tokens - 1)
    return times


def test_what_a_request_has_no_room_to_verify_decides_nothing() -> None:
    """Whether its later token is likely depends on the token before it, which is not verified."""
    found = {}
    for later in (0.05, 0.99):
        both: list[Candidate | None] = [sampled(0.9, later, later), sampled(0.6, 0.6, 0.6)]
        found[later] = [Ranking(steps()).cut(both, limits=limits) for limits in ([1, 3], None)]
    (low, low_free), (high, high_free) = found.values()
    assert low == high
    assert low is not None
    assert low.lengths[0] == 1
    assert low_free != high_free, "it would, were there room"


def test_a_step_without_limits_is_not_taken_for_one_with() -> None:
    ranking = Ranking(steps())
    draft: list[Candidate | None] = [sampled(0.9, 0.9, 0.9)]
    for limits, length in ((None, 3), ([2], 2), ([0], 0), (None, 3)):
        spent = ranking.cut(draft, limits=limits)
        assert spent is not None
        assert spent.lengths == [length]
