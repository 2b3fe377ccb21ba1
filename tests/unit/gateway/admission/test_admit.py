"""What a request claims, from what it asks for."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from gateway.admission.admit import admit
from gateway.admission.claim import Claim, current_claim
from gateway.auth.caller import Priority
from gateway.auth.quotas import Quotas
from tests.support.refused import refused


def admitted(claim: Claim, fields: dict[str, Any], size: int = 400, max_in_flight: int = 1) -> Claim:
    gateway = SimpleNamespace(
        services=SimpleNamespace(models=SimpleNamespace(model_name=lambda: "demo"), pooling=SimpleNamespace(is_model=False)),
        quotas=Quotas("", None),
        settings=SimpleNamespace(gateway=SimpleNamespace(queue_wait_s=60.0, max_in_flight=max_in_flight)),
        client=SimpleNamespace(model_config=SimpleNamespace(max_model_len=256), core=SimpleNamespace(response_tokens=32.0)),
    )
    state = {"caller": claim.caller, "claim": claim, "body": bytes(size)}
    return admit(cast(Any, gateway), Request({"type": "http", "headers": [], "state": state}), SimpleNamespace(**fields))


def test_sequences_tokens_and_time():
    claim = admitted(Claim(), {"prompt": ["a", "b"], "n": 3, "max_tokens": 10})
    assert (claim.sequences, claim.choices, claim.expected_tokens, claim.wait_s) == (6, 3, 100 + 60, 60)
    assert current_claim() is claim
    # Without a length of its own it gets the mean one; nothing is longer than the context.
    assert admitted(Claim(), {}).expected_tokens == 100 + 32
    assert admitted(Claim(), {"max_tokens": 10**6}, size=10**6).expected_tokens == 256 + 256
    assert admitted(Claim(priority=Priority.BATCH, wait_s=None), {}).wait_s is None, "one who has time keeps it"


@pytest.mark.parametrize(("most", "max_in_flight"), [(64, 1), (1, 128)])
def test_sequences_are_bounded(most, max_in_flight, monkeypatch):
    monkeypatch.setattr("gateway.admission.admit.MAX_SEQUENCES", most)
    chat = [{"role": "user", "content": "x"}]
    for fits in (
        {"prompt": ["a"] * 8, "n": 8},
        {"messages": [chat] * 64},
        {"messages": chat * 65, "n": 64},
        {"prompt": "a" * 65},
    ):
        admitted(Claim(), fits, max_in_flight=max_in_flight)
    for many, param in (
        ({"prompt": ["a"] * 8, "n": 9}, "n"),
        ({"prompt": ["a"] * 33, "n": 2}, "prompt"),
        ({"messages": [chat] * 65}, "messages"),
    ):
        error = refused(admitted, Claim(), many, max_in_flight=max_in_flight)
        assert error.param == param
        assert "more than 64 sequences" in error.message
