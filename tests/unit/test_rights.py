"""Which routes need no key, which only administrators may call, and which count as requests in flight."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from fastapi import APIRouter

import gateway.routes
from gateway.openapi import described
from gateway.rights import Right, rights
from gateway.routes import page, weights

MODULES = [importlib.import_module(f"gateway.routes.{each.name}") for each in pkgutil.iter_modules(gateway.routes.__path__)]
ASKED = rights(route for module in MODULES if hasattr(module, "router") for route in module.router.routes)


def of(right: Right) -> set[str]:
    return {path for path, each in ASKED.items() if each is right}


def test_only_probes_metrics_pages_and_the_document_need_no_key() -> None:
    api = {"/livez", "/liveness", "/readyz", "/health", "/metrics", "/openapi.json"}
    assert of(Right.NOTHING) - api == set(page.PAGES)
    assert api <= of(Right.NOTHING)


def test_what_changes_the_fleet_is_for_administrators() -> None:
    reads = {"/is_paused", "/is_sleeping", "/weight_info", "/get_world_size", "/server_info"}
    paths = {route.path for route in weights.router.routes}  # type: ignore[attr-defined]
    adapters = {f"{prefix}/{verb}_lora_adapter" for prefix in ("", "/v1") for verb in ("load", "unload")}
    assert of(Right.ADMINISTER) == paths - reads | adapters


def test_what_generates_is_limited() -> None:
    chat = {"/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/messages", "/v1/responses"}
    assert of(Right.GENERATE) == chat | {"/v1/embeddings", "/v1/score", "/v1/rerank", "/inference/v1/generate"}


async def nothing() -> None: ...


def test_a_path_with_parameters_asks_for_a_key_only() -> None:
    router = APIRouter()
    router.add_api_route("/things/{name}", nothing, **described(right=Right.NOTHING))
    with pytest.raises(TypeError, match="has parameters"):
        rights(router.routes)


def test_a_path_asks_for_one_right() -> None:
    router = APIRouter()
    router.add_api_route("/things", nothing, **described(right=Right.NOTHING))
    router.add_api_route("/things", nothing, methods=["POST"], **described())
    with pytest.raises(TypeError, match="different rights"):
        rights(router.routes)
