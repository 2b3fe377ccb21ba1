"""What verifiers say of requests that asked for it."""

import pytest

from backend.engine.accounts import UNDRAFTED, Accounts, DraftOrigin, Verification
from backend.wire.engine import Account, Tally


def of(source: str, drafted: int, accepted: int, drafter: str = "d") -> Verification:
    return Verification(9, drafted, accepted, DraftOrigin(drafter, source=source))


def test_only_who_asked_is_counted_and_told_once():
    accounts = Accounts()
    accounts.verified("other", of("fresh", 3, 2), 3, 0.1)
    assert accounts.ended("other") is None
    assert accounts.take() == {}
    accounts.began("r", 4, "greedy")
    accounts.began("s", 5, "shared_noise")
    accounts.verified("r", Verification(9, 0, 0, UNDRAFTED), 1, 0.0)
    accounts.verified("r", of("fresh", 3, 2), 3, 0.5)
    accounts.verified("r", of("ahead", 2, 0), 1, 0.25)
    accounts.verified("r", of("fresh", 4, 2), 3, 0.0)
    accounts.ended("r")
    tallies = [Tally("fresh", "d", 2, 7, 4), Tally("ahead", "d", 1, 2, 0)]
    assert accounts.take() == {4: [Account("r", 8, 4, [1, 0, 2], tallies, 0.75, "greedy")]}
    assert accounts.take() == {}
    accounts.ended("s")
    assert accounts.take() == {5: [Account("s", rule="shared_noise")]}


@pytest.mark.parametrize(("emitted", "accepted"), [(9, 8), (8, 8), (2, 2), (1, 1)])
def test_draft_tokens_behind_the_requests_end_are_not_accepted(emitted: int, accepted: int):
    accounts = Accounts()
    accounts.began("r", None, "greedy")
    accounts.verified("r", of("prediction", 8, 8, ""), emitted, 0.0)
    lengths = [0] * accepted + [1]
    assert accounts.ended("r") == Account("r", emitted, 1, lengths, [Tally("prediction", "", 1, 8, accepted)], 0.0, "greedy")
    assert accounts.take() == {}, "no gateway has asked: it is a trace's"
