"""How commands report and end: exit codes, the one line on stderr, our own log.  The command line's process."""

from __future__ import annotations

import logging
import sys
import time

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


def configure_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.Formatter.converter = time.gmtime
    for noisy in ("ray", "urllib3", "httpx", "filelock", "asyncio", "uvicorn.error", "vllm"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def fail(line: str, code: int) -> int:
    print(f"outrider: {line}", file=sys.stderr)
    return code
