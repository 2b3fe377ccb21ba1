"""Limits hold in every window, also where several gateways share them; what was taken and given back comes out even."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.caller import Caller
from gateway.auth.quota import Bucket, Buckets, SharedUse, absorb, duration, take
from gateway.auth.quotas import Quotas
from gateway.http.errors import RateLimited


def refused(call, *given):
    """The headers of the refusal."""
    with pytest.raises(RateLimited) as caught:
        call(*given)
    return caught.value.headers()


def test_a_minutes_worth_at_once_and_then_as_it_drains_with_openais_headers():
    requests, tokens = Bucket("requests", 60), Bucket("tokens", 600)
    for _ in range(3):
        requests.spend(1, 10.0)
    tokens.spend(100, 10.0)
    assert dict(requests.headers(10.0) + tokens.headers(10.0)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"57",
        b"x-ratelimit-reset-requests": b"3s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"500",
        b"x-ratelimit-reset-tokens": b"10s",
    }
    requests.spend(57, 10.0)
    with pytest.raises(RateLimited, match=r"requests per min \(RPM\): limit 60\. Please try again in 1s") as caught:
        requests.spend(1, 10.0)
    assert (caught.value.type, caught.value.headers()["retry-after-ms"]) == ("requests", "1000")
    requests.spend(1, 11.0)
    # Tokens are corrected, and too many are refused for good.
    refused(tokens.spend, 501, 10.0)
    tokens.add(-50, 10.0)
    tokens.spend(550, 10.0)
    tokens.add(200, 10.0)
    assert refused(tokens.spend, 1, 10.0)["retry-after-ms"] == "20100"
    assert refused(tokens.spend, 601, 10.0) == {"x-should-retry": "false"}
    assert [duration(each) for each in (0, 0.0121, 1.5, 59.9996, 61, 360)] == ["0ms", "13ms", "1.5s", "60s", "1m1s", "6m0s"]


def test_what_was_refused_later_does_not_count():
    quotas, caller = Quotas("g", None), Caller("team", requests_per_minute=1)
    for _ in range(3):
        with pytest.raises(RateLimited, match="later"), quotas.counted(caller):
            raise RateLimited("later")
    with quotas.counted(caller):
        pass
    with pytest.raises(RateLimited, match="per min"), quotas.counted(caller):
        pass


def test_what_is_used_during_an_exchange_is_not_forgotten():
    tokens = Bucket("tokens", 100)
    buckets = Buckets({("a", "tokens"): tokens})
    tokens.spend(40, 0.0)
    (use,) = uses = take(buckets)
    tokens.spend(30, 0.0)
    absorb(buckets, uses, [SharedUse("a", "tokens", use.amount + 20, 0.0)], 0.0)
    refused(tokens.spend, 11, 0.0)
    tokens.spend(10, 0.0)
    # Twice, as after an exchange that failed.
    assert [take(buckets)[0].amount for _ in range(2)] == [40, 40]


arrivals = st.lists(st.tuples(st.floats(0, 5), st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=80)


@given(arrivals, st.integers(20, 200), st.integers(1, 5))
def test_the_limit_holds_in_every_window_but_for_what_one_interval_lets_through(steps, limit, every):
    """Three gateways that exchange every so many arrivals: never more than a minute's worth, what drained meanwhile, and what
    the other two let through since the last exchange."""
    gateways = [Buckets({("a", "tokens"): Bucket("tokens", limit)}) for _ in range(3)]
    shared, shared_at, now = 0.0, 0.0, 0.0
    admitted: list[tuple[float, int]] = []
    unseen, excess = [0, 0, 0], 0.0
    for number, (gap, at, tokens) in enumerate(steps):
        now += gap
        if number % every == 0:
            sent = [take(each) for each in gateways]
            for use in itertools.chain(*sent):
                shared, shared_at = max(0.0, max(0.0, shared - (now - shared_at) * limit / 60) + use.amount), now
            for each, uses in zip(gateways, sent, strict=True):
                absorb(each, uses, [SharedUse("a", "tokens", shared, now - shared_at)], now)
            unseen = [0, 0, 0]
        with contextlib.suppress(RateLimited):
            gateways[at]["a", "tokens"].spend(tokens, now)
            excess = max(excess, sum(unseen) - unseen[at])
            unseen[at] += tokens
            admitted.append((now, tokens))
    for first, last in itertools.combinations_with_replacement(range(len(admitted)), 2):
        within = sum(tokens for _, tokens in admitted[first : last + 1])
        assert within <= limit + (admitted[last][0] - admitted[first][0]) * limit / 60 + excess + 0.01
