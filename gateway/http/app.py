"""The ASGI application: routes, middleware and error handlers around one `Gateway`.  Runs in the gateway's event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.auth.access import Access
from gateway.fleet.balancing import keep_balanced
from gateway.fleet.pauses import Pauses
from gateway.http.errors import translate
from gateway.http.middleware import Envelope
from gateway.reload import catch_up
from gateway.routes import (
    admin,
    batches,
    conversations,
    files,
    generate,
    messages,
    models,
    operations,
    page,
    pooling,
    responses,
    tokens,
    weights,
)
from gateway.state import Gateway

EXPOSED_HEADERS = (
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-request-id",
    "openai-processing-ms",
    "x-outrider-gateway-ms",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
"""Response headers that web pages of other origins may read, beyond those always exposed."""


def build_app(gateway: Gateway) -> FastAPI:
    """The application, which also starts and stops background work."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        core, peers = gateway.client.core, gateway.peers
        core.pauses = msgspec.convert(next(iter((await peers.ask("pauses")).values()), core.pauses), Pauses)
        if not peers.is_first:
            await catch_up(gateway)
        gateway.client.start()
        balancing = asyncio.create_task(keep_balanced(core, gateway.settings))
        await gateway.quotas.start()
        await gateway.services.models.init_static_loras()
        gateway.take_adapters(max((await peers.ask("adapters")).values(), key=len, default=[]))
        gateway.batches.start(app, gateway)
        try:
            yield
        finally:
            balancing.cancel()
            await gateway.batches.close()
            await gateway.responses.close()
            await gateway.quotas.close()
            gateway.client.shutdown()
            if gateway.tracing is not None:
                await asyncio.to_thread(gateway.tracing.close)

    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    parts = (
        weights,
        admin,
        generate,
        tokens,
        messages,
        responses,
        conversations,
        files,
        batches,
        pooling,
        models,
        operations,
        page,
    )
    for routes in parts:
        app.include_router(routes.router)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _http_error)
    Access(gateway).guard(app)
    app.add_middleware(Envelope, gateway=gateway)
    if gateway.settings.gateway.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=gateway.settings.gateway.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers Starlette's own 404 and 405, and wrong parameters in a URL.  All other errors reach `Envelope`."""
    known = translate(error)
    if known.status == 404:
        known.message = f"Unknown URL: {request.method} {ascii(request.scope['path'][:128])[1:-1]}"
    allowed = getattr(error, "headers", None) or {}
    return JSONResponse(known.body_for(request.scope["path"]), status_code=known.status, headers={**allowed, **known.headers()})
