"""The fleet page and its events over HTTP, without an engine; `tests/campaign` looks at the page in a browser."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

import httpx
import pytest

from gateway import fleet_feed, protocol
from gateway.errors import TooManyRequests
from gateway.fleet_core import FleetCore
from gateway.fleet_feed import FleetFeed
from gateway.metrics import GatewayMetrics
from gateway.page import FILES
from tests.support.fleet_process import wait_for
from tests.support.fleet_story import Story, feed_of
from tests.support.running_gateway import running_gateway
from tests.support.story_page import Served, served


@pytest.fixture
def page() -> Iterator[Served]:
    with served(Story()) as page:
        page.advance()
        yield page


def views(answer: httpx.Response) -> Iterator[dict]:
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def test_the_page_and_its_files(page):
    assert {"/", "/page/fleet.css", "/page/fleet.js", "/page/icon.svg"} <= FILES.keys()
    for path in FILES:
        answer = httpx.get(page.url + path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(page.url + path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b""), path
        assert httpx.head(page.url + path).headers["content-length"] == str(len(answer.content))
    assert httpx.get(page.url + "/page/../server.py").status_code == 404
    assert httpx.get(page.url + "/page/nothing.js").status_code == 404


def test_the_files_ask_nobody_else_for_anything():
    for path, file in FILES.items():
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "").replace("<!-- ", ""), f"{path} names an address"
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", "onclick="):
            assert unsafe not in text, f"{path}: {unsafe}"


def test_events_begin_at_once_and_follow_the_fleet(page):
    with httpx.stream("GET", f"{page.url}/fleet/events", timeout=10) as answer:
        follow = views(answer)
        first = next(follow)
        assert first["about"] == {"model": "demo", "mode": "auto", "num_speculative_tokens": 8}
        assert [row["id"] for row in first["fleet"]["verifiers"]] == ["verifier-0", "verifier-1"]
        page.advance()
        second = next(follow)
        assert second["fleet"]["version"] == first["fleet"]["version"] + 1
        assert second["fleet"]["totals"]["acceptance_length"] > 2


def test_the_key_guards_what_is_known_of_the_fleet():
    with served(Story(), api_key="k3y") as page:
        page.advance()
        for path in FILES:
            assert httpx.get(page.url + path).status_code == 200, path
        for path in ("/fleet/events", "/page/nothing.js"):
            assert httpx.get(page.url + path).status_code == 401, path
        wrong = httpx.get(f"{page.url}/fleet/events", headers={"authorization": "Bearer key"})
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        with httpx.stream("GET", f"{page.url}/fleet/events", headers={"authorization": "Bearer k3y"}) as answer:
            assert next(views(answer))["fleet"]["version"] == 1


def test_there_are_only_so_many_places(page, monkeypatch):
    monkeypatch.setattr(fleet_feed, "MAX_LISTENERS", 1)
    with httpx.stream("GET", f"{page.url}/fleet/events", timeout=10) as answer:
        # Kept: httpx closes the connection when the iterator is collected.
        follow = views(answer)
        next(follow)
        refused = httpx.get(f"{page.url}/fleet/events")
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert page.feed.listeners == 1
    wait_for(lambda: page.feed.listeners == 0, what="the place being free")
    with httpx.stream("GET", f"{page.url}/fleet/events", timeout=10) as answer:
        assert next(views(answer))


def test_a_browser_that_takes_nothing_is_let_go_and_delays_nobody(monkeypatch):
    monkeypatch.setattr(protocol, "WRITE_TIMEOUT_S", 0.2)
    with served(Story(300, 300)) as page, socket.create_connection(("127.0.0.1", page.port)) as stuck:
        page.advance()
        stuck.sendall(b"GET /fleet/events HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_for(lambda: page.feed.listeners == 1, what="the stuck browser")
        with httpx.stream("GET", f"{page.url}/fleet/events", timeout=10) as answer:
            follow = views(answer)
            for version in range(1, 500):
                assert next(follow)["fleet"]["version"] == version
                if page.feed.listeners == 1:
                    break
                page.advance()
        assert version > 1, "it was let go before its buffers were full"
        wait_for(lambda: page.feed.listeners == 0, what="its place being free")


async def test_a_slow_listener_misses_views_and_holds_up_nobody():
    story = Story()
    feed = feed_of(story)
    slow, quick = feed.events(), feed.events()
    for number in range(1, 6):
        story.advance(1.0)
        feed.look()
        assert f"id: {number}\n".encode() in await anext(quick)
    story.advance(1.0)
    feed.look()
    assert b"id: 6\n" in await anext(slow)
    # Of the views that came while it was busy it gets the last.
    for _ in range(3):
        feed.look()
    assert b"id: 9\n" in await anext(slow)
    late = asyncio.ensure_future(anext(slow))
    await asyncio.sleep(0)
    assert not late.done()
    feed.close()
    with pytest.raises(StopAsyncIteration):
        await late


async def test_one_encoding_serves_all_and_none_is_made_for_nobody(monkeypatch):
    story = Story()
    feed = feed_of(story)
    made = []
    view = feed._history.view

    def counted():
        made.append(1)
        return view()

    monkeypatch.setattr(feed._history, "view", counted)
    for _ in range(3):
        feed.look()
    assert not made
    assert await anext(feed.events()) is await anext(feed.events())
    assert len(made) == 1


async def test_a_view_that_fails_is_not_the_end_of_the_feed(monkeypatch, caplog):
    monkeypatch.setattr(fleet_feed, "PERIOD_S", 0.001)
    seen: list[int] = []

    class Broken(FleetFeed):
        def look(self) -> None:
            seen.append(1)
            raise ValueError("no such thing")

    feed = Broken(cast(FleetCore, Story()), {}, GatewayMetrics())
    feed.start()
    while len(seen) < 3:
        await asyncio.sleep(0.001)
    feed.close()
    assert "the fleet page's view failed" in caplog.text


def test_a_place_is_given_back_whatever_happens():
    feed = feed_of(Story())
    with pytest.raises(RuntimeError), feed.seat():
        raise RuntimeError
    assert feed.listeners == 0
    with ExitStack() as taken:
        for _ in range(fleet_feed.MAX_LISTENERS):
            taken.enter_context(feed.seat())
        with pytest.raises(TooManyRequests), feed.seat():
            raise AssertionError("one too many")
    assert feed.listeners == 0


async def test_a_gateway_shows_its_fleet_and_stops_in_spite_of_watchers():
    async with running_gateway(drain_s=30) as running:
        assert "Outrider" in (await running.http.get("/")).text
        async with running.http.stream("GET", "/fleet/events") as answer:
            # Kept: httpx closes the connection when the iterator is collected.
            lines = answer.aiter_lines()
            async for line in lines:
                # The first look may have been at a fleet nobody had told the gateway of.
                if line.startswith("data: ") and (rows := json.loads(line[6:])["fleet"]["verifiers"]) and rows[0]["connected"]:
                    break
            assert [row["id"] for row in rows] == ["verifier-0"]
            running.server.stop()
            await asyncio.wait_for(running.stopped, 30)
