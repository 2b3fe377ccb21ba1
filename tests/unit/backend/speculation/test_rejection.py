"""Sampled drafts do not change the text: exact enumeration through the product's own budget and verifying code.

Tokens 0 to 2, drafts of two tokens.  q and p are far apart.  Whether and how far a draft is verified is decided by
`spend_in_order` from chances made of q's shape.  Three wrong ways to decide, and noise that a drafter has looked at, are seen
to bias the text.
"""

import functools
import itertools
from bisect import bisect
from collections.abc import Callable, Iterator
from math import prod

import numpy as np
import pytest
import torch

from backend.engine.worker.rejection import judge, table_of
from backend.noise import behind, choose, gumbel, uniforms
from backend.speculation.budget import spend, spend_in_order, survivals
from backend.speculation.proposals import Proposal, unpack

V, D = 3, 2
Text = tuple[int, ...]
Cut = Callable[[Text], int]
GoesOn = Callable[[Text, int, Text], bool]
"""Whether the rest of a draft is verified next, by the draft, how much of it was verified, and the text emitted."""
DICE = np.random.default_rng(0)
PREFIXES = [text for n in range(D + 2) for text in itertools.product(range(V), repeat=n)]
P = {text: DICE.dirichlet(np.full(V, 0.7)) for text in PREFIXES}
Q = {text: DICE.dirichlet(np.full(V, 0.7)).astype(np.float32) for text in PREFIXES}
SUMS = {text: p.cumsum()[:-1].tolist() for text, p in P.items()}
TEXTS = list(itertools.product(range(V), repeat=D + 1))
TRUE = {text: prod(P[text[:i]][text[i]] for i in range(D + 1)) for text in TEXTS}


@functools.cache
def outcomes(draft: Text, length: int, before: Text = ()) -> list[tuple[Text, float]]:
    """What a verification of the first `length` tokens behind `before` may emit, with its chance; from `judge`, at every u that
    matters."""
    if not length:
        return [((v,), P[before][v]) for v in range(V)]
    # The interval [0, 1) of each u is cut into equal cells; the midpoints are tried, so chances are right to 1 / CELLS.
    logits = torch.tensor(np.log([P[before + draft[:i]] for i in range(length + 1)]), dtype=torch.float32)
    cells = 400
    u = (torch.arange(cells) + 0.5) / cells
    grid = torch.cartesian_prod(*[u] * length).view(-1, length)
    tables = map(torch.from_numpy, table_of([draft[:length]], [proposal_of(draft, before)]))
    tokens, ids, q = (each.expand(len(grid), *each.shape[1:]) for each in tables)
    rows, lengths = torch.arange(length + 1).expand(len(grid), -1), torch.full((len(grid),), length)
    judged = judge(logits, rows, lengths, tokens, ids, q, grid)
    last = judged.last.softmax(1).double()
    masses = [last[judged.accepted == accepted].sum(0) / len(grid) for accepted in range(length + 1)]
    return [((*draft[:accepted], v), float(mass[v])) for accepted, mass in enumerate(masses) for v in range(V)]


def proposal_of(draft: Text, before: Text = ()) -> Proposal:
    rows = [Q[before + draft[:i]] for i in range(len(draft))]
    return Proposal(np.tile(np.arange(V, dtype=np.int32), (len(draft), 1)), np.stack(rows))


def emitted(draft: Text, length: int, goes_on: GoesOn) -> Iterator[tuple[Text, float]]:
    """What a verification emits, with its chance; where `goes_on`, a second one follows, of the draft's rest."""
    for begun, chance in outcomes(draft, length):
        rest = draft[len(begun) :]
        if goes_on(draft, length, begun) and rest:
            yield from ((begun + more, chance * its) for more, its in outcomes(rest, len(rest), begun))
        else:
            yield begun, chance


def error(cut: Cut, goes_on: GoesOn = lambda draft, length, begun: False) -> float:
    """Total variation between the first D + 1 tokens emitted and the target's."""
    got = dict.fromkeys(TEXTS, 0.0)
    for draft in itertools.product(range(V), repeat=D):
        weight = prod(float(Q[draft[:i]][draft[i]]) for i in range(D))
        for begun, chance in emitted(draft, cut(draft), goes_on):
            for tail in itertools.product(range(V), repeat=D + 1 - len(begun)):
                text = begun + tail
                got[text] += weight * chance * prod(P[text[:i]][text[i]] for i in range(len(begun), D + 1))
    return sum(abs(got[text] - TRUE[text]) for text in TEXTS) / 2


def chances_of(draft: Text) -> list[float]:
    """As the product makes them: from q's shape alone."""
    return [float(Q[draft[:i]].max()) for i in range(D)]


def spent(draft: Text, times: list[float]) -> int:
    row = survivals(chances_of(draft))
    expected = [row[0] ** n for n in range(1, D + 1)]
    return spend_in_order([row, [0.6, 0.3]], spend([expected, [0.6, 0.3]], times), times).lengths[0]


@pytest.mark.parametrize("price", [0.01, 0.1, 0.14, 0.18, 0.22, 0.3])
def test_the_budget_biases_nothing(price: float) -> None:
    times = [1 + price * n for n in range(8)]
    assert error(lambda draft: spent(draft, times)) < 0.004


def test_some_price_makes_the_budget_depend_on_the_draft() -> None:
    """Else the test above shows nothing."""
    drafts = list(itertools.product(range(V), repeat=D))
    assert any(
        len({spent(draft, [1 + price * n for n in range(8)]) for draft in drafts}) > 1 for price in (0.1, 0.14, 0.18, 0.22)
    )


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(
            lambda x: 0 if Q[()][x[0]] < 0.35 else 1 if Q[x[:1]][x[1]] < 0.35 else 2, id="the token's own probability"
        ),
        pytest.param(lambda x: 0 if Q[x[:1]].max() < 0.6 else 2, id="what follows the token"),
        pytest.param(lambda x: 2 if x[0] == 1 else 0, id="the token"),
    ],
)
def test_a_cut_that_has_seen_the_token_is_found(cut: Cut) -> None:
    assert error(cut) > 0.01


def test_the_rest_of_a_draft_of_which_nothing_was_verified_biases_nothing() -> None:
    def used(draft: Text, length: int, begun: Text) -> bool:
        return begun == draft[: length + 1]

    assert error(lambda draft: 0, used) < 0.004
    assert error(lambda draft: 0, lambda *what: used(*what) and what[0][1] == 1) > 0.01, (
        "but it must not say whether it is used"
    )


Places = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
START = 5


def verified(
    before: list[Text], depth: int, seeds: torch.Tensor, dice: np.random.Generator, place_of: Places = behind
) -> list[Text]:
    """Each text of `before`, all of one length, with what a verification of `depth` tokens emits behind it.

    `place_of(lengths, accepted)` says which noise draws.
    """
    count, known = len(before), np.array(before, np.int64).reshape(len(before), -1)
    size = known.shape[1]
    texts = np.concatenate((known, np.zeros((count, depth), np.int64)), axis=1)
    logits, q = np.zeros((count, depth + 1, V), np.float32), np.zeros((count, max(depth, 1), V), np.float32)
    for i in range(depth + 1):
        for text in itertools.product(range(V), repeat=size + i):
            mine = (texts[:, : size + i] == text).all(axis=1)
            logits[mine, i] = np.log(P[text])
            if i < depth:
                q[mine, i] = Q[text]
                texts[mine, size + i] = dice.choice(V, p=Q[text].astype(float) / Q[text].astype(float).sum(), size=mine.sum())
    lengths, ones, flat = torch.full((count,), START + size), torch.ones(count), torch.from_numpy(logits).view(-1, V)
    if not depth:
        tokens = choose(flat, seeds, lengths, ones, ones).columns.tolist()
        return [(*text, token) for text, token in zip(before, tokens, strict=True)]
    rows = torch.arange(count * (depth + 1)).view(count, depth + 1)
    ids, drafts = torch.arange(V).expand(count, depth, V), torch.from_numpy(texts[:, size:])
    judged = judge(flat, rows, torch.full((count,), depth), drafts, ids, torch.from_numpy(q), uniforms(seeds, lengths, depth))
    last = choose(judged.last.contiguous(), seeds, place_of(lengths, judged.accepted), ones, ones).columns.tolist()
    return [
        (*text[: size + accepted], token)
        for text, accepted, token in zip(texts.tolist(), judged.accepted.tolist(), last, strict=True)
    ]


def distance(texts: list[Text], dice: np.random.Generator) -> float:
    """Chi-square of the texts, after plain decoding to `D` + 1 tokens."""
    got = dict.fromkeys(TEXTS, 0)
    for text in texts:
        whole = text
        while len(whole) < D + 1:
            whole = (*whole, bisect(SUMS[whole], dice.random()))
        got[whole] += 1
    return sum((got[text] - len(texts) * TRUE[text]) ** 2 / (len(texts) * TRUE[text]) for text in TEXTS)


def foreseen(count: int, place_of: Places) -> float:
    """Chi-square if the second verification has a draft only where noise looked at for another outcome of the first says so.

    A drafter that ranks outcomes knows the noise of each.  So whether it has drafted for the one that came depends on that of
    the others.
    """
    dice, seeds = np.random.default_rng(1), torch.arange(count)
    texts = verified([()] * count, D, seeds, dice, place_of)
    other = place_of(torch.full((count,), START), torch.ones(count, dtype=torch.int64))
    has_draft = (gumbel(seeds, other, torch.arange(V).expand(count, V)).argmax(1) == 0).tolist()
    for depth in (0, 1):
        which = [i for i, text in enumerate(texts) if len(text) == 1 and has_draft[i] == bool(depth)]
        more = verified([texts[i] for i in which], depth, seeds[which], dice, place_of)
        for i, text in zip(which, more, strict=True):
            texts[i] = text
    return distance(texts, dice)


LIMIT = 58.0
"""Chi-square with 26 degrees of freedom is above this once in 3,000 times; the noise is fixed."""


def test_texts_of_drafts_that_are_verified_whole_have_the_targets_distribution() -> None:
    dice = np.random.default_rng(1)
    assert distance(verified([()] * 120_000, D, torch.arange(120_000), dice), dice) < LIMIT


def test_noise_that_a_drafter_has_looked_at_biases_nothing() -> None:
    assert foreseen(120_000, behind) < LIMIT
    assert foreseen(120_000, torch.add) > LIMIT, "if the noise belonged to the position, it would"


def test_a_certain_draft_is_accepted_with_the_targets_probability() -> None:
    tokens, ids, q = map(torch.from_numpy, table_of([[1], [2, 0]], [None, None]))
    assert q.sum() == 3
    u = torch.full((2, 2), 0.3)
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.1, 0.7, 0.2], [0.4, 0.3, 0.3], [1.0, 0, 0]]))
    rows = torch.tensor([[0, 1, 1], [2, 3, 4]])
    judged = judge(logits, rows, torch.tensor([1, 2]), tokens, ids, q, u)
    assert judged.accepted.tolist() == [1, 0]
    assert judged.last[0].softmax(0).tolist() == pytest.approx([0.5, 0.2, 0.3])
    assert judged.last[1].softmax(0).tolist() == pytest.approx([1 / 8, 7 / 8, 0])


def packed(rows: list[list[float]]) -> bytes:
    chances = np.array(rows, "<f4")
    return np.tile(np.arange(chances.shape[1], dtype="<i4"), (len(rows), 1)).tobytes() + chances.tobytes()


def test_proposals_are_read_from_the_wire() -> None:
    def read(rows: list[list[float]], tokens: list[int], vocab_size: int = 3) -> Proposal | None:
        """Reads one proposal among others, of other sizes and of its own."""
        other = packed([[0.25, 0.25, 0.5]] * len(tokens))
        drafts = [[1], [2] * len(tokens), tokens, [2] * len(tokens)]
        none, before, found, after = unpack([b"", other, packed(rows), other], drafts, vocab_size)
        assert none is None
        if vocab_size == 3:
            assert before is not None
            assert after is not None
        return found

    sound = [[0.5, 0.5, 0], [0, 0.25, 0.75]]
    found = read(sound, [1, 2])
    assert found is not None
    assert found.chances.tolist() == sound
    assert found.part(1, 2).ids.tolist() == [[0, 1, 2]]
    assert read(sound, [2, 2]) is None, "a token that could not be drawn"
    assert read(sound, [1, 2], 2) is None, "outside the vocabulary"
    assert read([[0.5, 0.6, 0], [0, 0.25, 0.75]], [1, 2]) is None, "not a distribution"
    assert read([[1.5, -0.5, 0], [0, 0.25, 0.75]], [0, 2]) is None
    assert read([[float("nan"), 0.5, 0.5], [0, 0.25, 0.75]], [1, 2]) is None
    assert unpack([packed(sound)[:-1], packed(sound), b""], [[1, 2], [1], [1]], 3) == [None] * 3, "sizes that do not fit"
