"""The format of log lines, in every process: text for people, or one JSON object a line.

Neither contains prompts, outputs or keys.

A log call may pass `extra={"fields": {...}}`.  In JSON, fields become keys of the object; for text, the message contains them.
"""

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TextLines(logging.Formatter):
    """One line a message, whatever a client has put into it; a traceback's lines are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {_escaped(line)}" for line in super().formatException(ei).split("\n"))


def _escaped(text: str) -> str:
    """Line ends and whatever else would change how a line is shown, as in a Python literal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def formatter(kind: LogFormat) -> logging.Formatter:
    if kind == "json":
        return JsonLines()
    result = TextLines(TEXT)
    result.converter = time.gmtime
    return result


def configure_logging(level: str, kind: LogFormat = "text") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(kind))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)  # Python's warnings become lines of the log
    for noisy in ("ray", "urllib3", "httpx", "filelock", "asyncio", "uvicorn.error", "sse_starlette", "vllm"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
