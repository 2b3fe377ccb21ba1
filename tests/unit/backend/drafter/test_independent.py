"""Independent drafts: samples of the distribution that is sent, drawn afresh; signs and lengths say nothing of the tokens."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backend import noise
from backend.drafter.decoding import NUMBERS, Decoder
from backend.drafter.draws import SUPPORT, Ends, Rules, columns_of
from backend.drafter.proposer import GREEDY, Drafted, Premise, Sampling, Until
from backend.speculation.chances import CLIP
from tests.support.drafter_heads import Reference, TinyHead, make_proposer
from tests.support.drafter_sessions import begun
from tests.support.properties import examples
from tests.support.statistics import chi_square
from tests.support.true_noise import true_gumbel

SEED = 2**63 + 5
CPU = torch.device("cpu")
DRAWN = 20_000
LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, -2.5, 1.0, -0.2])
HOT = 50.0
"""A temperature at which a head is sure of nothing: drafts of several tokens that are drawn twice differ."""
UNSURE, SURE = [0.0, 0.0, -20.0], [0.0, 0.0, 20.0]


def own(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Sampling:
    return Sampling.of(SEED, temperature, True, top_k, top_p, min_p)


def pick(samplings: Sequence[Sampling], logits: Tensor, token_ids: Tensor | None = None, k: int = 1) -> list[Drafted]:
    """A draft of `k` tokens per row, all from the same logits `[rows, V]`."""
    rows = len(samplings)
    head = mock.Mock(device=CPU, dtype=torch.float32, capacity=8, token_offset=1, is_asynchronous=False)
    head.config.hidden_size, head.lm_head, head.draft_to_target = 1, logits[:1], token_ids
    output = torch.zeros(rows, 1)
    head.read.return_value, head.feature.return_value, head.forward.return_value = logits, output, output
    numbers, columns = torch.zeros(NUMBERS, rows, dtype=torch.int64), torch.tensor(columns_of(samplings))
    numbers[-1] = torch.tensor([sampling.seed for sampling in samplings])
    batch = Decoder(head, graphs=False).batch(k, Rules.needed_by(samplings), numbers, columns, output)
    return batch.decode(k, lambda: Ends([k] * rows, [Until(k)] * rows, samplings), picks_first=True)


def decode(tokens: Sequence[int], proposal: bytes) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and probabilities of each token's distribution, checked for what every proposal must be."""
    count = len(tokens)
    assert len(proposal) % (8 * count) == 0
    support = len(proposal) // (8 * count)
    ids = np.frombuffer(proposal, "<i4", count * support).reshape(count, support)
    chances = np.frombuffer(proposal, "<f4", offset=4 * count * support).reshape(count, support)
    assert chances.sum(axis=1, dtype=np.float64) == pytest.approx(1, abs=1e-6)
    assert (chances >= 0).all()
    for token, row, chance in zip(tokens, ids, chances, strict=True):
        assert len(set(row.tolist())) == support
        assert chance[row == token].item() > 0
    return ids.tolist(), chances.tolist()


@pytest.mark.parametrize(
    "sampling",
    [own(), own(0.6), own(1.7), own(top_k=3), own(top_p=0.7), own(min_p=0.15), own(0.8, 5, 0.9, 0.02)],
    ids=["1", "0.6", "1.7", "top_k", "top_p", "min_p", "all three"],
)
def test_tokens_are_independent_samples_of_the_distribution_that_is_sent(sampling: Sampling) -> None:
    """The joint distribution of two tokens of one row, and of the tokens of two rows, is the product."""
    ids = torch.arange(8) * 3 + 1
    drafts = pick([sampling] * DRAWN, LOGITS.expand(DRAWN, -1), ids, k=2)
    assert all(drafted.proposal == drafts[0].proposal for drafted in drafts)
    supports, chances = decode(drafts[0].tokens, drafts[0].proposal)
    assert [sorted(support) for support in supports] == [ids.tolist()] * 2
    assert all(chances[0]) == (sampling in (own(), own(0.6), own(1.7))), "of the others, some tokens are ruled out"
    pairs = [(drafted.tokens[0], drafted.tokens[1]) for drafted in drafts]
    neighbours = [(one.tokens[0], other.tokens[0]) for one, other in zip(drafts[::2], drafts[1::2], strict=True)]
    joint = zip(itertools.product(*supports), itertools.product(*chances), strict=True)
    possible = {pair: a * b for pair, (a, b) in joint if a * b}
    for drawn in (pairs, neighbours):
        assert possible.keys() >= set(drawn), "nothing of probability 0"
        assert chi_square(drawn, possible) > 1e-6


def test_signs_say_nothing_of_the_token(tmp_path: Path) -> None:
    drafts = pick([own(0.8, top_p=0.95)] * 64, LOGITS.expand(64, -1))
    assert len({drafted.tokens[0] for drafted in drafts}) > 2
    assert len({tuple(drafted.signs) for drafted in drafts}) == 1
    _, (chances,) = decode(drafts[0].tokens, drafts[0].proposal)
    first, second = sorted(chances)[-1:-3:-1]
    expected = [sum(chance * math.log(chance) for chance in chances if chance), math.log(first / second)]
    assert drafts[0].signs == pytest.approx(expected, abs=1e-5)
    assert pick([own(top_k=1)], LOGITS.unsqueeze(0))[0].signs == [0.0, CLIP]
    proposer = make_proposer(tmp_path, TinyHead(draft_vocab=40))
    request = begun(proposer, 1, 12, own(HOT))
    found = [request.draft(1) for _ in range(16)]
    assert len({tuple(drafted.tokens) for drafted in found}) > 1
    assert len({(tuple(drafted.signs), drafted.proposal) for drafted in found}) == 1


def allowed(logits: list[float], sampling: Sampling) -> tuple[set[int], set[int]]:
    """By vLLM's rules: columns that must have a probability, and those that may (rounding may decide at an edge)."""
    ranked = sorted(range(len(logits)), key=lambda column: -logits[column])[:SUPPORT]
    total = sum(math.exp((logits[c] - logits[ranked[0]]) / sampling.temperature) for c in ranked)
    chances = {c: math.exp((logits[c] - logits[ranked[0]]) / sampling.temperature) / total for c in ranked}
    sets = []
    for slack in (1e-4, -1e-4):
        # In single precision the least chances may be 0.
        least = max(sampling.min_p * chances[ranked[0]] * (1 + slack), 1e-30 if slack > 0 else 0.0)
        left = [c for c in ranked if chances[c] >= least]
        left = left[: sampling.top_k] if sampling.top_k else left
        kept: set[int] = set()
        mass, before = sum(chances[c] for c in left), 0.0
        for c in left:
            if not kept or sampling.top_p == 1 or before < (sampling.top_p - slack) * mass:
                kept.add(c)
            before += chances[c]
        sets.append(kept)
    return sets[0], sets[1]


@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=50, unique_by=lambda x: round(x, 3)),
    st.floats(0.2, 2.0),
    st.integers(0, 40),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
@examples(100)
def test_restrictions_are_those_of_the_request(logits: list[float], t: float, top_k: int, top_p: float, min_p: float) -> None:
    sampling = own(t, top_k, top_p, min_p)
    (drafted,) = pick([sampling], torch.tensor([logits]))
    (ids,), (chances,) = decode(drafted.tokens, drafted.proposal)
    assert len(ids) == min(SUPPORT, len(logits))
    kept = {column: chance for column, chance in zip(ids, chances, strict=True) if chance}
    must, may = allowed(logits, sampling)
    assert must <= kept.keys() <= may
    best = max(kept, key=lambda column: kept[column])
    for column, chance in kept.items():
        assert chance / kept[best] == pytest.approx(math.exp((logits[column] - logits[best]) / t), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("spoiled", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_still_make_a_distribution(spoiled: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[0, 2] = spoiled
    logits[1] = spoiled
    for sampling in (own(), own(1e-4), own(2.0, 3, 0.5, 0.1)):
        for drafted in pick([sampling] * 3, logits):
            decode(drafted.tokens, drafted.proposal)


def test_other_rows_of_a_batch_stay_as_they_were() -> None:
    logits = torch.randn(7, 61, generator=torch.Generator().manual_seed(1)) * 3
    others = [GREEDY, Sampling.of(SEED, 0.7), Sampling.of(3, 1.3), GREEDY]
    places, owned = [0, 2, 3, 6], [1, 4, 5]
    mixed = [own(0.5 + row / 10) for row in range(7)]
    for place, sampling in zip(places, others, strict=True):
        mixed[place] = sampling
    together, alone = pick(mixed, logits), pick(others, logits[places])
    assert [together[place] for place in places] == alone
    assert all(not drafted.proposal for drafted in alone)
    for place in owned:
        expected = pick([mixed[place]], logits[place : place + 1])[0]
        assert together[place].proposal == expected.proposal
        assert together[place].signs == expected.signs
        decode(together[place].tokens, together[place].proposal)


def test_shared_noise_is_not_read_for_independent_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may yet draw their later tokens."""
    choose = mock.Mock(side_effect=noise.choose)
    monkeypatch.setattr(noise, "choose", choose)
    pick([own()] * 3, LOGITS.expand(3, -1))
    assert not choose.called
    pick([own(), Sampling.of(SEED, 1.0), GREEDY], LOGITS.expand(3, -1))
    assert choose.call_args.args[4].tolist() == [0.0, 1.0, 0.0]


def test_outcomes_are_drafted_independently_and_ranked_with_the_noise_behind_their_tokens(tmp_path: Path) -> None:
    head = TinyHead(draft_vocab=40)
    book = Reference(head, SEED, HOT)
    proposer = make_proposer(tmp_path, head)
    one, other = begun(proposer, 1, 20, own(HOT)), begun(proposer, 2, 20, Sampling.of(SEED, HOT))
    verifying = one.draft().tokens
    for certain, stops in ((SURE, {4}), (UNSURE, {0})):
        until = Until(3, 0.9, [certain] * 3)
        premises = [Premise(r.key, 20, until, verifying, 6) for r in (one, other)]
        owned, _ = proposer.draft_outcomes(premises)
        again, _ = proposer.draft_outcomes(premises)
        assert {o.accepted for o in owned} == stops
        assert [(o.accepted, o.token) for o in owned] == [(o.accepted, o.token) for o in again]
        assert [o.tokens for o in owned] != [o.tokens for o in again]
        assert all(len(o.tokens) == 3 for o in owned), "no floor"
        for outcome in owned:
            decode(outcome.tokens, outcome.proposal)
        (stop,) = stops
        book.draft(one.tokens, one.seen, 1, verifying)
        values = {
            token: value - true_gumbel(SEED, 20 + stop, token) + true_gumbel(SEED, 20 + stop, token, stop and stop + 1)
            for token, value in book.values[stop].items()
            if token not in verifying[stop : stop + 1]
        }
        assert [o.token for o in owned] == sorted(values, key=lambda token: -values[token])[:6]


def test_the_chance_of_an_outcome_depends_on_the_shape_alone(tmp_path: Path) -> None:
    """With weights for the value alone, where verification stops is the same whichever token is verified first."""
    head = TinyHead()
    proposer = make_proposer(tmp_path, head)
    request = begun(proposer, 1, 20, own(3.0))
    # Far steeper than any sign is large: one stop gets all outcomes, by the sign of value + 1.
    until = Until(2, 0.0, [UNSURE, UNSURE, [200.0, 0.0, 200.0]])
    drafted = request.draft(1)
    expected = 1 if drafted.signs[0] > -1 else 0
    for token in range(head.vocab):
        found = proposer.draft_outcomes([Premise(1, 20, until, [token], 4)])[0]
        assert {o.accepted for o in found} == {expected}
