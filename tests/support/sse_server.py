"""Small HTTP servers whose streams are sent in pieces that a test decides.  Tests only."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Framing = Literal["chunked", "close", "length"]
WAIT_S = 10.0


def stream_of(*texts: str, done: bool = True) -> list[bytes]:
    """The events of a streamed completion, one piece each."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "text": text, "finish_reason": "length" if text == texts[-1] else None}]} for text in texts
    ]
    chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(texts)}})
    pieces = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
    return [*pieces, b"data: [DONE]\n\n"] if done else pieces


def read_request(connection: socket.socket) -> None:
    """Reads one request to its end, because closing a socket with unread data resets the connection."""
    request = b""
    while b"\r\n\r\n" not in request:
        request += connection.recv(65536)
    head, _, body = request.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    while len(body) < length:
        body += connection.recv(65536)


class PiecewiseServer:
    """Answers one connection: sends headers at once, and one more piece at each `release`."""

    def __init__(self, pieces: Sequence[bytes], framing: Framing = "chunked", cut_off: bool = False) -> None:
        self.sent = 0
        self._pieces = pieces
        self._framing = framing
        self._cut_off = cut_off
        self._turns = threading.Semaphore(0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._turns.release()

    def clock(self) -> float:
        """A clock whose time is the number of pieces sent; each reading also releases the next piece."""
        now = float(self.sent)
        self.release()
        return now

    def close(self) -> None:
        self._listener.close()
        self._thread.join(WAIT_S)

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(WAIT_S)
        with connection:
            read_request(connection)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            head += {
                "chunked": b"transfer-encoding: chunked\r\n",
                "close": b"connection: close\r\n",
                "length": b"content-length: %d\r\n" % sum(map(len, self._pieces)),
            }[self._framing]
            connection.sendall(head + b"\r\n")
            try:
                for piece in self._pieces:
                    if not self._turns.acquire(timeout=WAIT_S):
                        return
                    self.sent += 1
                    connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if self._framing == "chunked" else piece)
                if self._framing == "chunked" and not self._cut_off:
                    connection.sendall(b"0\r\n\r\n")
                if self._cut_off:
                    return
                if self._framing == "close":
                    connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
            except (ConnectionError, TimeoutError):
                pass  # the client has left


class StubGateway:
    """Has the routes that load tests use; answers every POST with `pieces`, one every `pause_s`."""

    def __init__(self, pieces: Sequence[bytes], pause_s: float = 0.0) -> None:
        metrics = b"vllm:spec_decode_num_drafts_total 4\nvllm:spec_decode_num_accepted_tokens_total 6\n"
        documents = {"/v1/models": b'{"data": [{"id": "stub"}]}', "/metrics": metrics}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._answer([documents[self.path]], "text/plain")

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self._answer(pieces, "text/event-stream", pause_s)

            def _answer(self, parts: Sequence[bytes], kind: str, pause_s: float = 0.0) -> None:
                self.send_response(200)
                self.send_header("content-type", kind)
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
