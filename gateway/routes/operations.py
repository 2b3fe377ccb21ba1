"""Routes for operators and monitoring: liveness, readiness, metrics, the fleet, the version."""

import asyncio
import importlib.metadata
import time
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.samples import Sample
from starlette.responses import JSONResponse, Response

from backend.engine.front import VLLM_VERSION
from gateway.auth.rights import Right
from gateway.http.errors import InternalError, NotAllReady, NoVerifier, ShuttingDown
from gateway.http.openapi import UNDESCRIBED, described, document, shape
from gateway.metrics.fleet import fleet_document
from gateway.routes.lists import as_json
from gateway.state import Gateway, gateway_of

router = APIRouter()

VERSION = importlib.metadata.version("outrider")
PROBED = ["GET", "HEAD"]
"""Methods of probes; load balancers use either."""


@router.api_route("/livez", methods=PROBED, **described(gives=shape("status"), right=Right.NOTHING))
@router.api_route("/liveness", methods=PROBED, **described(gives=shape("status"), right=Right.NOTHING))
async def livez(request: Request) -> Response:
    """200: the process works; 500: it has failed for good and must be restarted."""
    if gateway_of(request).client.errored:
        raise InternalError
    return JSONResponse({"status": "ok"})


@router.api_route("/readyz", methods=PROBED, **described(gives=shape("status"), right=Right.NOTHING))
@router.api_route("/health", methods=PROBED, **described(gives=shape("status"), right=Right.NOTHING))
async def readyz(request: Request) -> Response:
    """200: every process on this port could serve a request now; 503: not, or this gateway is shutting down."""
    gateway = gateway_of(request)
    client = gateway.client
    if client.core.draining:
        raise ShuttingDown
    if not client.ready:
        raise NoVerifier
    if not await gateway.peers.ready():
        raise NotAllReady
    return JSONResponse({"status": "ok"})


@router.api_route("/metrics", methods=PROBED, **described(text="text/plain", right=Right.METRICS))
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    gateway = gateway_of(request)
    found = {**await gateway.peers.ask("metrics"), gateway.peers.index: families_of(gateway)}
    text = exposed(family for _, families in sorted(found.items()) for family in families)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def families_of(gateway: Gateway) -> list[dict[str, Any]]:
    """This process's own metrics, with a label for it if there are others; of the first process also the fleet's.

    Processes hear about the fleet at different moments: from several of them, counters would jump back between two scrapes.
    """
    label = {} if gateway.peers.alone else {"gateway": gateway.client.core.gateway_id}
    own = list(gateway.metrics.own.collect())
    for family in own:
        family.samples = [each._replace(labels=label | each.labels) for each in family.samples]
    return [vars(each) for each in (*own, *(gateway.metrics.fleet.collect() if gateway.peers.is_first else ()))]


def exposed(families: Iterable[Mapping[str, Any]]) -> str:
    """Several processes' metrics in Prometheus' format, where all samples of a family stand together."""
    merged: dict[str, Metric] = {}
    for each in families:
        family = merged.setdefault(each["name"], Metric(each["name"], each["documentation"], each["type"]))
        family.samples += [Sample(*sample) for sample in each["samples"]]
    return generate_latest(cast(Any, SimpleNamespace(collect=merged.values))).decode()


@router.get("/fleet", **described(gives={"type": "object"}, right=Right.KEY))
async def fleet(request: Request) -> Response:
    """Members, assignments, load and acceptance.  The fleet page shows them, and the differences between two answers."""
    gateway = gateway_of(request)
    core, settings = gateway.client.core, gateway.settings
    moves = gateway.metrics.moves.items()
    return as_json(
        {
            "at": time.time(),
            "gateway": core.gateway_id,
            "model": gateway.services.models.model_name(),
            "mode": settings.mode,
            "num_speculative_tokens": settings.num_speculative_tokens,
            "answered_s": None if core.snapshot is None else round(time.monotonic() - core.answered_at, 1),
            **fleet_document(core),
            "moved": [{"kind": kind, "cause": cause, "verifier": to, "sequences": count} for (kind, cause, to), count in moves],
        }
    )


@router.get("/version", **described(gives=shape("version", "vllm"), right=Right.KEY))
async def version() -> Response:
    """The versions of Outrider and of vLLM."""
    return JSONResponse({"version": VERSION, "vllm": VLLM_VERSION})


@router.get("/openapi.json", **UNDESCRIBED)
async def openapi(request: Request) -> Response:
    """The API's document."""
    app = request.app
    if app.openapi_schema is None:
        app.openapi_schema = await asyncio.to_thread(document, app, VERSION)
    return JSONResponse(app.openapi_schema)
