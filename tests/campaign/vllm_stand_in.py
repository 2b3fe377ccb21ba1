"""A pytest plugin under which vLLM's endpoint tests meet our gateway instead of vLLM's server.  Runs in pytest's process.

`tests` is vLLM's package here.  Whatever model a test names is the demo model, with a longer context: the working directory
holds it under every name that the selected tests use, and the fleet goes under all of them.  One fleet runs at a time; it is
exchanged where a test's flags need other settings.  Tests that fail for a reason in `vllm_expected.toml`, or for a flag that no
setting of ours answers to, are expected to.
"""

import fnmatch
import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import torch
import vllm.transformers_utils.repo_utils
from safetensors.torch import load_file, save_file

CHANGES: dict[str, dict[str, int]] = {
    "config.json": {"max_position_embeddings": 40960, "vocab_size": 5120},
    "tokenizer_config.json": {"model_max_length": 40960},
    "generation_config.json": {"max_new_tokens": 256},
}
"""In the demo model's files.  It has learned a tenth of this context, and seldom ends by itself."""
CONTEXT = 8192
"""Tokens; what most tests ask for.  Other lengths are not told apart, as each would need a fleet: shorter ones become this one,
longer ones the model's own."""
PADDING = 2
"""The padding's token id."""
OURS = Path(__file__).resolve().parents[2]
EXPECTED: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("vllm_expected.toml").read_text())

SAME_HERE = {
    "--dtype": 1,
    "--enable-auto-tool-choice": 0,
    "--enable-chunked-prefill": 0,
    "--enable-lora": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-tokenizer-info-endpoint": 0,
    "--enforce-eager": 0,
    "--gpu-memory-utilization": 1,
    "--max-cpu-loras": 1,
    "--max-lora-rank": 1,
    "--max-num-seqs": 1,
    "--no-async-scheduling": 0,
    "--port": 1,
    "--served-model-name": 1,
    "--structured-outputs-config.backend": 1,
    "--trust-remote-code": 0,
}
"""Flags of vLLM's server that need nothing: always on, or a matter of size; and how many values follow them."""
SETTINGS = {"--chat-template": "--gateway-chat-template"}
"""Flags that are settings of ours by another name."""
ENGINE = {"--max-logprobs": "max_logprobs", "--max-num-batched-tokens": "max_num_batched_tokens"}
"""Flags that are arguments of a verifier's engine."""
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": ("--verifier-adapters-loadable", "true"),
    "VLLM_ENABLE_RESPONSES_API_STORE": (),
    "VLLM_SERVER_DEV_MODE": (),
    "VLLM_SYSTEM_START_DATE": (),
    "VLLM_WORKER_MULTIPROC_METHOD": (),
}
"""Variables of vLLM's server, and what sets the same here."""
_NAMED = re.compile(r'(?:MODEL\w*|model_name) = "([^"]+)"|(?:RemoteOpenAIServer\(|"--served-model-name",)\s*"([^"]+)"')
"""Where the tests name models."""


def _load(name: str, path: str) -> ModuleType:
    """One of our own test supports, under a name that vLLM's package `tests` does not hide."""
    spec = importlib.util.spec_from_file_location(name, OURS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


utils: Any = importlib.import_module("tests.utils")
"""vLLM's."""
fleet_process: Any = _load("outrider_fleet_process", "tests/support/fleet_process.py")
lora: Any = _load("outrider_lora", "tests/support/lora.py")


class NotOffered(Exception):
    """A flag or variable of vLLM's server that has no setting of ours."""


class Fleet:
    """The one that runs, with the settings that it was started with."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._settings: list[str] | None = None
        self._served: Any = None

    def with_settings(self, settings: list[str]) -> Any:
        """A fleet with these; the one that runs where it has them."""
        if self._settings != settings:
            self.stop()
            print("outrider serve", *settings, flush=True)
            apart = ["--ray-namespace", f"vllm-tests-{os.getpid()}", "--gateway-state-dir", tempfile.mkdtemp(dir=Path.cwd())]
            apart += ["--gateway-served-model-name", ",".join(self.names)]
            pair = ["--model", str(Path("model").resolve()), "--drafter", "ngram"]
            try:
                self._served = fleet_process.ServedFleet(*pair, *apart, *settings)
            except RuntimeError:
                # Ray gives up after half a minute; a second failure is the fixture's, and of all its tests.
                self._served = fleet_process.ServedFleet(*pair, *apart, *settings)
            self._settings = settings
        return self._served

    def stop(self) -> None:
        self._settings = None
        if self._served is not None:
            self._served.stop()
        self._served = None


fleet = Fleet()


class StandIn(utils.RemoteOpenAIServer):
    """`vllm serve` as the tests start it, by a fleet of ours.  Raises `NotOffered`."""

    def __init__(
        self, model: str, vllm_serve_args: Sequence[str], *, env_dict: dict[str, str] | None = None, **wanted: Any
    ) -> None:
        if unknown := {name for name, value in wanted.items() if value} - {"auto_port", "max_wait_seconds", "seed"}:
            raise NotOffered(*unknown)
        self.uds = None
        address = httpx.URL(fleet.with_settings(settings_for(list(map(str, vllm_serve_args)), env_dict or {})).url)
        self.host, self.port = address.host, address.port
        self.show_hidden_metrics = False

    def __exit__(self, *_: object) -> None:
        """The fleet is kept for the next file."""


def settings_for(arguments: list[str], environment: dict[str, str]) -> list[str]:
    """Settings of ours for vLLM's flags and variables.  Raises `NotOffered`."""
    settings: list[str] = []
    context = CONTEXT
    adapters: dict[str, str] = {}
    # A model of Python code indents for ever where JSON may hold space.
    engine: dict[str, Any] = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    flags = [part for each in arguments for part in (each.split("=", 1) if each.startswith("--") else [each])]
    while flags:
        flag = flags.pop(0).replace("_", "-")
        if flag in SAME_HERE:
            del flags[: SAME_HERE[flag]]
        elif flag == "--max-model-len":
            context = CONTEXT if int(flags.pop(0)) <= CONTEXT else CHANGES["config.json"]["max_position_embeddings"]
        elif flag in SETTINGS:
            settings += [SETTINGS[flag], flags.pop(0)]
        elif flag in ("--tool-call-parser", "--reasoning-parser"):
            # The demo model speaks no family's language; by grammar, it calls tools with the parser for all others.
            flags.pop(0)
        elif flag in ENGINE:
            engine[ENGINE[flag]] = int(flags.pop(0))
        elif flag == "--no-enable-prefix-caching":
            engine["enable_prefix_caching"] = False
        elif flag == "--lora-modules":
            while flags and not flags[0].startswith("--"):
                adapters.update(_adapter(flags.pop(0)))
        else:
            raise NotOffered(flag)
    for name in environment:
        if name not in ENVIRONMENT:
            raise NotOffered(name)
        settings += ENVIRONMENT[name]
    if adapters:
        settings += ["--verifier-adapters", json.dumps(adapters)]
    return [*settings, "--verifier-engine-args", json.dumps(engine | {"max_model_len": context})]


def _adapter(text: str) -> dict[str, str]:
    """`name=path`, or the JSON object that vLLM takes besides."""
    if text.startswith("{"):
        adapter = json.loads(text)
        return {adapter["name"]: adapter["path"]}
    name, _, path = text.partition("=")
    return {name: path}


class _Hub:
    """What of the hub's API the tests call: every repository is an adapter for the demo model."""

    def snapshot_download(self, *_: Any, **__: Any) -> str:
        directory = Path("adapter").resolve()
        return str(directory if directory.is_dir() else lora.write_adapter(directory))


utils.RemoteOpenAIServer = StandIn
vllm.transformers_utils.repo_utils.hf_api = _Hub


def pytest_configure(config: pytest.Config) -> None:
    """The demo model, under the names of the files that were asked for."""
    model = Path("model").resolve()
    _make_model(model)
    files = {path for each in config.args for path in (Path(each), Path(each).with_name("conftest.py")) if path.is_file()}
    found = {first or second for file in files for first, second in _NAMED.findall(file.read_text())}
    fleet.names = [*sorted(found), "demo"]
    for name in fleet.names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).symlink_to(model)


def _make_model(directory: Path) -> None:
    """The demo model with what tests take for granted: length, ids of many tokens, and answers that end."""
    shutil.copytree(lora.TARGET_DIR, directory)
    for file, changes in CHANGES.items():
        config = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps(config | changes))
    weights = load_file(directory / "model.safetensors")
    tokens = weights["model.embed_tokens.weight"]
    # The further ids are as unlikely as the padding, which no text has.
    further = tokens[PADDING].expand(CHANGES["config.json"]["vocab_size"] - len(tokens), -1)
    save_file(weights | {"model.embed_tokens.weight": torch.cat((tokens, further))}, directory / "model.safetensors")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs no server; marks what is expected to fail with the first pattern's reason."""
    kept = [item for item in items if _needs_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    patterns = [
        (name.replace("[", "[[]"), f"{cause}: {why}") for cause, tests in EXPECTED.items() for name, why in tests.items()
    ]
    for item in items:
        test = item.nodeid.partition("tests/entrypoints/")[2]
        if reason := next((reason for pattern, reason in patterns if fnmatch.fnmatchcase(test, pattern)), ""):
            item.add_marker(pytest.mark.xfail(reason=reason))


def _needs_server(item: Any) -> bool:
    return any("server" in name or "client" in name for name in item.fixturenames) or "RemoteOpenAIServer" in inspect.getsource(
        item.function
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """What a server flag or variable without a setting of ours fails for is expected, too."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, NotOffered):
        report.outcome, report.wasxfail = "skipped", f"server flag: {call.excinfo.value}"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many failed for which cause."""
    causes = Counter(report.wasxfail.partition(":")[0] for report in terminalreporter.stats.get("xfailed", []))
    terminalreporter.write_line("expected: " + ", ".join(f"{count} {cause}" for cause, count in causes.most_common()))


def pytest_sessionfinish() -> None:
    fleet.stop()
