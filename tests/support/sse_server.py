"""Small HTTP servers whose streams are sent in pieces that a test decides.  Tests only."""

import itertools
import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def stream_of(*texts: str, done: bool = True) -> list[bytes]:
    """The events of a streamed completion, one piece each."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "text": text, "finish_reason": "length" if text == texts[-1] else None}]} for text in texts
    ]
    chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(texts)}})
    pieces = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
    return [*pieces, b"data: [DONE]\n\n"] if done else pieces


class StubGateway:
    """Has the routes that load tests use; answers every POST with `pieces`, one every `pause_s`.

    Its metrics count two drafts, from two verifiers, and three accepted tokens for each answer.
    """

    def __init__(self, pieces: Sequence[bytes], pause_s: float = 0.0, status: int = 200) -> None:
        answered = itertools.count(1)
        drafts, accepted = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
        documents = {"/v1/models": '{"data": [{"id": "stub"}]}', "/metrics": f"{accepted} 0\n"}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._answer([documents[self.path].encode()], "text/plain")

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self._answer(pieces, "text/event-stream", pause_s, status)
                n = next(answered)
                documents["/metrics"] = f'{drafts}{{v="a"}} {n}\n{drafts}{{v="b"}} {n}\n{accepted} {3 * n}\n'

            def _answer(self, parts: Sequence[bytes], kind: str, pause_s: float = 0.0, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("retry-after", "1")
                self.send_header("content-length", str(sum(map(len, parts))))
                self.end_headers()
                for part in parts:
                    self.wfile.write(part)
                    if pause_s:
                        time.sleep(pause_s)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
