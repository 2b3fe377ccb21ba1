"""What is counted of sequences in flight equals what looking at every one of them finds."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.admission.claim import Claim
from gateway.auth.caller import ANYBODY, Caller, Priority
from gateway.fleet.sequences import InFlight, Sequences

LINKS: list[Any] = [SimpleNamespace(member=SimpleNamespace(id=name)) for name in ("verifier-0", "verifier-1")]


def sequence(number: int, rng: random.Random) -> InFlight:
    request: Any = SimpleNamespace(request_id=f"r{number}", prompt_token_ids=[1] * rng.randrange(9))
    return InFlight(request, None, 0.0, claim=Claim(ANYBODY, rng.choice((Priority.BATCH, Priority.INTERACTIVE))))


def check(sequences: Sequences) -> None:
    every = list(sequences)
    for link in LINKS:
        here = [each for each in every if each.link is link]
        assert sequences.load(link.member.id) == (sum(each.tokens for each in here), len(here))
        assert sorted(map(id, sequences.at(link))) == sorted(map(id, here))
    assert list(sequences.batches) == [each for each in every if each.batched]


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_the_sequences(seed: int) -> None:
    rng, sequences, number = random.Random(seed), Sequences(), 0
    for _ in range(200):
        every = list(sequences)
        kind = rng.choice(("new", "grow", "grow", "move", "cut", "again", "end"))
        if kind == "new":
            record = sequence(number, rng)
            number, record.places = number + 1, 1
            sequences.put(record, rng.choice(LINKS))
        elif every:
            record = rng.choice(every)
            if kind == "grow":
                sequences.grown(record, [7] * rng.randrange(1, 4), 1.0)
            elif kind == "end":
                sequences.remove(record)
            elif kind == "again" and record.link is None:
                record.places += 1
                sequences.put(record, rng.choice(LINKS))
            elif kind in ("cut", "move") and record.link is not None:
                sequences.cut(record, None)
                if kind == "move":
                    record.places += 1
                    sequences.put(record, rng.choice(LINKS))
        check(sequences)
    for record in list(sequences):
        sequences.remove(record)
    check(sequences)
    assert not len(sequences)


def routing_request(adapter: str = "", salt: str = "", owner: str = "", session: str | None = None) -> Any:
    request: Any = SimpleNamespace(
        request_id="r",
        prompt_token_ids=[1],
        lora_request=SimpleNamespace(lora_name=adapter) if adapter else None,
        cache_salt=salt or None,
    )
    return InFlight(request, None, 0.0, claim=Claim(Caller(owner, owner), session=session)).ask


def test_requests_that_share_no_cache_have_different_scopes_and_a_session_is_one_of_its_key() -> None:
    named = [("", "a/b"), ("a", "b"), ("a/b", ""), ("a", "/b"), ("a/", "b"), ("", "1/a/b"), ("1/a", "b")]
    assert len({routing_request(adapter, salt).scope for adapter, salt in named}) == len(named)
    named = [("", "a/b"), ("a", "b"), ("", "b"), ("b", "b")]
    assert len({routing_request(owner=owner, session=session).session for owner, session in named}) == len(named)
    assert routing_request(owner="a").session is None
