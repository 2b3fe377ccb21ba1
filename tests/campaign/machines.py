"""Simulates several machines on one, by network, PID and mount namespaces behind a bridge.  Tests only; needs root.

A machine has its own address, its own /tmp and /dev/shm, and sees only its own processes.  The test itself is one more machine
of the network.  A machine ends with its first process, which ends with the test, so nothing is left in any case.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tests.support.fleet_process import ROOT, wait_for

FIRST_PROCESS = """
import signal, subprocess, sys
for directory in ("/tmp", "/dev/shm"):
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], check=True)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
sys.stdin.read()
"""
RAY = str(Path(sys.executable).with_name("ray"))
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def missing() -> str | None:
    """Why machines cannot be simulated here; None if they can."""
    for command in ("ip", "unshare", "nsenter"):
        if shutil.which(command) is None:
            return f"no {command} here"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() or None if tried.returncode else None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Machine:
    """One simulated machine."""

    def __init__(self, network: Network, number: int, log: IO[str]) -> None:
        self.address = f"{network.prefix}.{number}"
        self.port = f"{network.name}p{number}"
        """The interface at the bridge's end of the machine's virtual cable."""
        self._log = log
        self._children: list[subprocess.Popen[str]] = []
        self._first = subprocess.Popen(
            [*UNSHARE, sys.executable, "-c", FIRST_PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert self._first.stdout is not None
        if self._first.stdout.readline().strip() != "up":
            raise RuntimeError("no namespaces here")
        pid = self._first.pid
        self.pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        """Process id of its first process, in the test's own PID namespace."""
        _ip("link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        _ip("link", "set", self.port, "master", network.name, "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    @property
    def enter(self) -> list[str]:
        """Prefix of a command that is to run in the machine."""
        return ["nsenter", "-t", str(self.pid), "--net", "--mount", "--pid", "env", "-C", str(ROOT)]

    def run(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Runs a command in the machine; returns its standard output."""
        environment = os.environ | (env or {})
        done = subprocess.run([*self.enter, *command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> None:
        """Starts a command in the machine; it ends with the machine at the latest."""
        started = subprocess.Popen(
            [*self.enter, *command], env=os.environ | (env or {}), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        self._children.append(started)  # type: ignore[arg-type]

    def plug(self, there: bool) -> None:
        """Connects the machine's network cable, or disconnects it."""
        _ip("link", "set", self.port, "up" if there else "down")

    def connections(self, port: int) -> set[str]:
        """The addresses from which connections to one of its tcp ports are established."""
        found = set()
        for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, state, *_ = line.split()
            if state == "01" and int(local.split(":")[1], 16) == port:
                found.add(socket.inet_ntoa(struct.pack("<I", int(remote.split(":")[0], 16))))
        return found

    def power_off(self) -> None:
        assert self._first.stdin is not None
        self._first.stdin.close()
        self._first.wait(30)
        for child in self._children:
            child.wait(30)


class Network:
    """A bridge between machines; the test's own address on it ends in 254."""

    def __init__(self, log: IO[str]) -> None:
        # Interface names must be short, and unique because two tests may run at once.
        self.name = f"or{secrets.token_hex(3)}"
        self.prefix = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        self.address = f"{self.prefix}.254"
        self._log = log
        self.machines: list[Machine] = []
        # Without an address of its own a bridge has one of its ports', and another one once that port is gone: machines would
        # send to the old one for a minute.
        _ip("link", "add", self.name, "address", "02:00:00:00:00:fe", "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", self.name)
        _ip("link", "set", self.name, "up")

    def machine(self) -> Machine:
        self.machines.append(Machine(self, len(self.machines) + 1, self._log))
        return self.machines[-1]

    def close(self) -> None:
        for machine in self.machines:
            machine.power_off()
        _ip("link", "del", self.name)


class RayMachines:
    """A Ray cluster of two machines: the head, with the resource `verifying`, and a worker, with the resource `drafting`."""

    def __init__(self, made: Network) -> None:
        self.network = made
        self.env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",
        }
        self.head = made.machine()
        self.ray_address = f"{self.head.address}:6379"
        self._ray(self.head, "--head", "--port=6379", "--include-dashboard=false", '--resources={"verifying": 1}')
        wait_for(lambda: self._listens(self.head.address, 6379), 60, "Ray's head")
        self.worker = self.join("drafting")
        wait_for(
            lambda: "drafting" in self.head.run(RAY, "status", f"--address={self.ray_address}", env=self.env), 60, "the worker"
        )

    def join(self, resource: str) -> Machine:
        machine = self.network.machine()
        self._ray(machine, f"--address={self.ray_address}", f'--resources={{"{resource}": 1}}')
        return machine

    def _ray(self, machine: Machine, *options: str) -> None:
        common = ("--num-cpus=2", f"--node-ip-address={machine.address}", "--object-store-memory=80000000")
        machine.start(RAY, "start", *options, *common, "--disable-usage-stats", "--block", env=self.env)

    def _listens(self, host: str, port: int) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex((host, port)) == 0
