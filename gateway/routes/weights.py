"""/admin/sleep, /wake-up and /reload-weights: vLLM's own, for one verifier or all of them.

They go straight to the verifiers and answer when it is done.  Requests wait meanwhile, none is lost.  All verifiers are asked
at once; if one refuses, that is the answer, whatever the others did: ask again, with `verifier`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.engine_link import UtilityError, VerifierLink
from gateway.errors import ApiError, BadRequest, EngineFailed, NotFound, NotSupported
from gateway.requests import read_json
from gateway.state import Gateway, gateway_of

router = APIRouter()


class Sleep(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of /admin/sleep."""

    verifier: str | None = None
    level: int = 1


class WakeUp(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of /admin/wake-up."""

    verifier: str | None = None
    tags: list[str] | None = None


class ReloadWeights(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of /admin/reload-weights."""

    verifier: str | None = None
    path: str | None = None


@router.post("/admin/sleep")
async def sleep(request: Request) -> Response:
    """Requests wait from here on; see vLLM for the levels."""
    gateway, asked = await _read(request, Sleep)
    return await _everywhere(gateway, asked.verifier, "sleep", asked.level)


@router.post("/admin/wake-up")
async def wake_up(request: Request) -> Response:
    """They go on."""
    gateway, asked = await _read(request, WakeUp)
    return await _everywhere(gateway, asked.verifier, "wake_up", asked.tags)


@router.post("/admin/reload-weights")
async def reload_weights(request: Request) -> Response:
    """Loads the target's weights again, or others of the same shapes; every cache is emptied, the drafters' too."""
    gateway, asked = await _read(request, ReloadWeights)
    answer = await _everywhere(gateway, asked.verifier, "reload_weights", asked.path)
    core = gateway.client.core
    core.choosing.emptied([asked.verifier] if asked.verifier else core.links)
    return answer


async def _read(request: Request, kind: type[Any]) -> tuple[Gateway, Any]:
    gateway = gateway_of(request)
    try:
        return gateway, msgspec.convert(await read_json(request, gateway.max_body_bytes), kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{error}.") from None


async def _everywhere(gateway: Gateway, verifier: str | None, method: str, *arguments: Any) -> Response:
    links = [link for link in gateway.client.core.ready_links if verifier in (None, link.member.id)]
    if not links:
        raise NotFound("There is no such verifier." if verifier else "There is no verifier.")
    results = await asyncio.gather(*(_call(link, method, *arguments) for link in links))
    return JSONResponse({"verifiers": {link.member.id: result for link, result in zip(links, results, strict=True)}})


async def _call(link: VerifierLink, method: str, *arguments: Any) -> Any:
    try:
        return await link.call(method, *arguments)
    except UtilityError as error:
        raise _translated(link.member.id, str(error)) from None


def _translated(verifier_id: str, message: str) -> ApiError:
    kind, _, text = message.partition(": ")
    if kind == "NotImplementedError":
        return NotSupported(f"{verifier_id}: {text}.")
    if kind == "ValueError":
        return BadRequest(f"{verifier_id}: {text}.")
    return EngineFailed(f"{verifier_id}: {message}.")
