"""What a request may ask of speculation, and which field is named where it may not."""

from types import SimpleNamespace
from typing import Any

import pytest

from backend.config import Settings
from gateway.fleet.statistics import SpeculationOptions
from gateway.http.errors import BadRequest
from gateway.requests.options import read_options

ROWS = [
    ({"outrider": 5}, "outrider"),
    ({"outrider": {"state": True}}, "outrider"),
    ({"outrider": {"stats": 1}}, "outrider.stats"),
    ({"outrider": {"mode": "ahead"}}, "outrider.mode"),
    ({"outrider": {"mode": ["off"]}}, "outrider.mode"),
    ({"outrider": {"num_speculative_tokens": -1}}, "outrider.num_speculative_tokens"),
    ({"outrider": {"num_speculative_tokens": True}}, "outrider.num_speculative_tokens"),
    ({"outrider": {"num_speculative_tokens": 9}}, "outrider.num_speculative_tokens"),
    ({"outrider": {"logprobs_mode": "raw_logprobs"}}, "outrider.logprobs_mode"),
    ({"outrider": {"logprobs_mode": ["raw"]}}, "outrider.logprobs_mode"),
    ({"prediction": "x"}, "prediction"),
    ({"prediction": {"type": "text", "content": "x"}}, "prediction"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": [{"type": "image", "text": "x"}]}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": [{"type": "text", "text": None}]}}, "prediction.content"),
    ({"outrider": {"stats": True}, "use_beam_search": True}, "use_beam_search"),
]


async def options_of(body: dict[str, Any], mode: str = "sync", **headers: str) -> SpeculationOptions | None:
    settings = Settings.model_validate({"mode": mode})
    gateway: Any = SimpleNamespace(settings=settings)
    request: Any = SimpleNamespace(headers={name.replace("_", "-"): value for name, value in headers.items()})
    return await read_options(gateway, request, body)


@pytest.mark.parametrize(
    ("mode", "body", "param"),
    [
        *(("sync", *row) for row in ROWS),
        ("native", {"outrider": {"mode": "off"}}, "outrider.mode"),
        ("native", {"outrider": {"num_speculative_tokens": 1}}, "outrider.num_speculative_tokens"),
        ("native", {"outrider": {"logprobs_mode": "processed"}}, "outrider.logprobs_mode"),
        ("off", {"outrider": {"mode": "sync"}}, "outrider.mode"),
        ("off", {"outrider": {"num_speculative_tokens": 0}}, "outrider.num_speculative_tokens"),
        ("ahead", {"outrider": {"mode": "native"}}, "outrider.mode"),
    ],
)
async def test_what_is_wrong_or_cannot_be_done_in_this_fleet_is_named(mode, body, param):
    with pytest.raises(BadRequest) as caught:
        await options_of(body, mode)
    assert caught.value.param == param


async def test_the_header_asks_and_the_field_decides():
    for body, header, wanted in (({}, "1", True), ({}, "0", False), ({"outrider": {"stats": False}}, "1", False)):
        speculation = await options_of(body, x_outrider_stats=header)
        assert (speculation is not None and speculation.stats) is wanted
    with pytest.raises(BadRequest) as caught:
        await options_of({}, x_outrider_stats="yes")
    assert caught.value.param == "x-outrider-stats"
