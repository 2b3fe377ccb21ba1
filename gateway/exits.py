"""How commands report and end: exit codes, the one line on stderr, our own log.  The command line's process."""

from __future__ import annotations

import logging
import sys

from gateway.logs import LogFormat, formatter

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


def configure_logging(level: str, kind: LogFormat = "text") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(kind))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for noisy in ("ray", "urllib3", "httpx", "filelock", "asyncio", "uvicorn.error", "vllm"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def fail(line: str, code: int) -> int:
    print(f"outrider: {line}", file=sys.stderr)
    return code
