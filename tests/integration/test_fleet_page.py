"""The fleet page, its files and `/fleet` over HTTP; `tests/campaign` looks at the page in a browser."""

from gateway.routes.page import FOLDER
from tests.support.fake_verifier import eventually


async def test_the_page_and_its_files(running):
    http = running.http
    for path in ("/", *(f"/page/{each.name}" for each in FOLDER.iterdir())):
        answer = await http.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        again = await http.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b""), path
        assert again.headers["content-security-policy"] == policy
        assert (await http.head(path)).headers["content-length"] == str(len(answer.content))
    for path, kind in (
        ("/", "text/html; charset=utf-8"),
        ("/page/fleet.js", "javascript"),
        ("/page/icon.svg", "image/svg+xml"),
    ):
        assert kind in (await http.get(path)).headers["content-type"]
    for path in ("/page/../server.py", "/page/nothing.js", "/page/..%2Fserver.py", "/page/" + "x" * 300):
        assert (await http.get(path)).status_code == 404, path
    assert (await http.get("/page/%00")).status_code == 400


def test_the_files_ask_nobody_else_for_anything():
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "").replace("<!-- ", ""), f"{path} names an address"
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", "onclick="):
            assert unsafe not in text, f"{path}: {unsafe}"


async def test_the_fleet_is_told_with_what_the_page_needs(running):
    """`tests/unit` computes the page's figures from more of it."""
    running.server.gateway.metrics.moves["failover", "disconnected", "verifier-1"] += 3
    first = (await running.http.get("/fleet")).json()
    assert first["moved"] == [{"kind": "failover", "cause": "disconnected", "verifier": "verifier-1", "sequences": 3}]
    assert (first["model"], first["mode"], first["num_speculative_tokens"]) == ("demo", "sync", 8)
    assert [(row["id"], row["connected"]) for row in first["verifiers"]] == [("verifier-0", True)]
    assert first["answered_s"] >= 0
    assert first["gateway"].startswith("gateway-")
    running.directory.set_members([running.verifier.member])
    await eventually(lambda: running.core.snapshot.version > first["version"])
    assert (await running.http.get("/fleet")).json()["version"] == first["version"] + 1
