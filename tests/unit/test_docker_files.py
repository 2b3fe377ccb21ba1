"""The container files, without an engine to build them: every path, flag, variable, port and endpoint is real."""

import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pathspec
import pytest
import ray.scripts.scripts
import yaml

from backend.config import sources
from gateway.auth.rights import Right
from gateway.routes import operations
from tests.support.rights import paths

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
OPEN_PATHS = paths(operations.router.routes, Right.NOTHING, Right.METRICS)
SCRIPT = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text()))
STAGES = {part.partition("\n")[0].partition(" AS ")[2]: part for part in SCRIPT.split("\nFROM ")[1:]}
"""The Dockerfile's stages by name."""
SECRETS = {"RAY_TOKEN": "t", "GRAFANA_PASSWORD": "p"}
KUBERNETES = list(yaml.safe_load_all((DOCKER / "kuberay.yaml").read_text()))
(CLUSTER,) = [each for each in KUBERNETES if each["kind"] == "RayCluster"]
GROUPS = (CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"])
PODS = [group["template"]["spec"] for group in GROUPS]
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+(-[\w.-]+)?")


def lines(instruction: str, *stages: str) -> list[str]:
    """What follows an instruction, in the order of the stages; of all stages if none is named."""
    return [each for stage in stages or STAGES for each in re.findall(rf"^{instruction} (.*)$", STAGES[stage], re.MULTILINE)]


def over(low: Any, high: Any) -> Any:
    """A compose file over another one: mappings are merged, all other values replaced."""
    if isinstance(low, dict) and isinstance(high, dict):
        return {key: over(low.get(key), high[key]) if key in high else low[key] for key in {**low, **high}}
    return high


def compose(gpu: bool = False, secrets: Mapping[str, str] = SECRETS) -> Any:
    """The compose files with defaults and secrets filled in.  Raises `KeyError` for a secret that is missing."""

    def value(match: re.Match[str]) -> str:
        return secrets[match[1]] if match[2] == ":?" else match[3]

    merged: Any = {}
    for name in ("compose.yaml", *(["compose.gpu.yaml"] if gpu else [])):
        text = re.sub(r"\$\{(\w+)(:-|:\?)([^}]*)\}", value, (DOCKER / name).read_text())
        merged = over(merged, yaml.safe_load(text))
    return merged


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def composed(request: pytest.FixtureRequest) -> Any:
    return compose(request.param)


def test_images_are_pinned_not_root_have_a_health_check_and_no_secret() -> None:
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(.*)$", SCRIPT, re.MULTILINE)
    assert PINNED.fullmatch(base)
    assert lines("USER", "runtime")[-1].split(":")[0] not in ("root", "0")
    for image in ("gateway", "worker"):
        assert STAGES[image].startswith("runtime AS ")
        assert lines("HEALTHCHECK", image)
    for line in (*lines("ENV"), *lines("ARG")):
        assert not re.search(r"KEY|TOKEN|SECRET|PASSWORD", line, re.IGNORECASE), line
    assert not lines("ADD")
    for line in lines("RUN"):
        if "apt-get install" in line:
            assert line.count("--no-install-recommends") == line.count("apt-get install")
            assert "rm -rf /var/lib/apt/lists/*" in line
    locked = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-cpu.txt").read_text(), re.MULTILINE))
    assert CLUSTER["spec"]["rayVersion"] == locked["ray"]
    for pod in PODS:
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert PINNED.fullmatch(container["image"])
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_what_is_copied_exists_and_nothing_else_reaches_the_builder() -> None:
    ignored = pathspec.PathSpec.from_lines("gitwildmatch", (ROOT / ".dockerignore").read_text().splitlines())
    copied = [line.split()[:-1] for line in lines("COPY")]
    assert {words[0].removeprefix("--from=") for words in copied if words[0].startswith("--from=")} <= STAGES.keys()
    for path in (path for words in copied if words[0][0] != "-" for path in words):
        inside = [path] if (ROOT / path).is_file() else [str(each.relative_to(ROOT)) for each in (ROOT / path).glob("*.py")]
        assert inside, path
        assert not any(map(ignored.match_file, inside)), path
    kept_out = (".git/config", "docker/.env", "docker/compose.yaml", "tests/conftest.py", "loadtest/results/x")
    for path in (*kept_out, "backend/.env", "backend/__pycache__/x.pyc"):
        assert ignored.match_file(path), path
    assert not ignored.match_file("backend/models/demo/target/model.safetensors")
    # The installer finds all that it reads.
    there = {path for line in lines("COPY", "build") for path in line.split()}
    script = (ROOT / "scripts/setup.py").read_text()
    needed = set(re.findall(r'ROOT / "([\w.-]+\.(?:txt|toml))"', script))
    licences = re.findall(r'^(?:license-files|readme) = .*?"([\w.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert needed | {*licences, "scripts/setup.py", "backend", "gateway", "outrider"} <= there
    assert "scripts/setup.py --${VARIANT}" in STAGES["build"]
    assert all(f'"--{variant}"' in script for variant in ("cpu", "cuda"))


def test_rays_flags_exist(composed: Any) -> None:
    known = {option for parameter in ray.scripts.scripts.start.params for option in parameter.opts}
    commands = [json.loads(lines("CMD", "worker")[-1])]
    commands += [composed["services"][name]["command"] for name in ("ray-head", "worker")]
    commands += [line.split() for line in re.findall(r"^\s+ray (start .*)$", (DOCKER / "gateway.sh").read_text(), re.MULTILINE)]
    assert len(commands) == 4
    for start, *flags in commands:
        assert start == "start"
        assert {flag.split("=")[0] for flag in flags} <= known | {'"$address"'}
    assert all(f"--{name}" in known for group in GROUPS for name in group["rayStartParams"])


@pytest.mark.parametrize("given", [{}, {"OUTRIDER_RAY__ADDRESS": "head:6379"}, {"RAY_ADDRESS": "head:6379"}])
def test_the_entry_point_joins_where_it_is_told_to(given: dict[str, str], tmp_path: Path) -> None:
    assert json.loads(lines("ENTRYPOINT", "gateway")[-1]) == ["/opt/outrider/docker/gateway.sh"]
    assert os.access(DOCKER / "gateway.sh", os.X_OK)
    for name in ("ray", "outrider"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "{name} $* at ${{OUTRIDER_RAY__ADDRESS:-nowhere}}"\n')
        program.chmod(0o755)
    command = ["sh", str(DOCKER / "gateway.sh"), "serve", "--mode", "off"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **given}
    *joined, last = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert last == f"outrider serve --mode off at {'head:6379' if given else 'nowhere'}"
    assert [line.partition(" --object")[0] for line in joined] == (
        ["ray start --address=head:6379 --num-cpus=0 --num-gpus=0"] if given else []
    )


def test_every_variable_is_a_setting_with_a_good_value(composed: Any) -> None:
    environments = [service.get("environment", {}) for service in composed["services"].values()]
    for pod in PODS:
        environments.append({each["name"]: each.get("value", "from-a-secret") for each in pod["containers"][0].get("env", [])})
    image = dict(re.findall(r"(OUTRIDER_\w+)=(\S+)", " ".join(lines("ENV", "gateway"))))
    found = 0
    for environment in (*environments, image):
        ours = {name: str(value) for name, value in environment.items() if name.startswith("OUTRIDER_")}
        found += len(ours)
        sources.merge([sources.read_variables(ours)])
    assert found >= 13
    assert sources.merge([sources.read_variables(image)]).settings.gateway.host == "0.0.0.0"


def test_secrets_come_from_outside_and_are_required() -> None:
    for name in SECRETS:
        with pytest.raises(KeyError, match=name):
            compose(secrets={other: "x" for other in SECRETS if other != name})
    example = dict(re.findall(r"^(\w+)=(.*)$", (DOCKER / "example.env").read_text(), re.MULTILINE))
    assert not any(example[name] for name in ("RAY_TOKEN", "GRAFANA_PASSWORD", "OUTRIDER_API_KEY", "HF_TOKEN"))
    assert set(example) == set(re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text()))
    assert "docker/.env" in (ROOT / ".gitignore").read_text().split()


def test_only_http_is_published_only_on_the_loopback_and_ray_wants_a_token(composed: Any) -> None:
    published = {name: service["ports"] for name, service in composed["services"].items() if service.get("ports")}
    assert published.keys() == {"gateway", "prometheus", "grafana"}
    for port in (port for ports in published.values() for port in ports):
        assert port.startswith("127.0.0.1:")
        assert not {"6379", "6380", "8265", "10001", "8076", "8077"} & set(port.split(":"))
    assert (lines("EXPOSE", "worker"), lines("EXPOSE", "gateway")) == ([], ["8000"])
    for each in KUBERNETES:
        if each["kind"] == "Service":
            assert (each["spec"]["type"], [port["port"] for port in each["spec"]["ports"]]) == ("ClusterIP", [8000])
    for name in ("ray-head", "worker", "gateway"):
        environment = composed["services"][name]["environment"]
        assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN"]) == ("token", "t")
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}


def test_services_hang_together(composed: Any) -> None:
    services = composed["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services)
        assert set(service.get("networks", [])) <= set(composed["networks"])
        if build := service.get("build"):
            assert ((DOCKER / build["context"]).resolve(), (ROOT / build["dockerfile"]).is_file()) == (ROOT, True)
            assert build["target"] in STAGES
        else:
            assert PINNED.fullmatch(service["image"]), name
            assert service["healthcheck"]["test"]
        for source in (volume.split(":")[0] for volume in service.get("volumes", [])):
            assert source in composed["volumes"] or (DOCKER / source).exists(), source
    for volume in ("models:/home/outrider/.cache/huggingface", "state:/home/outrider/.local/state"):
        assert volume in services["gateway"]["volumes"]
        assert volume in services["worker"]["volumes"], "the launcher hands workers the path of the model or head it found"
        assert volume.split(":")[1] in STAGES["runtime"], "Docker would make it as root's"
    assert all(service["logging"]["driver"] == "local" for service in services.values()), "json-file keeps logs without end"


def test_gpus_go_to_workers_only() -> None:
    services = compose(gpu=True)["services"]
    assert services["worker"]["container_name"], "it cannot be scaled: Docker would give all workers the same GPUs"
    assert services["worker"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert [name for name, service in services.items() if "deploy" in service] == ["worker"]
    assert {services[name]["build"]["args"]["VARIANT"] for name in ("ray-head", "worker", "gateway")} == {"cuda"}


def test_prometheus_and_grafana_find_each_other_and_the_gateway(composed: Any) -> None:
    dashboards = ROOT / "dashboards"
    (job,) = yaml.safe_load((dashboards / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert set(found["names"]) <= set(composed["services"])
    assert [str(found["port"])] == lines("EXPOSE", "gateway")
    assert job["metrics_path"] in OPEN_PATHS, "it has no key"
    provisioning = dashboards / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "outrider.yaml").read_text())["datasources"]
    grafana = composed["services"]["grafana"]
    assert (source["url"], grafana["environment"]["PROMETHEUS_URL"]) == ("$PROMETHEUS_URL", "http://prometheus:9090")
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "outrider.yaml").read_text())["providers"]
    assert f"../dashboards/grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]


def test_health_checks_ask_what_the_gateway_answers() -> None:
    gateway, worker = (json.loads(lines("HEALTHCHECK", image)[-1].partition("CMD ")[2]) for image in ("gateway", "worker"))
    assert gateway[1:] == ["/opt/outrider/docker/healthy.py", "gateway", "/readyz"]
    assert worker[2:] == ["tcp", "6380"]
    assert "--node-manager-port=6380" in lines("CMD", "worker")[-1]
    names = ("startupProbe", "readinessProbe", "livenessProbe")
    probes = [pod["containers"][0][name] for pod in PODS for name in names if name in pod["containers"][0]]
    assert {"/readyz", *(probe["httpGet"]["path"] for probe in probes)} <= OPEN_PATHS


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def healthy(*arguments: str, **gateway: str) -> bool:
    variables = {"PYTHONPATH": str(ROOT)} | {f"OUTRIDER_GATEWAY__{name}": value for name, value in gateway.items()}
    command = [sys.executable, str(DOCKER / "healthy.py"), *arguments]
    return subprocess.run(command, env=os.environ | variables, stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("kind", ["http", "https"])
def test_the_health_check_tells_healthy_from_not(kind: str, tmp_path: Path) -> None:
    cert = str(tmp_path / "cert.pem")
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        place = {"HOST": "0.0.0.0", "PORT": str(server.server_address[1])}
        if kind == "https":
            make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=x"
            subprocess.run([*make.split(), "-keyout", cert, "-out", cert + ".crt"], check=True, capture_output=True)
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(cert + ".crt", cert)
            server.socket = tls.wrap_socket(server.socket, server_side=True)
            place["TLS_CERT"] = cert
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        assert healthy("gateway", "/readyz", **place)
        assert not healthy("gateway", "/livez", **place)
        server.shutdown()
    assert not healthy("gateway", "/readyz", **place)


def test_a_workers_health_is_rays_port() -> None:
    with socket.create_server((socket.gethostbyname(socket.gethostname()), 0)) as listener:
        port = str(listener.getsockname()[1])
        assert healthy("tcp", port)
    assert not healthy("tcp", port)
