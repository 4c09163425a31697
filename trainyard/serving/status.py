"""Health of the server, the model that it serves, and its metrics."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from trainyard.serving.errors import RETRY_SECONDS, RequestError
from trainyard.serving.metrics import CONTENT_TYPE
from trainyard.serving.openai_answers import ERRORS, ErrorAnswer, ModelCard, ModelList, Responses
from trainyard.serving.outputs import ServedModel
from trainyard.serving.service import EngineService


class Readiness:
    """Whether new requests are accepted."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self.is_draining = False
        """Whether the server ends as soon as running requests have ended."""

    @property
    def is_ready(self) -> bool:
        """Whether a request would be answered."""
        return self._service.is_alive and not self.is_draining

    async def check(self) -> None:
        """RequestError unless a request would be answered. A coroutine, as FastAPI would start a
        thread for a function."""
        if self.is_draining:
            raise RequestError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the server is ending and takes no new requests",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )


class Health(BaseModel):
    """Of GET /health, as Megatron-LM's server says it."""

    status: Literal["ok", "ending", "failed"]
    service: str
    ready: bool


class Live(BaseModel):
    """Of GET /health/live."""

    live: bool


class Ready(BaseModel):
    """Of GET /health/ready."""

    ready: bool


SERVICE = "trainyard"


def status_router(served: ServedModel, readiness: Readiness) -> APIRouter:
    """All of them."""
    router = APIRouter(tags=["status"])
    service = served.service

    def answer(is_good: bool, document: dict[str, Any]) -> JSONResponse:
        status = HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse(document, status)

    async def health() -> Response:
        """Whether the server takes requests, in one word."""
        state = "ending" if readiness.is_draining else "ok" if service.is_alive else "failed"
        ready = readiness.is_ready
        return answer(ready, {"status": state, "service": SERVICE, "ready": ready})

    async def live() -> Response:
        """Whether the engine runs; a server of which it does not is to be restarted."""
        return answer(service.is_alive, {"live": service.is_alive})

    async def ready() -> Response:
        """Whether the server takes requests; not while it ends."""
        return answer(readiness.is_ready, {"ready": readiness.is_ready})

    card = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": SERVICE,
        "max_model_len": service.max_tokens,
    }

    async def models() -> Response:
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [card]})

    async def model(name: str) -> Response:
        """A model by its name."""
        if name != served.name:
            raise RequestError(
                HTTPStatus.NOT_FOUND,
                f"the model {name!r} is not served here; {served.name!r} is",
                "model",
                "model_not_found",
            )
        return JSONResponse(card)

    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(served.metrics.text(), media_type=CONTENT_TYPE)

    for path, endpoint, kind in (
        ("/health", health, Health),
        ("/v1/health", health, Health),
        ("/health/live", live, Live),
        ("/health/ready", ready, Ready),
    ):
        bad: Responses = {503: {"model": kind, "description": "It is not"}}
        router.add_api_route(path, endpoint, response_model=kind, responses=bad)
    denied: Responses = {401: ERRORS[401]}
    router.add_api_route("/v1/models", models, response_model=ModelList, responses=denied)
    named: Responses = {
        401: ERRORS[401],
        404: {"model": ErrorAnswer, "description": "No such model"},
    }
    router.add_api_route("/v1/models/{name:path}", model, response_model=ModelCard, responses=named)
    text: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    router.add_api_route("/metrics", metrics, response_class=Response, responses={**text, **denied})
    return router
