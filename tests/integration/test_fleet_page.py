"""The fleet page, its files and `/fleet` over HTTP, without an engine; `tests/campaign` looks at the page in a browser."""

from collections.abc import Iterator

import httpx
import pytest

from gateway.routes.page import FOLDER
from tests.support.fleet_story import Story, served


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.fixture
def page(story: Story) -> Iterator[httpx.Client]:
    with served(story) as url, httpx.Client(base_url=url) as client:
        yield client


def test_the_page_and_its_files(page):
    for path in ("/", *(f"/page/{each.name}" for each in FOLDER.iterdir())):
        answer = page.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        again = page.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b""), path
        assert again.headers["content-security-policy"] == policy
        assert page.head(path).headers["content-length"] == str(len(answer.content))
    types = {path: page.get(path).headers["content-type"] for path in ("/", "/page/fleet.js", "/page/icon.svg")}
    assert types["/"] == "text/html; charset=utf-8"
    assert "javascript" in types["/page/fleet.js"]
    assert types["/page/icon.svg"] == "image/svg+xml"
    for path in ("/page/../server.py", "/page/nothing.js", "/page/..%2Fserver.py", "/page/" + "x" * 300):
        assert page.get(path).status_code == 404, path
    assert page.get("/page/%00").status_code == 400


def test_the_files_ask_nobody_else_for_anything():
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "").replace("<!-- ", ""), f"{path} names an address"
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", "onclick="):
            assert unsafe not in text, f"{path}: {unsafe}"


def test_the_fleet_is_told_with_what_the_page_needs(page, story):
    first = page.get("/fleet").json()
    assert (first["model"], first["mode"], first["num_speculative_tokens"]) == ("demo", "auto", 8)
    assert [row["id"] for row in first["verifiers"]] == ["verifier-0", "verifier-1"]
    story.advance()
    second = page.get("/fleet").json()
    assert second["version"] == first["version"] + 1
    assert second["verifiers"][0]["drafters"]["drafter-0"]["drafts"] > first["verifiers"][0]["drafters"]["drafter-0"]["drafts"]


async def test_a_gateway_shows_its_fleet(running):
    assert "Outrider" in (await running.http.get("/")).text
    running.server.gateway.metrics.moves["failover", "disconnected", "verifier-1"] += 3
    document = (await running.http.get("/fleet")).json()
    assert document["moved"] == [{"kind": "failover", "cause": "disconnected", "verifier": "verifier-1", "sequences": 3}]
    assert [(row["id"], row["connected"]) for row in document["verifiers"]] == [("verifier-0", True)]
    assert document["answered_s"] >= 0
    assert document["gateway"].startswith("gateway-")
