"""/admin: routes that change the fleet.  Commands go to the coordinator, which checks them; see `backend.coordinator.commands`.

`POST /admin/{command}` takes the command's fields as a JSON object.  `reload` is not a command of the coordinator: this gateway
carries it out itself, with `gateway.reload`.  `gateway.auth.access` decides who may call.
"""

from dataclasses import asdict
from typing import Any, get_args

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from backend.config.sources import ConfigError
from backend.coordinator.commands import COMMANDS, AnyCommand, CommandRefused, Reason
from gateway.auth.rights import Right
from gateway.http.errors import ApiError, BadRequest, Conflict, NotFound
from gateway.http.openapi import described, shape
from gateway.reload import reload_all
from gateway.requests.body import read_json
from gateway.routes.lists import as_json
from gateway.state import gateway_of

router = APIRouter()

_ERRORS: dict[Reason, type[ApiError]] = {
    "invalid": BadRequest,
    "unknown_member": NotFound,
    "version_mismatch": Conflict,
    "conflict": Conflict,
    "last_verifier": Conflict,
}


@router.get("/admin/operations", **described(gives=shape("version", "operations"), right=Right.ADMINISTER))
async def operations(request: Request) -> Response:
    """Operations that wait, run or ended recently; and the fleet's version."""
    fleet = await gateway_of(request).client.core.directory.look()
    return as_json({"version": fleet.version, "operations": fleet.operations})


@router.get("/admin/operations/{operation_id}", **described(gives=shape("id"), right=Right.ADMINISTER))
async def operation(request: Request, operation_id: int) -> Response:
    """One operation."""
    fleet = await gateway_of(request).client.core.directory.look()
    for each in fleet.operations:
        if each.id == operation_id:
            return as_json(each)
    why = "it ended long ago, or was forgotten when the coordinator restarted"
    raise NotFound(f"There is no operation {operation_id}: {why}.")


@router.post("/admin/reload", **described(gives=shape("changed", "needs_restart", "keys"), right=Right.ADMINISTER))
async def reload(request: Request) -> Response:
    """Reads keys, limits and routing again.  200: they are in force; 400: they are wrong, and nothing has changed."""
    try:
        return JSONResponse(asdict(await reload_all(gateway_of(request))))
    except ConfigError as error:
        raise BadRequest(f"Nothing has changed: {error}.", code="invalid_settings") from None


@router.post(
    "/admin/{command}",
    **described(get_args(AnyCommand), shape("version", "dry_run", "effects", "operation"), right=Right.ADMINISTER),
)
async def administer(request: Request, command: str) -> Response:
    """Changes the fleet.  200: done, or nothing to do; 202: an operation will do it."""
    gateway = gateway_of(request)
    parsed = _command(command, await read_json(request, bounded=False))
    answer = await gateway.client.core.directory.submit(parsed)
    if isinstance(answer, CommandRefused):
        raise _ERRORS[answer.reason](f"{answer.message[:1].upper()}{answer.message[1:]}.", code=answer.reason)
    shown = {"version": answer.version, "dry_run": parsed.dry_run, "effects": answer.effects, "operation": answer.operation}
    return JSONResponse(shown, status_code=200 if answer.operation is None else 202)


def _command(name: str, fields: dict[str, Any]) -> AnyCommand:
    if name not in COMMANDS:
        raise NotFound(f"There is no command `{name[:64]}`; there are {', '.join(COMMANDS)}.")
    if "command" in fields:
        raise BadRequest("Unknown parameter `command`.", param="command", code="unknown_parameter")
    try:
        command: AnyCommand = msgspec.convert({**_without_auto(name, fields), "command": name}, AnyCommand)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{error}.") from None
    return command


def _without_auto(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a command, without `auto`, by which `assign` gives a drafter back to the policy.

    A body that has neither `auto` nor `verifiers` is refused.
    """
    if name != "assign":
        return fields
    kept = {key: value for key, value in fields.items() if key != "auto"}
    auto = fields.get("auto", False)
    if not isinstance(auto, bool):
        raise BadRequest("`auto` must be true or false.", param="auto")
    contradicts = bool(kept.get("verifiers")) if auto else "verifiers" not in kept
    if contradicts:
        raise BadRequest("Name the `verifiers`, or set `auto`; not both.", param="verifiers")
    return kept
