"""What RL trainers send, while requests run: routes and bodies as SkyRL's and prime-rl's public
sources have them, and vLLM's own."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from backend.models.demo import TARGET_DIR as TARGET
from tests.support.fleet_process import ServedFleet, wait_for
from tests.support.lora import write_adapter
from tests.support.standing import STAND_AT

pytestmark = pytest.mark.engine
RUNNING, LONG, STOOD = 4, 400, 40
BYTES = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def http(fleet: ServedFleet) -> Iterator[httpx.Client]:
    """A connection that stays open: a trainer that makes one call after the other has one gateway process."""
    limits = httpx.Limits(keepalive_expiry=None)
    with httpx.Client(base_url=fleet.url, headers=fleet.headers, timeout=120, limits=limits) as client:
        yield client


@pytest.fixture(autouse=True)
def whole(fleet: ServedFleet, http: httpx.Client) -> None:
    """A test that failed leaves no pause, no lost verifier and no requests that stand to the next."""

    def all_run() -> bool:
        http.post("/resume")
        http.post("/abort_requests", json={})
        return bool(http.get("/get_world_size").json()["world_size"] == 2)

    wait_for(all_run, what="two verifiers run")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with other weights."""
    folder = tmp_path_factory.mktemp("weights") / "step_1"
    shutil.copytree(TARGET, folder)
    tensors = target()
    name = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    tensors[name] = -tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def before(http: httpx.Client) -> list[int]:
    """What the first weights say."""
    return tokens(http)


@pytest.fixture(scope="module")
def after(http: httpx.Client, others: Path, before: list[int]) -> list[int]:
    """What a fleet that knows nothing but the others says: computed by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(others, dtype=torch.bfloat16)
    generated = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    return [int(each) for each in generated[0, 3:]]


def target() -> dict[str, torch.Tensor]:
    return load_file(TARGET / "model.safetensors")


def skyrl_body(length: int, **fields: Any) -> dict[str, Any]:
    """SkyRL's body."""
    sampling = {"max_tokens": length, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    return {"token_ids": [5, 6, 7], "sampling_params": sampling, "cache_salt": "run", **fields}


def generate(http: httpx.Client, length: int = 64, **fields: Any) -> dict[str, Any]:
    answer = http.post("/inference/v1/generate", json=skyrl_body(length, **fields), headers={"X-Session-ID": "episode-1"})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert all(each["logprob"] <= 0 for each in choice["logprobs"]["content"])
    return choice


def tokens(http: httpx.Client) -> list[int]:
    found: list[int] = generate(http)["token_ids"]
    return found


def post(http: httpx.Client, path: str, **options: Any) -> dict[str, Any]:
    answer = http.post(path, **options)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def send(http: httpx.Client, tensors: dict[str, torch.Tensor]) -> None:
    """Some at a time."""
    names = list(tensors)
    for at in range(0, len(names), 5):
        post(http, "/update_weights", content=save({name: tensors[name] for name in names[at : at + 5]}), headers=BYTES)


class Meanwhile:
    """Requests that each verifier has begun, and that stand still until it is paused."""

    def __init__(self, fleet: ServedFleet) -> None:
        self._pool = ThreadPoolExecutor(RUNNING)
        self._begun: list[int] = []
        self._clients = [self._pool.submit(self._ask, fleet, number) for number in range(RUNNING)]
        wait_for(lambda: len(self._begun) == RUNNING or any(each.done() for each in self._clients), what="all have begun")

    def _ask(self, fleet: ServedFleet, number: int) -> dict[str, Any]:
        """The whole answer."""
        body = skyrl_body(LONG, stream=True)
        body["sampling_params"]["extra_args"] = {STAND_AT: STOOD}
        tokens: list[int] = []
        with fleet.http.stream("POST", "/inference/v1/generate", json=body) as streamed:
            for line in streamed.iter_lines():
                if line.startswith("data: {"):
                    choice: dict[str, Any] = json.loads(line[6:])["choices"][0]
                    if not tokens:
                        self._begun.append(number)
                    tokens += choice["token_ids"]
        return {**choice, "token_ids": tokens}

    def choices(self) -> list[dict[str, Any]]:
        """All, when they have ended."""
        self._pool.shutdown(wait=False)
        return [client.result(120) for client in self._clients]


def test_skyrl(fleet: ServedFleet, http: httpx.Client, others: Path, before: list[int], after: list[int]) -> None:
    """Pause and keep, exchange, resume: requests go on under the new weights, and say where."""

    def accepted(version: str) -> bool:
        generate(http)
        return fleet.metric("outrider_accepted_tokens_by_version_total", version=version) > 0

    earlier = http.get("/weight_info").json()["weight_version"]
    wait_for(lambda: accepted(earlier), what="accepted tokens of the earlier version")
    meanwhile = Meanwhile(fleet)
    began = time.monotonic()
    assert post(http, "/pause", params={"mode": "keep", "clear_cache": "false"})["status"] == "paused"
    assert http.get("/is_paused").json() == {"is_paused": True}
    post(http, "/update_weights", json={"weight_dir": str(others), "weight_version": 1})
    assert post(http, "/resume")["status"] == "resumed"
    print(f"pause to resume: {1e3 * (time.monotonic() - began):.0f} ms with {RUNNING} requests")
    generate(http, 1)
    print(f"pause to the first token of a new request: {1e3 * (time.monotonic() - began):.0f} ms")
    choices = meanwhile.choices()
    assert all((choice["finish_reason"], len(choice["token_ids"])) == ("length", LONG) for choice in choices)
    for choice in choices:
        first, second = choice["weight_versions"]
        assert (first["version"], first["start"], second["version"], second["end"]) == (earlier, 0, "1", LONG)
        assert first["end"] == second["start"] > 0
        assert choice["token_ids"][: min(64, first["end"])] == before[: first["end"]]
    assert generate(http)["weight_versions"] == [{"version": "1", "start": 0, "end": 64}]
    assert tokens(http)[:8] == after
    assert tokens(http) != before
    info = http.get("/server_info", params={"config_format": "json"}).json()
    # The demo model is float32; TRL's trainer reads the others.
    assert info["vllm_config"]["model_config"]["dtype"] == "torch.float32"
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert info["vllm_config"]["weight_transfer_config"] is None
    assert {each["weights"]["version"] for each in info["verifiers"].values()} == {info["weight_version"]} == {"1"}
    wait_for(lambda: accepted("1"), what="accepted tokens of the second version")


def test_the_other_calls_of_skyrls_client(fleet: ServedFleet, http: httpx.Client, tmp_path: Path) -> None:
    """Its bodies, also where vLLM reads none; fields that trainers wait for; adapters that replace each other."""
    assert http.request("GET", "/get_world_size", json={}).json()["world_size"] == 2
    for mode in ("wait", "abort", "keep"):
        post(http, "/pause", params={"mode": mode, "clear_cache": "true"})
        post(http, "/resume")

    def stood_still_s() -> float:
        return fleet.metric("outrider_verifier_idle_seconds_total", cause="swap")

    before_s = stood_still_s()
    slept = post(http, "/sleep", json={"level": 2, "tags": ["weights"]}, params={"level": 0, "mode": "keep"})
    assert (slept["status"], slept["level"]) == ("sleeping", 0)
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    wait_for(lambda: stood_still_s() > before_s, what="idle time of cause swap")
    woken = post(http, "/wake_up", json={"tags": ["weights"]})
    assert (woken["status"], woken["tags"]) == ("awake", None)
    assert post(http, "/reset_prefix_cache", json={"reset_running_requests": False})["success"] is True

    base = tokens(http)
    adapters = [write_adapter(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    texts = []
    for adapter in adapters:
        post(http, "/v1/load_lora_adapter", json={"lora_name": "policy", "lora_path": str(adapter), "load_inplace": True})
        texts.append(generate(http, model="policy")["token_ids"])
    assert base != texts[0] != texts[1] != base
    shutil.copytree(adapters[0], adapters[1], dirs_exist_ok=True)
    body = {"lora_name": "policy", "lora_path": str(adapters[1])}
    refused = http.post("/v1/load_lora_adapter", json=body)
    assert (refused.status_code, "already been loaded" in refused.text) == (400, True)
    post(http, "/v1/load_lora_adapter", json={**body, "load_inplace": True})
    assert generate(http, model="policy")["token_ids"] == texts[0], "the directory has another adapter now"
    post(http, "/v1/unload_lora_adapter", json={"lora_name": "policy"})
    assert tokens(http) == base
    write_adapter(adapters[1], seed=2)
    post(http, "/v1/load_lora_adapter", json=body)
    assert generate(http, model="policy")["token_ids"] == texts[1], "verifiers had the unloaded one by its name and directory"
    post(http, "/v1/unload_lora_adapter", json={"lora_name": "policy"})


def test_tensors_in_parts_while_requests_run(fleet: ServedFleet, http: httpx.Client, before: list[int]) -> None:
    """vLLM's four calls, with safetensors' bytes as what they bring."""
    meanwhile = Meanwhile(fleet)
    post(http, "/init_weight_transfer_engine", json={"init_info": {}})
    post(http, "/start_weight_update", json={"is_checkpoint_format": True})
    send(http, target())
    assert http.post("/update_weights", json={"update_info": {"names": []}}).status_code == 400, "it goes on"
    refused = http.post("/update_weights", content=b"nothing", headers=BYTES)
    assert (refused.status_code, "safetensors" in refused.text) == (400, True)
    assert http.post("/resume").status_code == 400, "half a model must not answer"
    post(http, "/finish_weight_update", json={"weight_version": "two"})
    versions = [[each["version"] for each in choice["weight_versions"]] for choice in meanwhile.choices()]
    assert versions == [["1", "two"]] * RUNNING
    assert tokens(http) == before


def test_prime_rl(http: httpx.Client, others: Path, before: list[int], after: list[int], tmp_path: Path) -> None:
    """Text and tokens by chat; a directory; one verifier at a time where it is named."""
    assert http.get("/liveness").status_code == 200
    chat = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "return_token_ids": True}
    answer = post(http, "/v1/chat/completions", json={**chat, "logprobs": True, "temperature": 1.0})
    assert len(answer["choices"][0]["token_ids"]) == 8
    assert answer["prompt_token_ids"]
    assert "demo" in [each["id"] for each in http.get("/v1/models").json()["data"]]
    assert http.get("/health").status_code == 200
    top = {"logprobs": 3, "flat_logprobs": True, "detokenize": False, "skip_special_tokens": False, "stop_token_ids": [2]}
    sampling = {**top, "max_tokens": 8, "extra_args": {"prl_compact_logprobs": True}}
    (choice,) = post(http, "/inference/v1/generate", json={"token_ids": [5, 6, 7], "sampling_params": sampling})["choices"]
    for entry in choice["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 3
        assert entry["rank"] > 3 or entry["token_id"] in [each["token_id"] for each in entry["top_logprobs"]]
    assert http.post("/init_broadcaster", json={"host": "trainer", "port": 1}).status_code == 404, "its client goes on then"
    post(http, "/pause", params={"mode": "keep", "clear_cache": "false"})
    third = post(http, "/update_weights", json={"weight_dir": str(others), "skip_prefix_cache_reset": True})["weight_version"]
    post(http, "/resume")
    assert http.get("/weight_info").json()["weight_version"] == third
    assert third.isdigit()
    assert tokens(http)[:8] == after
    first = {"weight_dir": str(TARGET), "weight_version": "a"}
    one = post(http, "/update_weights", params={"verifier": "verifier-1"}, json=first)
    assert one["verifiers"].keys() == {"verifier-1"}
    assert http.get("/weight_info").json()["verifiers"] == {"verifier-0": third, "verifier-1": "a"}
    post(http, "/update_weights", json={"weight_dir": str(TARGET)})
    assert tokens(http) == before
    missing = http.post("/update_weights", json={"weight_dir": "/nowhere"})
    assert (missing.status_code, "no such directory" in missing.text) == (400, True)
    texts = []
    for seed in (1, 2):
        adapter = write_adapter(tmp_path / "adapter", seed=seed)
        post(http, "/load_lora_adapter", json={"lora_name": "policy", "lora_path": str(adapter)})
        texts.append(generate(http, model="policy")["token_ids"])
    assert before != texts[0] != texts[1] != before
    post(http, "/v1/unload_lora_adapter", json={"lora_name": "policy"})
    missing = http.post("/load_lora_adapter", json={"lora_name": "policy", "lora_path": "/nowhere"})
    assert missing.status_code == 404


def test_after_an_update_that_fails_everywhere_the_fleet_serves(http: httpx.Client, before: list[int]) -> None:
    """Tensors cannot be loaded again: the verifiers go back to the last weights from a directory, and so does the fleet."""
    post(http, "/update_weights", json={"weight_dir": str(TARGET), "weight_version": "disk"})
    post(http, "/start_weight_update")
    send(http, target())
    post(http, "/finish_weight_update", json={"weight_version": "wire"})
    # Layers of which a part has come are the hard case: vLLM keeps that part for whatever is loaded next.
    for part in ("q_proj", "k_proj", "down_proj"):
        post(http, "/start_weight_update")
        send(http, {name: -tensor for name, tensor in target().items() if part in name})
        incomplete = http.post("/finish_weight_update")
        assert (incomplete.status_code, "tensors did not come" in incomplete.text) == (400, True)
        assert tokens(http) == before
    versions = {f"verifier-{i}": "disk" for i in (0, 1)}
    assert http.get("/weight_info").json() == {"weight_version": "disk", "verifiers": versions}
    changed = ("q_proj", "down_proj")
    post(http, "/start_weight_update")
    send(http, {name: -tensor if any(each in name for each in changed) else tensor for name, tensor in target().items()})
    post(http, "/finish_weight_update")
    assert tokens(http) != before
    post(http, "/start_weight_update")
    send(http, target())
    post(http, "/finish_weight_update")
    assert tokens(http) == before


def test_requests_end_wait_or_are_waited_for(fleet: ServedFleet, http: httpx.Client) -> None:
    meanwhile = Meanwhile(fleet)
    aborted = post(http, "/abort_requests", json={})
    ended = [choice for choice in meanwhile.choices() if choice["finish_reason"] == "abort"]
    assert len(ended) == aborted["aborted"] == RUNNING
    assert sorted(len(each) for (each,) in aborted["token_ids"].values()) == sorted(len(c["token_ids"]) for c in ended)

    meanwhile = Meanwhile(fleet)
    post(http, "/pause", params={"mode": "abort"})
    assert [choice["finish_reason"] for choice in meanwhile.choices()] == ["abort"] * RUNNING
    post(http, "/resume")

    meanwhile = Meanwhile(fleet)
    post(http, "/pause", params={"mode": "wait"})
    assert http.get("/is_paused").json() == {"is_paused": True}
    post(http, "/resume")
    assert {choice["finish_reason"] for choice in meanwhile.choices()} == {"length"}


@pytest.mark.campaign
def test_a_verifier_that_is_started_anew_gets_the_newest_weights(
    fleet: ServedFleet, http: httpx.Client, others: Path, after: list[int]
) -> None:
    post(http, "/update_weights", json={"weight_dir": str(others), "weight_version": "last"})
    (pid,) = [each["pid"] for each in http.get("/fleet").json()["verifiers"] if each["id"] == "verifier-0"]
    os.kill(pid, signal.SIGKILL)

    def renewed() -> bool:
        found = http.get("/server_info").json()["verifiers"].get("verifier-0")
        if found is None:
            return False
        assert generate(http, 8)["token_ids"] == after
        return bool(found["weights"]["version"] == "last")

    wait_for(lambda: "verifier-0" not in http.get("/server_info").json()["verifiers"], what="it is gone")
    assert generate(http, 8)["token_ids"] == after
    wait_for(renewed, what="it has come back with them")
    assert tokens(http)[:8] == after
