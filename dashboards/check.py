"""Asks a real Prometheus for every panel of a fleet under load: `python -m dashboards.check [--gateway URL]`.

Starts Prometheus (which has to be on the PATH) on a free port in a temporary directory, and a fleet with the demo model unless
the URL of a running gateway is given; sends completions for a while; then evaluates the expressions of all panels, lists and
rules.  Exit status 1 when one is refused or returns nothing.  All it started is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dashboards.expressions import ROOT, Expression, of_panels, of_rules, of_variables

START_TIMEOUT_S = 180.0
NOTHING = "returns nothing"
MAY_BE_EMPTY = re.compile(r"^Outrider\w+\n|\bALERTS\b|outrider_recovery_seconds|outrider_handover_rows")
"""Alerts that do not fire, and figures per move or hand-over when there was none."""


def main(arguments: list[str]) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.check", description=__doc__)
    parser.add_argument("--gateway", help="URL of a running gateway; default: start a fleet")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long to send requests (default 90)")
    parser.add_argument("--model", default="demo", help="model name to ask for (default demo)")
    given = parser.parse_args(arguments)
    if shutil.which("prometheus") is None:
        print("prometheus is not on the PATH (Debian: apt-get install prometheus)", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        gateway = given.gateway or stack.enter_context(_fleet())
        prometheus = stack.enter_context(_prometheus(gateway))
        print(f"sending requests to {gateway} for {given.seconds:g} s", flush=True)
        _send_load(gateway, given.model, given.seconds)
        return _report(prometheus)


def _report(prometheus: str) -> int:
    bad, empty = 0, []
    expressions = [*of_panels(), *of_variables(), *of_rules()]
    for each in expressions:
        problem = _problem(prometheus, each)
        if problem == NOTHING and MAY_BE_EMPTY.search(f"{each.where}\n{each.promql}"):
            empty.append(each.where)
        elif problem:
            bad += 1
            print(f"{each.where}: {problem}\n    {each.promql}")
    print(f"{len(expressions) - bad - len(empty)} of {len(expressions)} expressions return data")
    print(f"{len(empty)} return nothing, as they should when all is well: {', '.join(empty)}")
    return 1 if bad else 0


def _problem(prometheus: str, expression: Expression) -> str:
    try:
        answer = _get(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression.promql})}")
    except urllib.error.HTTPError as error:
        return f"refused: {json.loads(error.read()).get('error', error)}"
    values = [sample["value"][1] for sample in answer["data"]["result"]]
    if "NaN" in values:
        return "returns NaN"
    return "" if values else NOTHING


@contextlib.contextmanager
def _fleet() -> Iterator[str]:
    """A fleet of its own; the URL of its gateway."""
    command = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", "--log-level", "error"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (found := re.search(r"serving at (\S+)/v1", lines.get(timeout=max(0.1, deadline - time.monotonic())))):
            pass
        yield found[1]
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _prometheus(gateway: str) -> Iterator[str]:
    """A Prometheus with the committed configuration, pointed at `gateway`; its URL."""
    with tempfile.TemporaryDirectory() as folder:
        config = yaml.safe_load((ROOT / "prometheus" / "local.yml").read_text(encoding="utf-8"))
        config["rule_files"] = [str(ROOT / "prometheus" / "rules" / "*.yml")]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [urllib.parse.urlsplit(gateway).netloc]
        file = Path(folder) / "prometheus.yml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        flags = [f"--config.file={file}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
        process = subprocess.Popen(["prometheus", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_until_ready(f"http://{address}/-/ready", process)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError as error:
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError("Prometheus did not start") from error
            time.sleep(0.2)


def _send_load(gateway: str, model: str, seconds: float) -> None:
    """Four clients that complete one prompt after the other."""
    until = time.monotonic() + seconds

    def work(number: int) -> None:
        body = {"model": model, "prompt": f"def function_{number}(a, b):\n    ", "max_tokens": 200, "temperature": 0}
        while time.monotonic() < until:
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"{gateway}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=120) as answer:
                answer.read()

    clients = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
