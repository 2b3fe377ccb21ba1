"""Keys from a file, over HTTP: what each may use, what is counted, who administers, what is logged of that."""

import asyncio
import json
import logging
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backend.config import Settings
from backend.config.settings import GatewaySettings
from backend.config.sources import CommandError
from gateway.cli.reload import reload
from tests.support.fake_verifier import eventually, gated
from tests.support.running_gateway import CHAT, COMPLETION, Keys, refusal, running_gateway


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path)


async def test_a_key_opens_its_models_and_no_others(keys):
    free, other = keys.put("free"), keys.put("other", models=["mine"])
    async with running_gateway(keys_file=str(keys.file)) as running:
        http = running.http
        for headers, status in ({}, 401), ({"authorization": "Bearer or-x"}, 401), (free, 200):
            assert (await http.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == status
        assert (await http.get("/nowhere")).status_code == 401
        key = {"x-api-key": free["authorization"].removeprefix("Bearer ")}
        assert (await http.post("/v1/completions", json=COMPLETION, headers=key)).status_code == 200
        assert [each["id"] for each in (await http.get("/v1/models", headers=free)).json()["data"]] == ["demo"]
        assert (await http.get("/v1/models", headers=other)).json()["data"] == []
        assert (await http.get("/v1/models/demo", headers=other)).status_code == 404
        without = {name: value for name, value in CHAT.items() if name != "model"}
        for path, body in (
            ("/v1/completions", COMPLETION),
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions", without),
            ("/v1/responses", {"model": "demo", "input": "x"}),
            ("/v1/messages", CHAT),
            ("/v1/messages/count_tokens", {"model": "demo", "messages": CHAT["messages"]}),
            ("/v1/responses/input_tokens", {"model": "demo", "input": "x"}),
            ("/tokenize", {"model": "demo", "prompt": "x"}),
            ("/detokenize", {"model": "demo", "tokens": [5]}),
        ):
            refused = await http.post(path, json=body, headers=other)
            assert refused.status_code == 404, path
            if "messages" not in path:
                assert refused.json()["error"]["code"] == "model_not_found", path
        assert len(running.verifier.sequences) == 2


@pytest.fixture
def stopped_clock(monkeypatch):
    """No time passes for quotas."""
    monkeypatch.setattr("gateway.auth.quotas.time", SimpleNamespace(monotonic=lambda: 1000.0, time=time.time))


async def test_requests_tokens_and_requests_at_once_are_counted_and_refused_as_openai_does(keys, stopped_clock):
    mine, other = keys.put("mine", requests_per_minute=3), keys.put("other")
    tokens, once = keys.put("tokens", tokens_per_minute=300), keys.put("once", concurrent_requests=1)
    async with running_gateway(keys_file=str(keys.file)) as running:
        left = []
        for _ in range(3):
            answer = await running.http.post("/v1/completions", json=COMPLETION, headers=mine)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            left.append(answer.headers["x-ratelimit-remaining-requests"])
        assert left == ["2", "1", "0"]
        refused = await running.http.post("/v1/completions", json=COMPLETION, headers=mine)
        assert refusal(refused) == (429, "rate_limit_exceeded")
        assert refused.json()["error"]["type"] == "requests"
        assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("20", "20000")
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        # What is only looked up is free, and so are others.
        assert (await running.http.get("/v1/models", headers=mine)).status_code == 200
        answer = await running.http.post("/v1/completions", json=COMPLETION, headers=other)
        assert answer.status_code == 200
        assert "x-ratelimit-limit-requests" not in answer.headers

        # Tokens are estimated first and corrected in the end.
        gate = asyncio.Event()
        running.verifier.behaviour = gated(gate)
        ask = {**COMPLETION, "max_tokens": 200}
        first = [running.begin(headers=key, max_tokens=200) for key in (tokens, once)]
        await eventually(lambda: len(running.core.sequences) == 2)
        for key, kind in ((tokens, "tokens"), (once, "rate_limit_error")):
            refused = await running.http.post("/v1/completions", json=ask, headers=key)
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, kind)
        gate.set()
        usage, _ = [(await each).json()["usage"] for each in first]
        assert (await running.http.post("/v1/completions", json=ask, headers=once)).status_code == 200
        refused = await running.http.post("/v1/completions", json={**ask, "max_tokens": 100_000, "n": 2}, headers=tokens)
        assert refused.status_code == 429
        assert refused.headers["x-should-retry"] == "false"
        answer = await running.http.get("/v1/models", headers=tokens)
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) == 300 - usage["total_tokens"]


async def test_rights_and_the_log_of_what_administrators_did(keys, caplog):
    caplog.set_level(logging.INFO, "outrider.audit")
    plain, admin = keys.put("plain"), keys.put("boss", rights=["admin"])
    async with running_gateway(keys_file=str(keys.file)) as running:
        http = running.http
        assert (await http.post("/sleep", json={})).status_code == 401
        assert (await http.post("/sleep", json={}, headers=plain)).status_code == 403
        assert (await http.post("/sleep", params={"level": 1}, headers=admin)).status_code == 200
        assert (await http.post("/admin/nonsense", json={}, headers=admin)).status_code == 404
        for path in ("/metrics%0A", "/livez%0D", "/sleep%1B%5B2K", "/v1/completions%C2%85"):
            assert refusal(await http.post(path, json=COMPLETION, headers=plain)) == (400, "invalid_url")
        # A number longer than Python converts.
        assert (await http.get(f"/admin/operations/{'9' * 5000}")).status_code == 401
        assert (await http.get(f"/admin/operations/{'9' * 5000}", headers=admin)).status_code == 400
    logged = [each.fields for each in caplog.records if each.name == "outrider.audit"]
    assert [(each["by"], each["what"], each["status"]) for each in logged] == [
        ("nobody", "POST /sleep", 401),
        ("plain", "POST /sleep", 403),
        ("boss", "POST /sleep?level=1", 200),
        ("boss", "POST /admin/nonsense", 404),
    ]
    assert "or-" not in caplog.text


async def test_gateways_of_one_host_share_counts(keys, tmp_path):
    mine = keys.put("mine", requests_per_minute=3)
    shared: dict[str, Any] = {"keys_file": str(keys.file), "state_dir": str(tmp_path / "state")}
    async with running_gateway(**shared) as first:
        for _ in range(2):
            assert (await first.http.post("/v1/completions", json=COMPLETION, headers=mine)).status_code == 200
        async with running_gateway(**shared) as second:
            # The first one tells it after a moment.
            while int((await second.http.get("/v1/models", headers=mine)).headers["x-ratelimit-remaining-requests"]) > 1:
                await asyncio.sleep(0.02)
            assert (await second.http.post("/v1/completions", json=COMPLETION, headers=mine)).status_code == 200
            assert (await second.http.post("/v1/completions", json=COMPLETION, headers=mine)).status_code == 429


def signed(folder: Path, name: str, by: str | None = None) -> Path:
    """The private key, the certificate and its issuer's, in one file.  The name is no name of this machine."""
    key, cert, file = (folder / f"{name}.{kind}" for kind in ("key", "cert", "pem"))
    issuer: list[str | Path] = [] if by is None else ["-CA", folder / f"{by}.cert", "-CAkey", folder / f"{by}.key"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", f"/CN={name}.example", "-keyout", key, "-out", cert, *issuer],
        check=True, capture_output=True,
    )  # fmt: skip
    chain = [key, cert, *([] if by is None else [folder / f"{by}.cert"])]
    file.write_text("".join(each.read_text() for each in chain))
    return file


async def test_https_and_a_reload_that_trusts_the_certificate_in_its_settings_and_no_other(tmp_path):
    signed(tmp_path, "authority")
    own, other, alone = (signed(tmp_path, *names) for names in (("own", "authority"), ("other", "authority"), ("alone",)))
    for file in (own, alone):
        async with running_gateway(tls_cert=str(file), read_settings=Settings) as running:
            assert running.server.url.startswith("https://")
            settings = GatewaySettings(tls_cert=str(file))
            (line, *_) = await asyncio.to_thread(reload, running.server.url, settings)
            assert line.startswith("0 keys")
            for wrong in (str(other), None):
                with pytest.raises(CommandError, match="CERTIFICATE_VERIFY_FAILED"):
                    await asyncio.to_thread(reload, running.server.url, GatewaySettings(tls_cert=wrong))
    cert, key = (str(tmp_path / f"alone.{kind}") for kind in ("cert", "key"))
    async with running_gateway(tls_cert=cert, tls_key=key) as running:
        assert (await running.http.get("/livez")).status_code == 200


async def test_files_batches_and_responses_belong_to_a_key_and_have_its_rights(keys):
    free, other = keys.put("free"), keys.put("other", models=["mine"])
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": COMPLETION})
    async with running_gateway(keys_file=str(keys.file)) as running:
        http, batches = running.http, {}
        for name, key in (("free", free), ("other", other)):
            content, form = {"file": ("in.jsonl", line.encode())}, {"purpose": "batch"}
            file = (await http.post("/v1/files", files=content, data=form, headers=key)).json()["id"]
            fields = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
            batches[name] = (await http.post("/v1/batches", json=fields, headers=key)).json()
        response = (await http.post("/v1/responses", json={"model": "demo", "input": "x"}, headers=free)).json()
        assert (await http.get(f"/v1/responses/{response['id']}", headers=free)).status_code == 200
        assert (await http.get(f"/v1/responses/{response['id']}", headers=other)).status_code == 404
        theirs = batches["other"]
        for path in (f"/v1/files/{theirs['input_file_id']}", f"/v1/batches/{theirs['id']}"):
            assert (await http.get(path, headers=free)).status_code == 404
            assert (await http.get(path, headers=other)).status_code == 200
        for path in ("/v1/files", "/v1/batches"):
            assert theirs["id"] not in (await http.get(path, headers=free)).text
        assert (await http.post(f"/v1/batches/{theirs['id']}/cancel", headers=free)).status_code == 404
        stolen = {"input_file_id": theirs["input_file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await http.post("/v1/batches", json=stolen, headers=free)).status_code == 404

        async def ended(name, key):
            while True:
                batch = (await http.get(f"/v1/batches/{batches[name]['id']}", headers=key)).json()
                if batch["status"] == "completed":
                    return batch
                await asyncio.sleep(0.02)

        assert (await ended("free", free))["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        refused = await ended("other", other)
        assert refused["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
        answer = (await http.get(f"/v1/files/{refused['error_file_id']}/content", headers=other)).json()
        assert answer["response"]["body"]["error"]["code"] == "model_not_found"
