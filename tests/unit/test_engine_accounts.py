"""What verifiers say of requests that asked for it."""

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
