"""What verifiers say of requests that asked for it."""

import pytest

from backend.engine.accounts import Accounts
from backend.wire.engine import Account, Tally


def test_only_who_asked_is_counted_and_told_once():
    accounts = Accounts()
    accounts.verified("other", "fresh", "d", 3, 2, 0.1)
    accounts.emitted("other", 3)
    assert accounts.ended("other") is None
    assert accounts.take() == {}
    accounts.began("r", 4, "greedy")
    accounts.began("s", 5, "shared_noise")
    accounts.verified("r", "", "", 0, 0, 0.0)
    accounts.emitted("r", 1)
    accounts.verified("r", "fresh", "d", 3, 2, 0.5)
    accounts.emitted("r", 3)
    accounts.verified("r", "ahead", "d", 2, 0, 0.25)
    accounts.emitted("r", 1)
    accounts.verified("r", "fresh", "d", 4, 2, 0.0)
    accounts.emitted("r", 2)
    accounts.ended("r")
    tallies = [Tally("fresh", "d", 2, 7, 4), Tally("ahead", "d", 1, 2, 0)]
    assert accounts.take() == {4: [Account("r", 7, 4, [1, 0, 2], tallies, 0.75, "greedy")]}
    assert accounts.take() == {}
    accounts.ended("s")
    assert accounts.take() == {5: [Account("s", rule="shared_noise")]}


def test_a_traced_requests_account_is_told_to_no_gateway():
    accounts = Accounts()
    accounts.began("r", None, "greedy")
    accounts.verified("r", "fresh", "d", 3, 2, 0.1)
    assert accounts.ended("r") == Account("r", 0, 1, [0, 0, 1], [Tally("fresh", "d", 1, 3, 2)], 0.1, "greedy")
    assert accounts.take() == {}


@pytest.mark.parametrize(("emitted", "accepted"), [(9, 8), (8, 8), (2, 2), (1, 1)])
def test_draft_tokens_behind_the_requests_end_are_not_accepted(emitted: int, accepted: int):
    accounts = Accounts()
    accounts.began("r", 0, "greedy")
    accounts.verified("r", "prediction", "", 3, 1, 0.0)
    accounts.emitted("r", 2)
    accounts.verified("r", "prediction", "", 8, 8, 0.0)
    accounts.emitted("r", emitted)
    lengths = [0] * (accepted + 1)
    lengths[1] += 1
    lengths[accepted] += 1
    tallies = [Tally("prediction", "", 2, 11, 1 + accepted)]
    assert accounts.ended("r") == Account("r", 2 + emitted, 2, lengths, tallies, 0.0, "greedy")
