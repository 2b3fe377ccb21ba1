"""`outrider run-batch`, against a gateway in front of a fake verifier."""

import asyncio
import json

import pytest

from backend.config.sources import CommandError, ConfigError
from outrider import run_batch
from outrider.run_batch import carry_out
from tests.integration.test_gateway_batches import TEXTS, jsonl, request
from tests.support.fake_verifier import count_up, eventually, silence
from tests.support.running_gateway import CHAT, COMPLETION, running_gateway


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def lines_by_id(path):
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


async def test_every_line_is_answered_once_the_gateway_has_room(files, monkeypatch):
    monkeypatch.setattr(run_batch, "RETRY_S", (0.01, 0.1))
    source, target = files
    bad = {**CHAT, "temperature": -1}
    texts = (request(f"t{n}", COMPLETION, TEXTS) for n in range(5))
    source.write_bytes(jsonl(*(request(f"c{n}") for n in range(5)), *texts, request("bad", bad), request("no", url="/v1/no")))
    reported: list[str] = []
    async with running_gateway(api_key="k3y", max_in_flight=1) as running:
        assert await carry_out(running.server.url, "k3y", source, target, 4, reported.append) == 2
        assert reported == ["12 requests, 2 of them failed"]
        answers = lines_by_id(target)
        assert len(answers) == 12
        assert len(target.read_text().splitlines()) == 12
        assert answers["c0"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
        assert answers["t0"]["response"]["body"]["object"] == "text_completion"
        assert {name: each["response"]["status_code"] for name, each in answers.items() if name in ("bad", "no")} == {
            "bad": 400,
            "no": 404,
        }
        with pytest.raises(CommandError, match="--api-key"):
            await carry_out(running.server.url, None, source, target, 4, reported.append)


async def test_a_proxy_for_the_world_outside_is_not_asked(running, files, monkeypatch):
    for variable in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    source, target = files
    source.write_bytes(jsonl(request("a")))
    assert await carry_out(running.server.url, None, source, target, 1, print) == 0


async def test_it_goes_on_where_it_ended(running, files):
    source, target = files
    source.write_bytes(jsonl(*(request(f"c{n}") for n in range(6))))

    async def few(verifier, sequence):
        await (count_up if verifier.sequences.index(sequence) < 3 else silence)(verifier, sequence)

    running.verifier.behaviour = few
    url = running.server.url
    first = asyncio.create_task(carry_out(url, None, source, target, 2, lambda line: None))
    await eventually(lambda: target.exists() and len(target.read_text().splitlines()) == 3)
    # Both workers wait for an answer now: no request arrives after the count below.
    await eventually(lambda: len(running.verifier.sequences) == 5)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    with target.open("ab") as file:
        file.write(jsonl({"custom_id": "c4", "response": None, "error": {}}) + b'{"custom_id": "c5", "resp')
    running.verifier.behaviour = count_up
    before = len(running.verifier.sequences)
    assert await carry_out(url, None, source, target, 2, lambda line: None) == 0
    assert lines_by_id(target).keys() == {f"c{n}" for n in range(6)}
    assert len(target.read_text().splitlines()) == 6
    assert len(running.verifier.sequences) == before + 3
    # A third time there is nothing to do.
    assert await carry_out(url, None, source, target, 2, lambda line: None) == 0
    assert len(running.verifier.sequences) == before + 3


async def test_wrong_files_are_told_before_anything_is_sent(files):
    source, target = files
    url = "http://127.0.0.1:9"
    with pytest.raises(CommandError, match=r"in\.jsonl: No such file"):
        await carry_out(url, None, source, target, 2, print)
    source.write_bytes(jsonl(request("a"), b"{", request("a"), request("b", url="/metrics")))
    with pytest.raises(CommandError, match=r"in\.jsonl:2: .*; .*in\.jsonl:3: .*; .*in\.jsonl:4: "):
        await carry_out(url, None, source, target, 2, print)
    source.write_bytes(jsonl(request("a")))
    target.write_bytes(jsonl({"custom_id": "other", "response": {}}))
    with pytest.raises(CommandError, match="other requests"):
        await carry_out(url, None, source, target, 2, print)
    target.write_text("my notes\n")
    with pytest.raises(CommandError, match="no output"):
        await carry_out(url, None, source, target, 2, print)
    assert target.read_text() == "my notes\n"
    target.unlink()
    with pytest.raises(CommandError, match="no gateway answers"):
        await carry_out(url, None, source, target, 2, print)


async def test_it_gives_up_on_a_gateway_that_is_gone(files, monkeypatch):
    monkeypatch.setattr(run_batch, "PATIENCE_S", 0.5)
    monkeypatch.setattr(run_batch, "RETRY_S", (0.01, 0.1))
    source, target = files
    source.write_bytes(jsonl(request("a")))
    async with running_gateway() as running:
        running.verifier.behaviour = silence
        work = asyncio.create_task(carry_out(running.server.url, None, source, target, 1, print))
        await eventually(lambda: bool(running.verifier.sequences))
        running.server.stop()
        running.server.stop()
        with pytest.raises(CommandError, match="run this again"):
            await work
    assert target.read_bytes() == b""


@pytest.mark.parametrize(
    "arguments",
    [
        ["-i", "a", "-o", "b", "--url", "host:1"],
        ["-i", "a", "-o", "b", "--url", "http://x", "--concurrency", "0"],
        ["-i", "a", "-o", "b", "--url", "http://x", "--nonsense", "1"],
    ],
)
def test_wrong_arguments(arguments):
    with pytest.raises(ConfigError):
        run_batch.main(arguments, print)
