"""Starts, queries and ends a private Prometheus, on a free port and in a temporary directory.  A command's process."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from dashboards.expressions import ROOT

PROGRAM_VARIABLE = "PROMETHEUS"
START_TIMEOUT_S = 60.0
HTTP_TIMEOUT_S = 30.0

Series = list[tuple[dict[str, str], float]]
"""Labels and value of each series of an answer."""


class PrometheusError(RuntimeError):
    """Prometheus does not start, or refuses an expression."""


def find_program() -> str:
    """The program that `$PROMETHEUS` names, else `prometheus` on the PATH.  Raises `PrometheusError`."""
    named = os.environ.get(PROGRAM_VARIABLE, "prometheus")
    found = shutil.which(named)
    if found is None:
        raise PrometheusError(
            f"there is no {named}: install Debian's package prometheus, or set {PROGRAM_VARIABLE} to the program"
        )
    return found


class Prometheus:
    """Queries to a running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, promql: str, at: float | None = None) -> Series:
        """The result of an instant query, as of now or of `at` in Unix seconds.  Raises `PrometheusError`."""
        asked = {"query": promql} | ({} if at is None else {"time": f"{at:.3f}"})
        answer = httpx.get(f"{self.url}/api/v1/query", params=asked, timeout=HTTP_TIMEOUT_S, trust_env=False)
        found: Any = answer.json()
        if answer.is_error:
            raise PrometheusError(f"refused: {found.get('error', answer.status_code)}")
        return [(sample["metric"], float(sample["value"][1])) for sample in found["data"]["result"]]


@contextlib.contextmanager
def running(gateway: str) -> Iterator[Prometheus]:
    """Runs a Prometheus with the committed configuration and rules on the URL `gateway`.  Raises `PrometheusError`."""
    program = find_program()
    with tempfile.TemporaryDirectory(prefix="outrider-prometheus-") as folder:
        address = f"127.0.0.1:{free_port()}"
        flags = [
            f"--config.file={_write_config(Path(folder), gateway)}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        ]
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen([program, *flags], stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(f"http://{address}/-/ready", process, log)
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            process.wait()


def _write_config(folder: Path, gateway: str) -> Path:
    config = yaml.safe_load((ROOT / "prometheus" / "local.yml").read_text(encoding="utf-8"))
    config["rule_files"] = [str(ROOT / "prometheus" / "rules" / "*.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [httpx.URL(gateway).netloc.decode()]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            httpx.get(url, timeout=5, trust_env=False).raise_for_status()
            return
        except httpx.HTTPError as error:
            if time.monotonic() > deadline or process.poll() is not None:
                last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                raise PrometheusError(f"Prometheus did not start: {last[0]}") from error
            time.sleep(0.2)
