"""The container files, without an engine to build them: every path, command, flag, variable, port and endpoint is real."""

from __future__ import annotations

import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import TCPServer
from threading import Thread
from typing import Any

import pytest
import yaml

from backend.config import sources
from gateway.auth.rights import Right, paths
from gateway.routes import operations
from tests.support.container_files import DOCKER, ROOT, compose, copied, exec_form, filled, inherited, reaches_builder, stages

OPEN_PATHS = paths(operations.router.routes, Right.NOTHING, Right.METRICS)
STAGES = stages(DOCKER / "Dockerfile")
IMAGES = ("gateway", "worker")
SECRETS = {"RAY_TOKEN": "t", "GRAFANA_PASSWORD": "p"}
FLEETS = {"cpu": ("compose.yaml",), "gpu": ("compose.yaml", "compose.gpu.yaml")}
RAY_PORTS = {"6379", "6380", "8265", "10001", "8076", "8077"}
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+(-[\w.-]+)?")


@pytest.fixture(params=sorted(FLEETS))
def fleet(request: pytest.FixtureRequest) -> dict[str, Any]:
    merged: dict[str, Any] = filled(compose(*FLEETS[request.param]), SECRETS)
    return merged


def kubernetes() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DOCKER / "kuberay.yaml").read_text()))


def kubernetes_pods() -> Iterator[dict[str, Any]]:
    (cluster,) = [each for each in kubernetes() if each["kind"] == "RayCluster"]
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        yield group["template"]["spec"]


# The images


@pytest.mark.parametrize("image", IMAGES)
def test_images_are_not_root_have_a_health_check_and_no_secret(image: str) -> None:
    user = inherited(STAGES, image, "USER")
    assert user is not None
    assert user.split(":")[0] not in ("root", "0")
    assert inherited(STAGES, image, "HEALTHCHECK")
    for stage in STAGES.values():
        for line in (*stage.all("ENV"), *stage.all("ARG")):
            assert not re.search(r"KEY|TOKEN|SECRET|PASSWORD", line, re.IGNORECASE), line
        assert not stage.all("ADD")
        for line in stage.all("RUN"):
            if "apt-get install" in line:
                assert line.count("--no-install-recommends") == line.count("apt-get install")
                assert "rm -rf /var/lib/apt/lists/*" in line


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    for stage in STAGES.values():
        for line in stage.all("COPY"):
            origin, paths, _ = copied(line)
            if origin is not None:
                assert origin in STAGES
                continue
            for path in paths:
                assert (ROOT / path).exists(), path
                assert reaches_builder(path), path


def test_nothing_else_reaches_the_builder() -> None:
    for path in (
        ".git/config",
        "docker/.env",
        "docker/compose.yaml",
        "tests/conftest.py",
        "loadtest/results/x",
        "backend/.env",
    ):
        assert not reaches_builder(path), path
    assert reaches_builder("backend/models/demo/target/model.safetensors")
    assert not reaches_builder("backend/__pycache__/x.pyc")


def test_the_installer_finds_all_it_reads() -> None:
    there = {path for line in STAGES["build"].all("COPY") for path in copied(line)[1]}
    needed = set(re.findall(r'ROOT / "([\w.-]+\.(?:txt|toml))"', (ROOT / "scripts/setup.py").read_text()))
    assert needed <= there
    licences = re.findall(r'^(?:license-files|readme) = .*?"([\w.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {*licences, "scripts/setup.py", "backend", "gateway", "outrider"} <= there
    (install,) = [line for line in STAGES["build"].all("RUN") if "setup.py" in line]
    assert "scripts/setup.py --${VARIANT}" in install
    for variant in ("cpu", "cuda"):
        assert f'"--{variant}"' in (ROOT / "scripts/setup.py").read_text()


# Commands


def ray_flags() -> set[str]:
    import ray.scripts.scripts as scripts

    return {option for parameter in scripts.start.params for option in parameter.opts}


def test_rays_flags_exist(fleet: dict[str, Any]) -> None:
    known = ray_flags()
    commands = [exec_form(STAGES["worker"].last("CMD") or ""), fleet["services"]["ray-head"]["command"]]
    commands.append(fleet["services"]["worker"]["command"])
    commands += [line.split() for line in re.findall(r"^\s+ray (start .*)$", (DOCKER / "gateway.sh").read_text(), re.MULTILINE)]
    assert len(commands) == 4
    for start, *flags in commands:
        assert start == "start"
        for flag in flags:
            assert flag.split("=")[0] in known, flag
    (cluster,) = [each for each in kubernetes() if each["kind"] == "RayCluster"]
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        assert {f"--{name}" for name in group["rayStartParams"]} <= known


@pytest.mark.parametrize("given", [{}, {"OUTRIDER_RAY__ADDRESS": "head:6379"}, {"RAY_ADDRESS": "head:6379"}])
def test_the_entry_point_joins_where_it_is_told_to(given: dict[str, str], tmp_path: Path) -> None:
    for name in ("ray", "outrider"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "{name} $* at ${{OUTRIDER_RAY__ADDRESS:-nowhere}}"\n')
        program.chmod(0o755)
    done = subprocess.run(
        ["sh", str(DOCKER / "gateway.sh"), "serve", "--mode", "off"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **given},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    if given:
        assert lines[0].startswith("ray start --address=head:6379 --num-cpus=0 --num-gpus=0 ")
        assert lines[1:] == ["outrider serve --mode off at head:6379"]
    else:
        assert lines == ["outrider serve --mode off at nowhere"]


# Settings


def test_every_variable_is_a_setting_with_a_good_value(fleet: dict[str, Any]) -> None:
    environments = [service.get("environment", {}) for service in fleet["services"].values()]
    for pod in kubernetes_pods():
        listed = pod["containers"][0].get("env", [])
        environments.append({each["name"]: each.get("value", "from-a-secret") for each in listed})
    image = dict(re.findall(r"(OUTRIDER_\w+)=(\S+)", " ".join(STAGES["gateway"].all("ENV"))))
    found = 0
    for environment in (*environments, image):
        ours = {name: str(value) for name, value in environment.items() if name.startswith("OUTRIDER_")}
        found += len(ours)
        sources.merge([sources.read_variables(ours)])
    assert found >= 15
    assert sources.merge([sources.read_variables(image)]).settings.gateway.host == "0.0.0.0"


def test_secrets_come_from_outside_and_are_required() -> None:
    with pytest.raises(KeyError, match="RAY_TOKEN"):
        filled(compose("compose.yaml"), {"GRAFANA_PASSWORD": "p"})
    with pytest.raises(KeyError, match="GRAFANA_PASSWORD"):
        filled(compose("compose.yaml"), {"RAY_TOKEN": "t"})
    example = dict(re.findall(r"^(\w+)=(.*)$", (DOCKER / "example.env").read_text(), re.MULTILINE))
    assert all(not example[name] for name in ("RAY_TOKEN", "GRAFANA_PASSWORD", "OUTRIDER_API_KEY", "HF_TOKEN"))
    used = set(re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text()))
    assert set(example) == used
    assert "docker/.env" in (ROOT / ".gitignore").read_text().split()


# Networks, ports, volumes


def test_only_http_is_published_and_only_on_the_loopback(fleet: dict[str, Any]) -> None:
    published = {name: service.get("ports", []) for name, service in fleet["services"].items()}
    assert {name for name, ports in published.items() if ports} == {"gateway", "prometheus", "grafana"}
    for ports in published.values():
        for port in ports:
            assert port.startswith("127.0.0.1:")
            assert not RAY_PORTS & set(port.split(":"))
    assert STAGES["worker"].all("EXPOSE") == []
    assert STAGES["gateway"].all("EXPOSE") == ["8000"]
    for each in kubernetes():
        if each["kind"] == "Service":
            assert each["spec"]["type"] == "ClusterIP"
            assert [port["port"] for port in each["spec"]["ports"]] == [8000]


def test_ray_wants_a_token_everywhere(fleet: dict[str, Any]) -> None:
    for name in ("ray-head", "worker", "gateway"):
        environment = fleet["services"][name]["environment"]
        assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN"]) == ("token", "t")
    (cluster,) = [each for each in kubernetes() if each["kind"] == "RayCluster"]
    assert cluster["spec"]["authOptions"] == {"mode": "token"}


def test_services_hang_together(fleet: dict[str, Any]) -> None:
    services = fleet["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services)
        assert set(service.get("networks", [])) <= set(fleet["networks"])
        build = service.get("build")
        if build is None:
            assert PINNED.fullmatch(service["image"]), name
            assert service["healthcheck"]["test"]
        else:
            assert (DOCKER / build["context"]).resolve() == ROOT
            assert (ROOT / build["dockerfile"]).is_file()
            assert build["target"] in IMAGES
            assert build["args"]["VARIANT"] in ("cpu", "cuda")
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source not in fleet["volumes"]:
                assert source.startswith("../dashboards/"), volume
                assert (DOCKER / source).exists(), volume
    (made,) = (line for line in STAGES["runtime"].all("RUN") if "install -d -o outrider" in line)
    for volume in ("models:/home/outrider/.cache/huggingface", "state:/home/outrider/.local/state"):
        assert volume in services["gateway"]["volumes"]
        assert volume in services["worker"]["volumes"], "the launcher hands workers the path of the model or head it found"
        assert volume.split(":")[1] in made, "Docker would make it as root's"
    assert all(service["logging"]["driver"] == "local" for service in services.values()), "json-file keeps logs without end"


def test_gpus_go_to_workers_only() -> None:
    services = filled(compose(*FLEETS["gpu"]), SECRETS)["services"]
    assert services["worker"]["container_name"], "it cannot be scaled: Docker would give all workers the same GPUs"
    assert services["worker"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert [name for name, service in services.items() if "deploy" in service] == ["worker"]
    assert {services[name]["build"]["args"]["VARIANT"] for name in ("ray-head", "worker", "gateway")} == {"cuda"}


def test_prometheus_and_grafana_find_each_other_and_the_gateway(fleet: dict[str, Any]) -> None:
    dashboards = ROOT / "dashboards"
    (job,) = yaml.safe_load((dashboards / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert set(found["names"]) <= set(fleet["services"])
    assert str(found["port"]) == STAGES["gateway"].last("EXPOSE")
    assert job["metrics_path"] in OPEN_PATHS, "it has no key"
    provisioning = dashboards / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "outrider.yaml").read_text())["datasources"]
    grafana = fleet["services"]["grafana"]
    assert source["url"] == "$PROMETHEUS_URL"
    assert grafana["environment"]["PROMETHEUS_URL"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "outrider.yaml").read_text())["providers"]
    assert f"../dashboards/grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]


# Health


def test_health_checks_ask_what_the_gateway_answers() -> None:
    check = exec_form((STAGES["gateway"].last("HEALTHCHECK") or "").partition("CMD ")[2])
    assert check[1] == "/opt/outrider/docker/healthy.py"
    assert check[2:] == ["gateway", "/readyz"]
    probed = {check[3]}
    for pod in kubernetes_pods():
        container = pod["containers"][0]
        probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in container]
        probed |= {probe["httpGet"]["path"] for probe in probes}
    assert probed <= OPEN_PATHS
    worker = exec_form((STAGES["worker"].last("HEALTHCHECK") or "").partition("CMD ")[2])
    assert worker[2:] == ["tcp", "6380"]
    assert "--node-manager-port=6380" in exec_form(STAGES["worker"].last("CMD") or "")


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class UnixServer(HTTPServer):
    address_family = socket.AF_UNIX
    server_bind = TCPServer.server_bind


def healthy(*arguments: str, **gateway: str) -> bool:
    variables = {"PYTHONPATH": str(ROOT)} | {f"OUTRIDER_GATEWAY__{name}": value for name, value in gateway.items()}
    command = [sys.executable, str(DOCKER / "healthy.py"), *arguments]
    return subprocess.run(command, env=os.environ | variables, stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("kind", ["http", "https", "unix"])
def test_the_health_check_tells_healthy_from_not(kind: str, tmp_path: Path) -> None:
    cert, path = str(tmp_path / "cert.pem"), str(tmp_path / "s")
    with UnixServer(path, Answers) if kind == "unix" else HTTPServer(("127.0.0.1", 0), Answers) as server:  # type: ignore[arg-type]
        place = {"UDS": path} if kind == "unix" else {"HOST": "0.0.0.0", "PORT": str(server.server_address[1])}
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
    own = socket.gethostbyname(socket.gethostname())
    with socket.create_server((own, 0)) as listener:
        port = str(listener.getsockname()[1])
        assert healthy("tcp", port)
    assert not healthy("tcp", port)


def test_kubernetes_pods_are_not_root_and_images_are_pinned() -> None:
    (cluster,) = [each for each in kubernetes() if each["kind"] == "RayCluster"]
    locked = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-cpu.txt").read_text(), re.MULTILINE))
    assert cluster["spec"]["rayVersion"] == locked["ray"]
    for pod in kubernetes_pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert re.search(r":\d+\.\d+\.\d+$", container["image"])
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
