"""Which routes need no key, which only administrators may call, and which count as requests in flight.

No spelling of a path evades that: the right belongs to the route that is found.
"""

import asyncio
import itertools
import logging
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount

from backend.config import Settings
from gateway.auth.access import Access
from gateway.auth.key_ring import KeyEntry, KeyRing, make_key
from gateway.auth.quotas import Quotas
from gateway.auth.rights import Right, right_of
from gateway.http.app import build_app
from gateway.metrics.gateway import GatewayMetrics
from gateway.routes import weights
from gateway.state import Gateway
from tests.support.rights import ROUTES, paths


def test_each_route_has_its_right() -> None:
    api = {"/livez", "/liveness", "/readyz", "/health", "/openapi.json"}
    reads = {"/is_paused", "/is_sleeping", "/weight_info", "/get_world_size", "/server_info"}
    changes = {route.path for route in weights.router.routes} - reads  # type: ignore[attr-defined]
    adapters = {f"{prefix}/{verb}_lora_adapter" for prefix in ("", "/v1") for verb in ("load", "unload")}
    chat = {"/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/messages", "/v1/responses"}
    assert {right: paths(ROUTES, right) for right in (Right.NOTHING, Right.METRICS, Right.ADMINISTER, Right.GENERATE)} == {
        Right.NOTHING: api | {"/", "/page/{name}"},
        Right.METRICS: {"/metrics"},
        Right.ADMINISTER: changes | adapters | {route.path for route in ROUTES if route.path.startswith("/admin")},
        Right.GENERATE: chat | {"/v1/embeddings", "/v1/score", "/v1/rerank", "/inference/v1/generate"},
    }


def test_a_route_that_does_not_say_who_may_call_it_is_not_served() -> None:
    router = APIRouter()
    router.add_api_route("/things", lambda: None)
    mounts: list[BaseRoute] = [Mount("/files", app=router)]
    for routes in (router.routes, mounts):
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, routes=routes)
        with pytest.raises(TypeError, match="does not say who may call it"):
            Access(cast(Gateway, None)).guard(app)


def _key(name: str, **fields: Any) -> tuple[str, KeyEntry]:
    key, entry = make_key(name)
    return key, KeyEntry(name=name, sha256=entry.split()[-1], **fields)


CLIENT, ADMIN, SCRAPER = _key("client"), _key("admin", rights=["admin"]), _key("scraper", rights=["metrics"])
KEYS = {"no": None, "a wrong": "or-wrong", "a client's": CLIENT[0], "an administrator's": ADMIN[0], "a scraper's": SCRAPER[0]}
FLEETS = {"no key": KeyRing(), "one key": KeyRing(CLIENT[0]), "keys": KeyRing(None, None, [CLIENT[1], ADMIN[1], SCRAPER[1]])}
ENDS = (
    *("%0A", "%0D", "%0D%0A", "%00", "%09", "%1F", "%7F", "%C2%85", "%E2%80%A8"),
    *("/", "//", "/.", "/..", "%20", "%2F", "%3F", "%23", ";", "."),
)
SPELLINGS = (
    *(f"/{{0}}{end}" for end in ENDS),
    *("//{0}", "/%2F{0}", "%2F{0}", "/./{0}", "/x/../{0}", "/livez/../{0}", "/livez%0A/../{0}", "{0}", "http://x/{0}"),
    *("/{upper}", "/{capital}", "/{vowels}", "/{begun}%25{last:02x}"),
)
"""Spellings of `/path`, of which `{0}` is all behind the first slash."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def spelled(spelling: str, path: str) -> str:
    name = path[1:]
    vowels = "".join(f"%{ord(each):02x}" if each in "aeiou" else each for each in name)
    cases = {"upper": name.upper(), "capital": name.capitalize(), "vowels": vowels}
    return spelling.format(name, **cases, begun=name[:-1], last=ord(name[-1]) if name else 0)


def may(right: Right, fleet: str, key: str, local: bool) -> bool:
    """What docs/operate/keys.md promises."""
    if right is Right.NOTHING:
        return True
    if right is Right.METRICS:
        return fleet != "keys" or key in ("an administrator's", "a scraper's")
    known = fleet == "no key" or key == "a client's" or (fleet == "keys" and key in ("an administrator's", "a scraper's"))
    if right is Right.ADMINISTER:
        return known and (key == "an administrator's" if fleet == "keys" else local)
    return known


class Walk:
    """The application without its endpoints: a request that reaches one is answered with the route's right."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
        def handler(route: APIRoute) -> Any:
            async def reached(request: Request) -> Response:
                return Response(headers={"reached": right_of(route).name})

            return reached

        monkeypatch.setattr(APIRoute, "get_route_handler", handler)
        settings = Settings.model_validate({"gateway": {"host": "127.0.0.1" if local else "0.0.0.0"}})
        self._local = local
        self.gateway = SimpleNamespace(
            settings=settings, metrics=GatewayMetrics(), ring=KeyRing(), quotas=Quotas("", None), tracing=None, arriving_bytes=0
        )
        self._app = build_app(cast(Gateway, self.gateway))
        self.routes: list[APIRoute] = [route for route in self._app.routes if isinstance(route, APIRoute)]

    async def ask(self, method: str, target: str, key: str | None) -> tuple[int, Right | None]:
        """The status, and the right of the route that was reached.  The target is decoded as uvicorn does it."""
        headers = [(b"host", b"localhost" if self._local else b"fleet.example")]
        headers += [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": method, "path": unquote(target), "query_string": b"", "headers": headers}
        scope |= {"client": ("127.0.0.1" if self._local else "10.0.0.9", 5), "root_path": "", "http_version": "1.1"}
        answers: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            answers.append(message)

        await self._app(scope | {"state": {}}, receive, send)
        reached = dict(answers[0]["headers"]).get(b"reached")
        return answers[0]["status"], None if reached is None else Right[reached.decode()]


@pytest.mark.parametrize("local", [True, False], ids=["loopback", "0.0.0.0"])
def test_no_spelling_of_a_path_gives_a_right(
    local: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outrider.audit")
    walk = Walk(monkeypatch, local)

    async def all_of_them() -> int:
        administered = 0
        for route, fleet, (name, key) in itertools.product(walk.routes, FLEETS, KEYS.items()):
            walk.gateway.ring = FLEETS[fleet]
            right, path, method = right_of(route), route.path_format.replace("{operation_id}", "7"), max(route.methods)
            requests = [(method, path)]
            # With a weak key every spelling is tried: administering needs more.  With others the router is no other one.
            if not local and (fleet, name) == ("keys", "a client's"):
                requests += [(each, path) for each in METHODS if each != method]
                requests += [(method, spelled(each, path)) for each in SPELLINGS]
            for method, target in requests:
                status, reached = await walk.ask(method, target, key)
                case = f"{method} {target} of {fleet} with {name} key: {status}"
                assert status < 500, case
                assert reached is None or may(reached, fleet, name, local), case
                if target == path and method in route.methods:
                    assert (reached is right) == may(right, fleet, name, local), case
                administered += reached is Right.ADMINISTER and method not in ("GET", "HEAD")
        return administered

    administered = asyncio.run(all_of_them())
    logged = [each for each in caplog.records if each.name == "outrider.audit" and each.fields["status"] == 200]  # type: ignore[attr-defined]
    assert len(logged) == administered > 0
