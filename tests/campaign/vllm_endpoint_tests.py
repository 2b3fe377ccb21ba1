"""vLLM's own tests of its HTTP endpoints, against our gateway: `make vllm-tests`.

They are not part of this repository: vLLM's source distribution is downloaded into a temporary folder, or `--sdist` names one.
`vllm_stand_in.py` puts a fleet of the demo model where the tests start vLLM's server.  What fails for a known reason is in
`vllm_expected.toml`, and shown as XFAIL; the exit status is 1 for a failure that is not there.  Other arguments go to pytest
(`-k stream`).
"""

import argparse
import hashlib
import os
import re
import ssl
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import httpx

from backend.engine.front import VLLM_VERSION

HERE = Path(__file__).resolve().parent
FILES = [
    "openai/completion/test_prompt_validation.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/test_return_token_ids.py",
    "serve/tokenize/test_tokenization.py",
    "serve/instrumentator/test_orca_metrics.py",
    "anthropic/test_messages.py",
    "openai/responses/test_simple.py",
    "openai/completion/test_completion_with_prompt_embeds.py",
    "openai/chat_completion/test_chat_completion_with_prompt_embeds.py",
    "openai/completion/test_token_in_token_out.py",
    "serve/instrumentator/test_basic.py",
    "openai/responses/test_errors.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_structured_output.py",
    "openai/responses/test_streaming_events.py",
    "openai/responses/test_function_call.py",
    "openai/completion/test_completion.py",
    "openai/chat_completion/test_chat.py",
    "openai/models/test_models.py",
    "openai/test_return_tokens_as_ids.py",
    "serve/lora/test_lora_adapters.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/test_chunked_prompt.py",
]
"""Below `tests/entrypoints`: those that ask a server of text.  Neighbours need the same fleet."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="vllm_endpoint_tests", description=__doc__)
    parser.add_argument("--sdist", type=Path, help="vLLM's source distribution (vllm-*.tar.gz); default: it is downloaded")
    options, for_pytest = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = unpack(options.sdist or download(VLLM_VERSION.partition("+")[0], Path(folder)), Path(folder))
        return run(root, Path(folder) / "run", for_pytest)


def download(version: str, folder: Path) -> Path:
    """The source distribution from pip's index, checked against the digest it names."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    name = f"vllm-{version}.tar.gz"
    with httpx.Client(verify=ssl.create_default_context(), follow_redirects=True, timeout=300) as http:
        page = http.get(f"{index}/vllm/", headers={"accept": "text/html"}).raise_for_status()
        link = re.search(rf'href="([^"]*/{re.escape(name)})#sha256=([0-9a-f]+)"', page.text)
        if link is None:
            raise SystemExit(f"{index} has no {name}; give --sdist")
        print(f"downloading {name}", flush=True)
        content = http.get(str(page.url.join(link[1]))).raise_for_status().content
    if hashlib.sha256(content).hexdigest() != link[2]:
        raise SystemExit(f"{name} is not what the index says it is")
    (folder / name).write_bytes(content)
    return folder / name


def unpack(sdist: Path, folder: Path) -> Path:
    """Its tests alone, without the outermost `conftest.py`, which needs libraries for images and sound; where they are."""
    with tarfile.open(sdist) as archive:
        wanted = [
            each
            for each in archive
            if each.name.partition("/")[2].startswith(("tests/entrypoints/", "tests/utils.py", "tests/__init__.py"))
        ]
        archive.extractall(folder, wanted, filter="data")
    return folder / wanted[0].name.partition("/")[0]


def run(root: Path, folder: Path, arguments: list[str]) -> int:
    """pytest's exit status."""
    folder.mkdir()
    path = os.pathsep.join(map(str, (root, HERE, HERE.parents[1])))
    options = ["-p", "vllm_stand_in", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "-o", "timeout=120", "--tb=no", "-q"]
    files = [str(root / "tests" / "entrypoints" / each) for each in FILES]
    command = [sys.executable, "-m", "pytest", "--rootdir", str(root), *options, "-rA", *arguments, *files]
    return subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
