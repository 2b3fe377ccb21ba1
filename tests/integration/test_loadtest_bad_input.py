"""What the load test sends as wrong is refused by the gateway as the scenario expects."""

from __future__ import annotations

import json

import pytest

from loadtest.timing import is_clean_error
from loadtest.workloads import Knobs, wrong_asks


async def test_every_wrong_request_gets_its_clean_error(running):
    for ask in wrong_asks(Knobs(model="demo")):
        content = ask.raw if ask.raw is not None else json.dumps(ask.body).encode()
        answer = await running.http.post(ask.path, content=content, headers={"content-type": ask.content_type})
        assert answer.status_code == ask.expect_status, f"{ask.label}: {answer.text}"
        assert is_clean_error(answer.json()), f"{ask.label}: {answer.text}"
    assert running.idle
    assert running.verifier.sequences == []


def test_vllms_benchmark_client_has_the_options_the_documentation_uses(capsys: pytest.CaptureFixture[str]) -> None:
    from loadtest.vllm_bench import main

    with pytest.raises(SystemExit) as left:
        main(["--help=all"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for option in (
        "--base-url",
        "--tokenizer",
        "--random-input-len",
        "--random-output-len",
        "--num-prompts",
        "--max-concurrency",
    ):
        assert option in shown
