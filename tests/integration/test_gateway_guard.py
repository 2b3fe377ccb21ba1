"""What comes before a request is understood: slow and endless senders, strange hosts, upgrades, and clients that leave."""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from vllm.v1.engine import FinishReason

from gateway.http import guard, protocol
from tests.support.fake_verifier import count_up, eventually, silence, stall
from tests.support.running_gateway import COMPLETION, Running, refusal, running_gateway

BODY = json.dumps(COMPLETION).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HEAD = POST + b"content-length: %d\r\n" % len(BODY)


class Wire:
    """A connection spoken byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(), 120)
        return b""

    async def answer(self) -> tuple[int, bytes]:
        """One response: its status and body."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 120)
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        return int(head.split()[1]), await self.reader.readexactly(length)


@asynccontextmanager
async def wire(running: Running) -> AsyncIterator[Wire]:
    url = httpx.URL(running.server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def server_connections(running: Running) -> set[Any]:
    return set(running.uvicorn.server_state.connections)


def arrived(running: Running) -> int:
    """Bytes of heads that have not ended."""
    return sum(each._pending for each in server_connections(running) if not each.transport.is_closing())


async def changed(value: Callable[[], int], before: int) -> None:
    await eventually(lambda: value() != before)


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"GET /%s HTTP/1.1\r\nhost: localhost\r\n\r\n" % (b"a" * 9000), 414, "uri_too_long"),
        (b"GET /livez?%s HTTP/1.1\r\nhost: localhost\r\n\r\n" % (b"a" * 9000), 414, "uri_too_long"),
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: %s\r\n\r\n" % (b"a" * 66_000), 431, "headers_too_large"),
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: %s" % (b"a" * 75_000), 431, "headers_too_large"),
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\n%s\r\n" % (b"x: a\r\n" * 101), 431, "headers_too_large"),
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\n%s\r\n" % (b"x: %s\r\n" % (b"a" * 4000) * 20), 431, "headers_too_large"),
        (b"nonsense\r\n\r\n", 400, "invalid_http"),
    ],
)
async def test_what_comes_before_the_body_is_bounded(running, head, status, code):
    async with wire(running) as client:
        await client.send(head)
        found, body = await client.answer()
        assert (found, json.loads(body)["error"]["code"]) == (status, code)
        assert await client.rest() == b"", "the connection ends with it"


async def test_connections_beyond_what_the_gateway_can_hold_are_told_to_come_again(running, monkeypatch):
    await eventually(lambda: len(server_connections(running)) <= 1)
    async with wire(running) as first:
        await first.send(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await first.answer())[0] == 200
        monkeypatch.setattr(protocol, "MAX_CONNECTIONS", len(server_connections(running)))
        async with httpx.AsyncClient(base_url=running.server.url) as second:
            refused = await second.post("/v1/completions", json=COMPLETION)
            assert refusal(refused) == (503, "too_many_connections")
            assert refused.headers["retry-after"] == "1"
        async with wire(running) as silent:
            assert (await silent.answer())[0] == 503
            assert await silent.rest() == b""
        await first.send(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await first.answer())[0] == 200, "who is in stays"
    async with httpx.AsyncClient(base_url=running.server.url) as third:
        assert (await third.post("/v1/completions", json=COMPLETION)).status_code == 200


CHUNKED = b"transfer-encoding: chunked\r\n\r\n%x\r\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_without_end_behind_a_request_end_its_connection(running, stream):
    """Trailers of a request without an answer yet, or another request's headers while a stream is open."""
    running.verifier.behaviour = stall
    body = json.dumps({**COMPLETION, "stream": True}).encode()
    async with wire(running) as client:
        await client.send(POST + CHUNKED % len(body) + body + b"\r\n0\r\n")
        if stream:
            await client.send(b"\r\nGET /livez HTTP/1.1\r\n")
            await client.reader.readuntil(b"data: ")
        for _ in range(20):
            await client.send(b"x: " + b"a" * (1 << 16))
        # An answer in the midst of a stream would be taken for a part of it.
        assert not stream or b"HTTP/1.1 431" not in await client.rest()


async def test_largest_headers_and_urls_pass(running):
    headers = {f"x-{i}": "a" * 1000 for i in range(60)}
    assert (await running.http.get("/livez?" + "a" * 8000, headers=headers)).status_code == 200


async def test_headers_that_trickle_are_given_up(running, elapse):
    async with wire(running) as client:
        await client.send(b"GET /livez HTTP/1.1\r\n")
        for _ in range(2):
            before = arrived(running)
            await client.send(b"x: a\r\n")
            await changed(lambda: arrived(running), before)
            await elapse(protocol.HEAD_TIMEOUT_S / 2)
        assert not arrived(running)
        assert (await client.answer())[0] == 408


async def test_a_request_after_a_slow_one_has_its_own_time(running, elapse):
    """On one connection: an answer, silence longer than a head may take, another request."""
    async with wire(running) as client:
        for _ in range(2):
            await client.send(b"GET /livez HTTP/1.1\r\n")
            await eventually(lambda: arrived(running) > 0)
            await client.send(b"host: localhost\r\n\r\n")
            assert (await client.answer())[0] == 200
            await elapse(protocol.HEAD_TIMEOUT_S)
            assert not client.reader.at_eof()


async def test_half_sent_bodies_take_no_place(elapse):
    async with running_gateway(max_in_flight=2) as running, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(wire(running)) for _ in range(300)]
        for client in clients:
            await client.send(HEAD + b"\r\n" + BODY[:10])
        assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert running.server.gateway.metrics.in_flight == 0
        await eventually(lambda: running.server.gateway.arriving_bytes == 10 * len(clients))
        await elapse(guard.BODY_TIMEOUT_S)
        answers = await asyncio.gather(*(client.answer() for client in clients))
        assert {(status, json.loads(body)["error"]["code"]) for status, body in answers} == {(408, "request_timeout")}
        await eventually(lambda: len(running.uvicorn.server_state.connections) <= 2)


async def test_a_body_that_goes_on_has_time(running, monkeypatch, elapse):
    """Each byte brings as much as passes until the next one."""
    each_s = 2 * guard.BODY_TIMEOUT_S / len(BODY)
    monkeypatch.setattr(guard, "BODY_BYTES_PER_S", 1 / each_s)
    async with wire(running) as client:
        await client.send(HEAD + b"\r\n")
        for number, byte in enumerate(BODY[:-1]):
            await client.send(bytes([byte]))
            await changed(lambda: running.server.gateway.arriving_bytes, number)
            await elapse(each_s)
        await client.send(BODY[-1:])
        assert (await client.answer())[0] == 200


async def test_too_much_that_arrives_at_once_is_refused(running, monkeypatch):
    monkeypatch.setattr(guard, "MAX_ARRIVING_BYTES", 1000)
    async with wire(running) as first, wire(running) as second:
        large = POST + b"content-length: 9999\r\n\r\n"
        await first.send(large + b" " * 900)
        await eventually(lambda: running.server.gateway.arriving_bytes == 900)
        await second.send(large + b" " * 900)
        status, answer = await second.answer()
        assert (status, json.loads(answer)["error"]["code"]) == (429, "rate_limit_exceeded")
        async with wire(running) as third:
            await third.send(HEAD + b"\r\n" + BODY)
            assert (await third.answer())[0] == 200, "what is complete counts no more"


async def test_a_file_on_its_way_to_disk_takes_no_room_of_others(running, monkeypatch):
    monkeypatch.setattr(guard, "MAX_ARRIVING_BYTES", 1000)
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    async with wire(running) as upload, wire(running) as other:
        await upload.send(head + b"content-length: 9999\r\n\r\n" + part + b" " * 5000)
        await other.send(HEAD + b"\r\n" + BODY[:10])
        await eventually(lambda: running.server.gateway.arriving_bytes == 10)
        await other.send(BODY[10:])
        assert (await other.answer())[0] == 200
    await eventually(lambda: not running.uvicorn.server_state.tasks)
    assert running.server.gateway.arriving_bytes == 0


@asynccontextmanager
async def unread_stream(running: Running) -> AsyncIterator[socket.socket]:
    """A connection with a stream of more than all buffers hold; the kernel's are small."""
    full = asyncio.Event()

    async def fill(verifier, sequence):
        while not full.is_set():
            sequence.emit([300] * 1000)
            await asyncio.sleep(0.001)

    running.verifier.behaviour = fill
    url, loop = httpx.URL(running.server.url), asyncio.get_running_loop()
    body = json.dumps({**COMPLETION, "stream": True}).encode()
    with socket.socket(fileno=os.dup(running.uvicorn.servers[0].sockets[0].fileno())) as listener:
        # Those that it accepts inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 13)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, (url.host, url.port))
        await loop.sock_sendall(client, POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        await eventually(lambda: any(each.flow.write_paused for each in server_connections(running)))
        full.set()
        yield client


@pytest.mark.parametrize("ends", [False, True])
async def test_a_stream_that_is_never_read_ends_as_if_its_client_had_left(elapse, ends):
    async with running_gateway() as running:
        metrics = running.server.gateway.metrics
        async with unread_stream(running):
            if ends:
                running.verifier.sequences[0].emit([], FinishReason.LENGTH)
                # Else the connection may be cut first, and the sequence be aborted.
                await eventually(lambda: not running.core.sequences)
            while server_connections(running):
                await elapse(protocol.WRITE_TIMEOUT_S)
                await asyncio.sleep(0.01)
            await eventually(lambda: running.idle and metrics.in_flight == 0)
        # The abort may still be on its way to the verifier.
        await eventually(lambda: running.verifier.sequences[0].aborted.is_set() != ends)
        assert await running.metric("outrider_client_disconnects_total") == 1


async def test_a_stream_that_is_read_slowly_goes_on(elapse):
    async with running_gateway() as running, unread_stream(running) as client:
        (connection,) = server_connections(running)
        for _ in range(5):
            before = connection.transport.get_write_buffer_size()
            while connection.transport.get_write_buffer_size() == before:
                assert await asyncio.get_running_loop().sock_recv(client, 8192), "the connection was cut"
            await elapse(protocol.WRITE_TIMEOUT_S)
        assert not running.verifier.sequences[0].aborted.is_set()


async def test_a_client_that_leaves_in_its_body_is_no_error_of_ours(running, caplog):
    caplog.set_level(logging.INFO)
    before = await running.metric("outrider_client_disconnects_total")
    for path in (b"/v1/completions", b"/tokenize"):
        async with wire(running) as client:
            await client.send(HEAD.replace(b"/v1/completions", path) + b"\r\n" + BODY[:10])
            await eventually(lambda: bool(running.uvicorn.server_state.tasks))
        await eventually(lambda: not running.uvicorn.server_state.tasks)
    assert 'code="499"' in (await running.http.get("/metrics")).text
    assert await running.metric("outrider_client_disconnects_total") == before + 2
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and record.name != "httpx"]


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"nonsense"])
async def test_an_upgrade_that_we_do_not_know_is_ignored(running, upgrade):
    headers = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: %s\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\r\n" % upgrade
    async with wire(running) as client:
        await client.send((HEAD + headers + BODY) * 2)
        for _ in range(2):
            status, body = await client.answer()
            assert status == 200
            assert json.loads(body)["choices"]
        await client.send(HEAD + headers)
        await client.send(BODY)
        assert (await client.answer())[0] == 200
        await client.send(b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await client.answer())[0] == 405


@pytest.mark.parametrize("status", [200, 403])
async def test_without_a_key_only_this_machine_is_served(running, status):
    here, there = {"host": "localhost"}, "evil.example"
    hosts = {
        200: ("localhost", "127.0.0.1:8000", "[::1]:8000"),
        403: (there, f"{there}:8000", f"localhost.{there}", ""),
    }
    origins = {200: ("http://localhost:3000", "http://127.0.0.1:8000"), 403: (f"https://{there}", "null")}
    for headers in [{"host": host} for host in hosts[status]] + [here | {"origin": origin} for origin in origins[status]]:
        for path in ("/v1/models", "/fleet", "/metrics", "/"):
            assert (await running.http.get(path, headers=headers)).status_code == status, (path, headers)
        answer = await running.http.post("/v1/completions", json=COMPLETION, headers=headers)
        assert answer.status_code == status, headers
        assert (await running.http.get("/livez", headers=headers)).status_code == 200


@pytest.mark.parametrize("listed", ["https://app.example", "*"])
async def test_pages_of_listed_origins_are_served_and_do_not_administer(listed):
    page, other = {"origin": "https://app.example"}, {"origin": "https://evil.example"}
    async with running_gateway(cors_origins=[listed]) as running:
        answer = await running.http.post("/v1/completions", json=COMPLETION, headers=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, listed)
        exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
        ours = {name for name in answer.headers if name.startswith(("x-", "openai-"))}
        assert {*ours, "x-ratelimit-remaining-tokens", "retry-after-ms", "x-should-retry"} <= {*exposed}
        assert (await running.http.get("/v1/models", headers=other)).status_code == (200 if listed == "*" else 403)
        assert (await running.http.get("/v1/models", headers={**page, "host": "evil.example"})).status_code == 403
        assert (await running.http.post("/admin/drain", json={}, headers=page)).status_code == 403
        assert (await running.http.post("/admin/drain", json={})).status_code == 400


async def test_with_a_key_any_name_will_do_and_pages_are_told_whether_they_may_call():
    asks, page = {"access-control-request-method": "POST"}, {"origin": "https://app.example"}
    for listed in ([], [page["origin"]]):
        async with running_gateway(api_key="k", cors_origins=listed) as running:
            headers = {**page, "host": "api.example", "authorization": "Bearer k"}
            assert (await running.http.get("/v1/models", headers=headers)).status_code == 200
            async with wire(running) as client:
                await client.send(POST + CHUNKED % len(BODY) + BODY + b"\r\n0\r\nauthorization: Bearer k\r\n\r\n")
                assert (await client.answer())[0] == 401, "trailers are no headers"
            for origin in (page["origin"], "https://evil.example"):
                preflight = await running.http.options("/v1/completions", headers={**asks, "origin": origin})
                assert preflight.headers.get("access-control-allow-origin") == (origin if origin in listed else None)
                assert (preflight.status_code == 200) == (origin in listed)


async def test_probes_can_be_asked_for_their_head(running):
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        answer = await running.http.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path


async def test_while_streams_finish_probes_and_new_requests_are_told():
    async with running_gateway() as running:
        running.verifier.behaviour = silence
        request = running.begin()
        await eventually(lambda: len(running.verifier.sequences) == 1)
        running.server.stop()
        async with httpx.AsyncClient(base_url=running.server.url) as other:
            assert (await other.get("/livez")).status_code == 200
            for answer in (await other.get("/readyz"), await other.post("/v1/completions", json=COMPLETION)):
                assert refusal(answer) == (503, "shutting_down")
        await count_up(running.verifier, running.verifier.sequences[0])
        assert (await request).status_code == 200
        await asyncio.wait_for(running.stopped, 120)


async def test_a_request_that_is_sent_before_the_answer_to_the_one_before_stands_for_itself(running: Running) -> None:
    def post(**fields: Any) -> bytes:
        body = json.dumps({**COMPLETION, "stream": True, **fields}).encode()
        stays = b"close" if fields else b"keep-alive"
        return POST + b"connection: %s\r\ncontent-length: %d\r\n\r\n" % (stays, len(body)) + body

    async with wire(running) as line:
        await line.send(post() + post(outrider={"stats": True}))
        answers = await line.rest()
    assert answers.count(b" 200 OK") == 2
    assert len(running.verifier.sequences) == 2, "the first one's prompt is generated from once"


@pytest.mark.parametrize(
    ("host", "is_local"), [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False)]
)
def test_an_address_of_ipv4_may_come_as_one_of_ipv6(host: str, is_local: bool) -> None:
    assert guard.is_loopback(host) == is_local
