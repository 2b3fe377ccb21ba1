"""Routes that pause verifiers and exchange their weights: vLLM's control plane for trainers, for one verifier or all.

Calls go straight to the verifiers and answer when it is done.  All are asked at once; if one refuses, that is the answer,
whatever the others did: ask again, with `verifier`.  One that is lost meanwhile is left out.  A verifier that missed an update
of all of them by directory loads it before it is given requests (`WeightsInForce`).  Pauses are remembered: a verifier that
becomes ready later is paused, too.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from backend.engine.front import VLLM_VERSION
from backend.wire.engine import NOT_BEGUN
from gateway.auth.rights import Right
from gateway.fleet.engine_link import UtilityError, VerifierForgot, VerifierGone, VerifierLink
from gateway.fleet.pauses import Change, Pauses
from gateway.http.errors import ApiError, BadRequest, EngineFailed, NotFound, NotSupported, NoVerifier, VerifierLost
from gateway.http.openapi import described, shape
from gateway.requests.body import TENSORS, media_type, read_json
from gateway.state import Gateway, gateway_of

router = APIRouter()
T = TypeVar("T")


class InitTransfer(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of /init_weight_transfer_engine."""

    init_info: dict[str, Any] = {}


class UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of /update_weights: a directory that the verifiers can read, or what vLLM's transfer engine will receive."""

    weight_dir: str | None = None
    skip_prefix_cache_reset: bool = False
    """Sent by prime-rl.  Without effect: cached states of other weights would change the text."""
    update_info: dict[str, Any] | list[dict[str, Any]] | None = None
    weight_version: str | int | None = None


class FinishUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of /finish_weight_update."""

    weight_version: str | int | None = None


class AbortRequests(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of /abort_requests."""

    request_ids: list[str] | None = None


@router.post("/pause", **described(gives=shape("status", "verifiers"), right=Right.ADMINISTER))
async def pause(
    request: Request, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True, verifier: str | None = None
) -> Response:
    """Requests at hand end (`abort`), are waited for (`wait`), or stand still (`keep`); new ones wait."""
    gateway = gateway_of(request)
    if mode == "abort" and _links(gateway, verifier) and verifier is None:
        await _abort(gateway, None, None)  # Verifiers do not know of those that wait in gateways.
    return _answer(await _hold(gateway, verifier, True, "pause", mode, clear_cache), status="paused")


@router.post("/resume", **described(gives=shape("status", "verifiers"), right=Right.ADMINISTER))
async def resume(request: Request, verifier: str | None = None) -> Response:
    """Requests go on."""
    return _answer(await _hold(gateway_of(request), verifier, False, "resume"), status="resumed")


@router.get("/is_paused", **described(gives=shape("is_paused"), right=Right.KEY))
async def is_paused(request: Request, verifier: str | None = None) -> Response:
    """Whether all verifiers, or the named one, are paused."""
    return JSONResponse({"is_paused": all((await _results(gateway_of(request), verifier, "is_scheduler_paused")).values())})


@router.post("/sleep", **described(gives=shape("verifiers"), right=Right.ADMINISTER))
async def sleep(
    request: Request,
    level: Annotated[int, Query(ge=0, le=2)] = 1,
    mode: Literal["abort", "keep"] = "abort",
    verifier: str | None = None,
) -> Response:
    """Frees the device's memory (level 1 or 2), or only pauses (0)."""
    return _answer(await _hold(gateway_of(request), verifier, True, "sleep", level, mode), status="sleeping", level=level)


@router.post("/wake_up", **described(gives=shape("verifiers"), right=Right.ADMINISTER))
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None, verifier: str | None = None) -> Response:
    """Undoes it; with `tags`, for the weights or the KV cache alone."""
    gateway = gateway_of(request)
    woken = await _hold(gateway, verifier, False, "wake_up", tags)
    return JSONResponse({"status": "awake" if all(woken.values()) else "sleeping", "tags": tags, "verifiers": woken})


@router.get("/is_sleeping", **described(gives=shape("is_sleeping"), right=Right.KEY))
async def is_sleeping(request: Request, verifier: str | None = None) -> Response:
    """Whether all verifiers, or the named one, sleep or are paused."""
    return JSONResponse({"is_sleeping": all((await _results(gateway_of(request), verifier, "is_sleeping")).values())})


@router.post("/reset_prefix_cache", **described(gives=shape("verifiers"), right=Right.ADMINISTER))
async def reset_prefix_cache(request: Request, reset_running_requests: bool = False, verifier: str | None = None) -> Response:
    """Empties the prefix caches; with `reset_running_requests`, running requests compute their context again."""
    gateway = gateway_of(request)
    emptied = await _results(gateway, verifier, "reset_prefix_cache", reset_running_requests)
    gateway.client.core.choosing.emptied([verifier] if verifier else gateway.client.core.links)
    return JSONResponse({"success": all(emptied.values()), "verifiers": emptied})


@router.post("/init_weight_transfer_engine", **described((InitTransfer,), shape("verifiers"), right=Right.ADMINISTER))
async def init_weight_transfer_engine(request: Request, verifier: str | None = None) -> Response:
    """Connects vLLM's transfer engine to a trainer; tensors sent over HTTP need no such connection."""
    gateway, body = await _read(request, InitTransfer)
    links = _links(gateway, verifier)
    infos = init_infos(body.init_info, len(links), gateway.settings.verifier.tensor_parallel)
    return _answer(await _gather(links, "init_weight_transfer_engine", [[info] for info in infos]))


@router.post("/start_weight_update", **described(gives=shape("verifiers"), right=Right.ADMINISTER))
async def start_weight_update(request: Request, verifier: str | None = None) -> Response:
    """Tensors follow; verifiers stand still until they have all come."""
    return _answer(await _results(gateway_of(request), verifier, "start_weight_update"))


@router.post("/update_weights", **described((UpdateWeights,), shape("verifiers"), right=Right.ADMINISTER))
async def update_weights(request: Request, verifier: str | None = None) -> Response:
    """Loads all weights from a directory, or some tensors: as safetensors' bytes, or by vLLM's transfer engine."""
    gateway = gateway_of(request)
    if media_type(request) == TENSORS:
        return _answer(await _results(gateway, verifier, "update_weights", bytes(request.state.body)))
    _, body = await _read(request, UpdateWeights)
    if (body.weight_dir is None) == (body.update_info is None):
        raise BadRequest("Name a `weight_dir`, or give an `update_info`.", param="weight_dir")
    if body.weight_dir is not None:
        return await _renew(gateway, verifier, "reload_weights", body.weight_dir, version=body.weight_version)
    return _answer(await _results(gateway, verifier, "update_weights", body.update_info))


@router.post(
    "/finish_weight_update", **described((FinishUpdate,), shape("verifiers", "weight_version"), right=Right.ADMINISTER)
)
async def finish_weight_update(request: Request, verifier: str | None = None) -> Response:
    """Finishes an update by tensors; verifiers go on with the new weights, unless they were paused before."""
    gateway, body = await _read(request, FinishUpdate)
    return await _renew(gateway, verifier, "finish_weight_update", version=body.weight_version)


@router.post("/abort_requests", **described((AbortRequests,), shape("status", "aborted", "token_ids"), right=Right.ADMINISTER))
async def abort_requests(request: Request, verifier: str | None = None) -> Response:
    """Ends requests by their ids, or all there are; says what each had generated."""
    gateway, body = await _read(request, AbortRequests)
    if verifier is not None:
        _links(gateway, verifier)
    texts = await _abort(gateway, body.request_ids or None, verifier)
    return JSONResponse({"status": "aborted", "aborted": len(texts), "token_ids": texts})


async def _abort(gateway: Gateway, request_ids: list[str] | None, verifier: str | None) -> dict[str, list[list[int]]]:
    tokens = gateway.abort(request_ids, verifier)
    for theirs in (await gateway.peers.ask("abort", request_ids, verifier)).values():
        tokens |= theirs
    return tokens


@router.get("/weight_info", **described(gives=shape("weight_version", "verifiers"), right=Right.KEY))
async def weight_info(request: Request) -> Response:
    """The version of the fleet's newest weights, and that of each verifier."""
    core = gateway_of(request).client.core
    verifiers = {link.member.id: link.weights.version for link in core.ready_links}
    return JSONResponse({"weight_version": core.weights.newest.version, "verifiers": verifiers})


@router.get("/get_world_size", **described(gives=shape("world_size"), right=Right.KEY))
async def get_world_size(request: Request) -> Response:
    """The number of tensor-parallel ranks of all verifiers together."""
    gateway = gateway_of(request)
    return JSONResponse({"world_size": len(gateway.client.core.ready_links) * gateway.settings.verifier.tensor_parallel})


@router.get("/server_info", **described(gives=shape("weight_version", "verifiers"), right=Right.KEY))
async def server_info(request: Request) -> Response:
    """Versions, model, and the weights that each verifier runs."""
    gateway = gateway_of(request)
    core, model = gateway.client.core, gateway.client.model_config
    verifiers = {
        link.member.id: {"paused": link.stats is not None and link.stats.paused, "weights": msgspec.to_builtins(link.weights)}
        for link in core.ready_links
    }
    return JSONResponse(
        {
            "vllm_version": VLLM_VERSION,
            # As vLLM's answer with config_format=json: trainers compare these with their own.
            "vllm_config": {
                "model_config": {
                    "model": gateway.services.models.model_name(),
                    "dtype": str(model.dtype),
                    "max_model_len": model.max_model_len,
                    "logprobs_mode": model.logprobs_mode,
                },
                # Of vLLM's own engines; None: weights come from a directory, or over HTTP.
                "weight_transfer_config": gateway.settings.verifier.engine_args.get("weight_transfer_config"),
                "parallel_config": {"tensor_parallel_size": gateway.settings.verifier.tensor_parallel, "data_parallel_size": 1},
            },
            "model": gateway.services.models.model_name(),
            "mode": gateway.settings.mode,
            "max_model_len": model.max_model_len,
            "weight_version": core.weights.newest.version,
            "verifiers": verifiers,
        }
    )


async def _read(request: Request, kind: type[T]) -> tuple[Gateway, T]:
    gateway = gateway_of(request)
    try:
        # vLLM's routes may be called without a body.
        fields = await read_json(request, bounded=False) if "content-type" in request.headers else {}
        return gateway, msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{error}.") from None


async def _renew(gateway: Gateway, verifier: str | None, method: str, *arguments: Any, version: str | int | None) -> Response:
    """Has verifiers load new weights.  Only an update of all gets a new number, or the others would count as behind."""
    core = gateway.client.core
    number = await gateway.peers.ask_first("update_number")
    name = str(number if version is None else version)
    counted = core.weights.newest.update if verifier else number
    results = await _results(gateway, verifier, method, *arguments, name, counted)
    core.choosing.emptied([verifier] if verifier else core.links)
    return _answer(results, weight_version=name)


async def _hold(gateway: Gateway, verifier: str | None, paused: bool, method: str, *arguments: Any) -> dict[str, Any]:
    """A pause, or its end: also for verifiers that become ready meanwhile or later, unless it is refused."""
    core, change = gateway.client.core, Change(verifier, paused)
    refused = False
    try:
        await _set_pauses(gateway, core.pauses.plus(change))
        results = await _results(gateway, verifier, method, *arguments)
        # Awake in part, they sleep on.
        refused = method == "wake_up" and not all(results.values())
    except (BadRequest, NotFound, NotSupported, NoVerifier):
        refused = True
        raise
    finally:
        if refused:
            await _set_pauses(gateway, core.pauses.without(change))
        else:
            core.pauses = core.pauses.settled(change)
    note = core.standing.update if paused else core.standing.difference_update
    note(link.member.incarnation for link in core.ready_links if link.member.id in results)
    return results


async def _set_pauses(gateway: Gateway, pauses: Pauses) -> None:
    gateway.client.core.pauses = pauses
    await gateway.peers.tell("did not hear of a pause", "hear_of_pauses", msgspec.to_builtins(pauses))


def init_infos(init_info: dict[str, Any], verifiers: int, ranks: int) -> list[dict[str, Any]]:
    """The `init_info` of each verifier, which has so many ranks.  With a `rank_offset` (NCCL) all ranks are numbered through.

    vLLM adds a rank's number within its own engine.
    """
    offset = init_info.get("rank_offset")
    if not isinstance(offset, int):
        return [init_info] * verifiers
    return [{**init_info, "rank_offset": offset + number * ranks} for number in range(verifiers)]


def _answer(results: dict[str, Any], **fields: str | int) -> Response:
    return JSONResponse({**fields, "verifiers": results})


def _links(gateway: Gateway, verifier: str | None) -> list[VerifierLink]:
    links = [link for link in gateway.client.core.ready_links if verifier in (None, link.member.id)]
    if not links and verifier is not None:
        raise NotFound("There is no such verifier.")
    if not links:
        raise NoVerifier
    return links


async def _results(gateway: Gateway, verifier: str | None, method: str, *arguments: Any) -> dict[str, Any]:
    links = _links(gateway, verifier)
    return await _gather(links, method, [arguments] * len(links))


async def _gather(links: list[VerifierLink], method: str, arguments: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The results of a call to each verifier that is not lost meanwhile, by its id.

    One that became ready during an update by tensors has no part in it: it stays behind, without requests.  Raises the first
    error when all calls have ended, and `VerifierLost` if no verifier is left or one has forgotten this gateway.
    """
    calls = (link.call(method, *each) for link, each in zip(links, arguments, strict=True))
    ended = await asyncio.gather(*calls, return_exceptions=True)
    found = {link.member.id: result for link, result in zip(links, ended, strict=True) if not isinstance(result, VerifierGone)}
    if not found:
        raise VerifierLost
    results = {verifier_id: result for verifier_id, result in found.items() if not isinstance(result, BaseException)}
    for verifier_id, result in found.items():
        if isinstance(result, VerifierForgot):
            raise VerifierLost
        if isinstance(result, UtilityError) and results and str(result) == f"ValueError: {NOT_BEGUN}":
            continue
        if isinstance(result, UtilityError):
            raise _to_api_error(verifier_id, str(result), partly=bool(results))
        if isinstance(result, BaseException):
            raise result
    return results


def _to_api_error(verifier_id: str, message: str, partly: bool) -> ApiError:
    """The error for a verifier's failure; `partly`: others have done what was asked."""
    kind, _, text = message.partition(": ")
    if kind == "NotImplementedError":
        return NotSupported(f"{verifier_id}: {text}.")
    if kind == "ValueError" and partly:
        # A 400 would say that nothing has changed, and that the directory can be deleted.
        return EngineFailed(f"{verifier_id}: {text}; other verifiers have done it.")
    if kind == "ValueError":
        return BadRequest(f"{verifier_id}: {text}.")
    return EngineFailed(f"{verifier_id}: {message}.")
