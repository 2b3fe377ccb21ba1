"""Limits hold in every window, also where several gateways share them; what was taken and given back comes out even."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.caller import KeyLimits
from gateway.auth.quota import Ledger, SharedUse, duration
from gateway.http.errors import RateLimited

PER_MINUTE = KeyLimits(requests_per_minute=60)


def refused(call, *given):
    """The headers of the refusal."""
    with pytest.raises(RateLimited) as caught:
        call(*given)
    return caught.value.headers()


def test_a_minute_s_worth_at_once_and_then_as_it_drains():
    ledger = Ledger()
    for _ in range(60):
        ledger.begin("a", PER_MINUTE, 0.0)
    with pytest.raises(RateLimited, match=r"requests per min \(RPM\): limit 60\. Please try again in 1s") as caught:
        ledger.begin("a", PER_MINUTE, 0.0)
    assert (caught.value.type, caught.value.headers()["retry-after-ms"]) == ("requests", "1000")
    ledger.begin("a", PER_MINUTE, 1.0)
    ledger.begin("b", PER_MINUTE, 0.0)


def test_headers_are_openai_s():
    ledger = Ledger()
    limits = KeyLimits(requests_per_minute=60, tokens_per_minute=600)
    for _ in range(3):
        ledger.begin("a", limits, 10.0)
    ledger.spend("a", limits, 100, 10.0)
    assert dict(ledger.headers("a", limits, 10.0)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"57",
        b"x-ratelimit-reset-requests": b"3s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"500",
        b"x-ratelimit-reset-tokens": b"10s",
    }
    assert [duration(each) for each in (0, 0.0121, 1.5, 59.9996, 61, 360)] == ["0ms", "13ms", "1.5s", "60s", "1m1s", "6m0s"]


def test_tokens_are_corrected_and_too_many_are_refused_for_good():
    ledger = Ledger()
    limits = KeyLimits(tokens_per_minute=100)
    ledger.spend("a", limits, 90, 0.0)
    refused(ledger.spend, "a", limits, 20, 0.0)
    ledger.correct("a", limits, -50, 0.0)
    ledger.spend("a", limits, 60, 0.0)
    ledger.correct("a", limits, 200, 0.0)
    assert refused(ledger.spend, "a", limits, 1, 0.0)["retry-after-ms"] == "120600"
    assert refused(ledger.spend, "a", limits, 101, 0.0) == {"x-should-retry": "false"}


def test_what_was_refused_later_does_not_count():
    ledger, limits = Ledger(), KeyLimits(requests_per_minute=1, tokens_per_minute=100)
    for _ in range(3):
        ledger.begin("a", limits, 0.0)
        refused(ledger.spend, "a", limits, 101, 0.0)
        ledger.end("a", 0.0)
    ledger.begin("a", limits, 0.0)
    ledger.end("a")
    refused(ledger.begin, "a", limits, 0.0)


def test_what_is_used_during_an_exchange_is_not_forgotten():
    ledger, limits = Ledger(), KeyLimits(tokens_per_minute=100)
    ledger.spend("a", limits, 40, 0.0)
    (use,) = uses = ledger.take(0.0)
    ledger.spend("a", limits, 30, 0.0)
    ledger.absorb(uses, {"a": SharedUse(0.0, use.tokens + 20, 0)}, 0.0)
    refused(ledger.spend, "a", limits, 11, 0.0)
    ledger.spend("a", limits, 10, 0.0)
    # Twice, as after an exchange that failed.
    assert [ledger.take(0.0)[0].tokens for _ in range(2)] == [40, 40]


arrivals = st.lists(st.tuples(st.floats(0, 5), st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=80)


@given(arrivals, st.integers(20, 200), st.integers(1, 5))
def test_the_limit_holds_in_every_window_but_for_what_one_interval_lets_through(steps, limit, every):
    """Three gateways that exchange every so many arrivals: never more than a minute's worth, what drained meanwhile, and what
    the other two let through since the last exchange."""
    limits = KeyLimits(tokens_per_minute=limit)
    ledgers = [Ledger() for _ in range(3)]
    shared, shared_at, now = 0.0, 0.0, 0.0
    admitted: list[tuple[float, int]] = []
    unseen, known = [0, 0, 0], set[int]()
    excess = 0.0
    for number, (gap, at, tokens) in enumerate(steps):
        now += gap
        if number % every == 0:
            sent = [ledger.take(now) for ledger in ledgers]
            for uses in sent:
                for use in uses:
                    shared = max(0.0, max(0.0, shared - (now - shared_at) * limit / 60) + use.tokens)
                    shared_at = now
            for place in known:
                ledgers[place].absorb(sent[place], {"a": SharedUse(0.0, shared, 0)}, now)
            unseen = [0, 0, 0]
        # A gateway that has no account yet hears of the others before it lets anything through.
        ledgers[at].account("a", limits, now)
        if at not in known:
            known.add(at)
            drained = max(0.0, shared - (now - shared_at) * limit / 60)
            ledgers[at].absorb(ledgers[at].take(now), {"a": SharedUse(0.0, drained, 0)}, now)
        with contextlib.suppress(RateLimited):
            ledgers[at].spend("a", limits, tokens, now)
            excess = max(excess, sum(unseen) - unseen[at])
            unseen[at] += tokens
            admitted.append((now, tokens))
    for first, last in itertools.combinations_with_replacement(range(len(admitted)), 2):
        within = sum(tokens for _, tokens in admitted[first : last + 1])
        assert within <= limit + (admitted[last][0] - admitted[first][0]) * limit / 60 + excess + 0.01
