"""Settings: who wins, and what an error says."""

from pathlib import Path
from typing import Any, get_args

import hypothesis.strategies as st
import pytest
from hypothesis import given

from backend.config import Settings
from backend.config.settings import Mode
from backend.config.sources import ALIASES, ConfigError, flag, leaves, load, merge, read_variables, variable


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    return str(file)


def refusal(*arguments: str) -> str:
    """The line that says what is wrong."""
    with pytest.raises(ConfigError) as error:
        load(arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_each_source_beats_the_next_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "gateway: {port: 1, max_in_flight: 2, host: file}\nverifiers: 3\n")
    monkeypatch.setenv("OUTRIDER_GATEWAY__PORT", "10")
    monkeypatch.setenv("OUTRIDER_GATEWAY__MAX_IN_FLIGHT", "20")
    loaded = load(["--config", file, "--gateway-port", "100"])
    settings, gateway = loaded.settings, loaded.settings.gateway
    assert (gateway.port, gateway.max_in_flight, gateway.host, settings.verifiers) == (100, 20, "file", 3)
    assert settings.drafters == Settings().drafters
    assert loaded.origins == {
        ("gateway", "port"): "--gateway-port",
        ("gateway", "max_in_flight"): "OUTRIDER_GATEWAY__MAX_IN_FLIGHT",
        ("gateway", "host"): f"{file}: gateway.host",
        ("verifiers",): f"{file}: verifiers",
    }


def test_values_of_every_shape_short_flags_and_a_file_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_VERIFIER__ENGINE_ARGS", '{"block_size": 32}')
    monkeypatch.setenv("OUTRIDER_CONFIG", write(tmp_path, "verifiers: 2\nverifier: {lookup: true}"))
    settings = load(["--verifier-adapters-loadable", "--drafting-gpus", "none", "--verifier-lookup", "false"]).settings
    assert (settings.verifiers, settings.drafting.gpus) == (2, None)
    verifier = settings.verifier
    assert (verifier.adapters_loadable, verifier.lookup, verifier.engine_args) == (True, False, {"block_size": 32})
    gateway = load(["--host", "::1", "--port=0", "--api-key", "k", "--gateway-drain-s", "2.5"]).settings.gateway
    assert (gateway.host, gateway.port, gateway.api_key, gateway.drain_s) == ("::1", 0, "k", 2.5)
    assert set(ALIASES.values()) <= {path for path, _ in leaves()}
    assert load(["--config", write(tmp_path, "verifiers: 4")]).settings.verifiers == 4


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--gateway-por", "1"], "unknown flag --gateway-por; did you mean --gateway-port?"),
        (["--prot=1"], "unknown flag --prot; did you mean --port?"),
        (["serve-me"], "unexpected argument 'serve-me': settings are given as --name value"),
        (["--port"], "argument --port/--gateway-port: expected one argument"),
        (["--port", "70000"], "--gateway-port: input should be less than or equal to 65535, not '70000'"),
        (["--gateway-queue-wait-s", "inf"], "--gateway-queue-wait-s: input should be a finite number, not 'inf'"),
        (["--mode", "fast"], "--mode: input should be 'off', 'native', 'sync', 'ahead' or 'auto', not 'fast'"),
        (["--verifier-engine-args", "{"], "--verifier-engine-args: expected JSON"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file"),
        (["GATEWAY_PORT=1"], "unknown environment variable OUTRIDER_GATEWAY_PORT; did you mean OUTRIDER_GATEWAY__PORT?"),
        (["DRAFTING__GPUS=1.5"], "OUTRIDER_DRAFTING__GPUS: value error, beyond 1 it must be whole, not '1.5'"),
    ],
)
def test_a_wrong_flag_or_variable_is_one_line(monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str) -> None:
    if arguments[0].isupper():
        name, _, value = arguments.pop().partition("=")
        monkeypatch.setenv(f"OUTRIDER_{name}", value)
    assert refusal(*arguments).startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("gateway: {prot: 1}", "unknown key gateway.prot; did you mean gateway.port?"),
        ("gatway: {port: 1}", "unknown key gatway; did you mean gateway?"),
        ("gateway: 3", "gateway: expected a mapping of settings"),
        ("- 1", "expected a mapping of settings"),
        ("a: [", "not YAML"),
        ("gateway:\n  api_key: hush\n  port: 1\n  api_key: hush", "not YAML: api_key is there twice (line 4)"),
        ("mode: !!int x", "not YAML: invalid literal for int"),
        ("mode: 2026-02-31", "mode: input should be "),
        ("verifier: {engine_args: 3}", "verifier.engine_args: input should be a valid dictionary, not 3"),
        ("verifier: {engine_args: {max_num_seqs: 9}}", "value error, max_num_seqs is the setting verifier.max_num_seqs"),
        ("gateway: {api_key: [hush]}", "gateway.api_key: input should be a valid string"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    file = write(tmp_path, text)
    error = refusal("--config", file)
    assert line in error
    assert file in error
    assert "hush" not in error


@given(st.sampled_from([(p, i) for p, i in leaves() if i.get_default(call_default_factory=True) not in (None, {})]))
def test_every_default_survives_the_environment(leaf: Any) -> None:
    path, info = leaf
    default = info.get_default(call_default_factory=True)
    assert merge([read_variables({variable(path): str(default)})]).settings == Settings()


def test_every_mode_may_be_written_bare_in_a_file(tmp_path: Path) -> None:
    """YAML takes `off` for false."""
    for mode in get_args(Mode):
        assert load(["--config", write(tmp_path, f"mode: {mode}")]).settings.mode == mode


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(flag(path) in text for path, _ in leaves())


def test_a_secret_is_read_from_the_file_it_names(tmp_path):
    key = tmp_path / "key"
    file = write(tmp_path, f"gateway: {{api_key: '@{key}'}}")
    for arguments in (["--api-key", f"@{key}"], ["--config", file]):
        for text in ("s3cret", "none"):
            key.write_text(f"{text}\n")
            assert load(arguments, "test").settings.gateway.api_key == text
        key.write_text("\n")
        assert refusal(*arguments).endswith(f": {key} is empty"), "without a key, the gateway would be open to all"
    with pytest.raises(ConfigError, match="cannot be read"):
        load(["--gateway-admin-key", f"@{tmp_path}/none"], "test")
    assert load(["--gateway-served-model-name", "@x"], "test").settings.gateway.served_model_name == ["@x"]
