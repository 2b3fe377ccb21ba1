"""vLLM's own benchmark client finds here all that it asks a server for: the model, streams, and acceptance from /metrics."""

from __future__ import annotations

import aiohttp
import pytest
from vllm.benchmarks.lib.endpoint_request_func import (
    RequestFuncInput,
    async_request_openai_chat_completions,
    async_request_openai_completions,
)
from vllm.benchmarks.serve import fetch_spec_decode_metrics, get_first_model_from_server

from backend.fleet import DraftCounters, VerifierStats
from loadtest.vllm_bench import main
from tests.support.fake_verifier import eventually
from tests.support.running_gateway import running_gateway


async def test_model_streams_and_acceptance_with_a_key_and_without(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k3y")
    headers = {"authorization": "Bearer k3y"}
    async with running_gateway(api_key="k3y", served_model_name="org/model") as running, aiohttp.ClientSession() as session:
        url = running.server.url
        assert await get_first_model_from_server(url, headers) == ("org/model", "org/model")
        for path, ask in (
            ("completions", async_request_openai_completions),
            ("chat/completions", async_request_openai_chat_completions),
        ):
            asked = RequestFuncInput("def f(", f"{url}/v1/{path}", 4, 6, "org/model", ignore_eos=True)
            answer = await ask(asked, session)
            assert answer.success, answer.error
            assert answer.output_tokens == 6
            assert answer.ttft > 0
        counted = DraftCounters(10, 40, 15, drafted_by_position=[10] * 4, accepted_by_position=[10, 5, 0, 0])
        running.verifier.publish(VerifierStats("verifier-0", 1.0, "sync", 4, drafters={"drafter-0": counted}))
        await eventually(lambda: bool(running.core.stats()))
        # It has no key for /metrics.
        before = await fetch_spec_decode_metrics(url, session)
        assert (before.num_drafts, before.num_draft_tokens, before.num_accepted_tokens) == (10, 40, 15)
        assert before.accepted_per_pos == {0: 10, 1: 5, 2: 0, 3: 0}


def test_it_has_the_options_that_the_documentation_uses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help=all"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    options = ("base-url", "tokenizer", "random-input-len", "random-output-len", "num-prompts", "max-concurrency")
    assert [each for each in options if f"--{each}" not in shown] == []
