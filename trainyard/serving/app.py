"""The application: all routes over one model, behind the guard."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from trainyard.errors import TrainyardError
from trainyard.logging import shortened
from trainyard.serving.chat import chat_router
from trainyard.serving.completions import completions_router
from trainyard.serving.disconnect import ClientGone
from trainyard.serving.errors import RequestError, bad_request, to_request_error
from trainyard.serving.guard import Guard
from trainyard.serving.megatron_api import megatron_router
from trainyard.serving.outputs import ServedModel
from trainyard.serving.page import page_router
from trainyard.serving.retro_api import retro_router
from trainyard.serving.status import Readiness, status_router
from trainyard.shown_values import shown
from trainyard.version import VERSION

CLIENT_GONE = 499
"""Status in the log for a client that hung up, as nginx writes it."""
NO_JSON = "the body is no JSON document"
RENAMED = {
    "max_len": "max_len is no longer used; give tokens_to_generate",
    "sentences": "sentences is no longer used; give prompts",
}
"""Fields of early versions of PUT /api."""


def build_app(
    served: ServedModel,
    readiness: Readiness,
    *,
    names: frozenset[str],
    key: str | None,
) -> Guard:
    """An ASGI application. names: hosts that it answers to. key: that clients must send."""
    app = FastAPI(
        title="trainyard",
        version=VERSION,
        description=f"Text generation by {served.name}",
        docs_url=None,  # these load scripts of other sites
        redoc_url=None,
    )
    writing = [
        *(megatron_router(served), completions_router(served), chat_router(served)),
        retro_router(served),
    ]
    others = [status_router(served, readiness), page_router()]
    for router in writing:
        app.include_router(router, dependencies=[Depends(readiness.check)])
    for router in others:
        app.include_router(router)
    for router in (*writing, *others):
        served.metrics.paths.update(r.path for r in router.routes if isinstance(r, Route))
    for kind in (RequestError, TrainyardError, TimeoutError, Exception):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _no_route)
    describe(app, has_key=key is not None)
    return Guard(
        app,
        names=names,
        key=key,
        max_body_bytes=served.limits.max_body_bytes,
        metrics=served.metrics,
    )


def describe(app: FastAPI, *, has_key: bool) -> None:
    """Complete the description of the interface: the key, and no status that never comes."""
    document = app.openapi()
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # such requests get 400
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    if has_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]


def _answer(request: Request, error: RequestError) -> Response:
    return JSONResponse(error.document(request.url.path), error.status, headers=dict(error.headers))


async def _failed(request: Request, error: Exception) -> Response:
    return _answer(request, to_request_error(error))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _no_route(request: Request, error: Exception) -> Response:
    """A path or method that does not exist, or a body that could not be read."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, RequestError):
        return _answer(request, error.__cause__)
    status = HTTPStatus(error.status_code)
    if status is HTTPStatus.BAD_REQUEST:
        return _answer(request, bad_request(NO_JSON))
    headers = dict(error.headers or {})
    return _answer(request, RequestError(status, f"{error.detail}", headers=headers))


async def _invalid(request: Request, error: Exception) -> Response:
    """A body that is no JSON, or has fields that are wrong."""
    assert isinstance(error, RequestValidationError)
    # Of a field that takes several types, the part of which the value has the right type.
    first = min(error.errors(), key=lambda one: one["type"].endswith("_type"))
    place = [str(part) for part in first["loc"][1:]]  # without "body"
    if first["type"] == "json_invalid":
        return _answer(request, bad_request(NO_JSON))
    name = place[0] if place else None
    if name in RENAMED:
        return _answer(request, bad_request(RENAMED[name], name))
    value = "" if first["type"] == "missing" else f", got {shown(first['input'])}"
    # Between field and index are names of types, where a field takes several.
    where = ".".join([*place[:1], *(part for part in place[1:] if part.isdigit())])
    return _answer(
        request, bad_request(f"{where or 'the body'}: {first['msg']}{shortened(value, 100)}", name)
    )
