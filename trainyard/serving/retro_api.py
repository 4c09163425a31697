"""POST /v1/retro/completions: a Retro continues a prompt with given neighbours of its chunks.

The client retrieves: it sends the neighbours as texts or tokens. `inference.neighbors` has the
arithmetic. Other requests wait meanwhile, as for beam search."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, StrictInt, StrictStr

from trainyard.inference.prompts import prompt_tokens
from trainyard.retrieval.shape import NeighborShape
from trainyard.serving.access import note
from trainyard.serving.disconnect import unless_gone
from trainyard.serving.errors import bad_request
from trainyard.serving.openai_answers import ERRORS, FinishReason, Responses, Usage
from trainyard.serving.openai_fields import MAX_COUNT, Count, Fields, GenerationFields, Tokens
from trainyard.serving.openai_options import check_common, sampling_of
from trainyard.serving.outputs import ServedModel
from trainyard.serving.tokenizing import encoded

PATH = "/v1/retro/completions"
SHARED = {"model", "temperature", "top_p", "top_k", "seed"}
"""Fields that mean what they mean in /v1/completions."""


class RetroFields(Fields):
    """The body of POST /v1/retro/completions."""

    model: StrictStr | None = None
    """Name of the model, as /v1/models has it; unset: the one that is served."""
    prompt: StrictStr | Tokens
    """A text or its tokens: at least a chunk for each entry of `neighbors`."""
    neighbors: Annotated[list[list[StrictStr | Tokens]], Field(min_length=1)]
    """For each of the first chunks of the prompt, its neighbours with what follows them, the
    nearest first; an empty list for a chunk without any. Longer ones are cut."""
    max_tokens: Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)] = 16
    """Most new tokens."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0, strict=True)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] | None = None
    top_k: Count | None = None
    """0: all tokens."""
    seed: Count | None = None


class RetroChoice(BaseModel):
    """A text."""

    index: int
    text: str
    tokens: list[int]
    """That were generated, with the one that ends a document."""
    finish_reason: FinishReason


class RetroAnswer(BaseModel):
    """Of POST /v1/retro/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[RetroChoice]
    usage: Usage


def retro_router(served: ServedModel) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["Retro"])

    async def complete(fields: RetroFields, request: Request) -> Response:
        """Continue a prompt with given neighbours of its chunks."""
        if served.limits.log_prompts:
            note(prompt=fields.prompt)
        return JSONResponse(await unless_gone(request, answer(served, fields)))

    answers: Responses = {200: {"model": RetroAnswer}, **ERRORS}
    router.add_api_route(PATH, complete, methods=["POST"], responses=answers)
    return router


async def answer(served: ServedModel, fields: RetroFields) -> dict[str, Any]:
    """The text. RequestError or ConfigError for another model, and for neighbours or lengths that
    the model does not take."""
    shape = _neighbors(served)
    shared = GenerationFields(**fields.model_dump(include=SHARED))
    check_common(served, shared)
    sampling = sampling_of(served, shared)
    prompt = await _tokens(served, fields.prompt, "prompt")
    shape.check_counts(fields.neighbors, len(prompt))  # before a million are encoded
    chunks = [
        [await _tokens(served, one, "neighbors") for one in chunk] for chunk in fields.neighbors
    ]
    most = served.service.max_tokens
    if len(prompt) + fields.max_tokens > most:
        raise bad_request(
            f"the prompt has {len(prompt)} tokens and {fields.max_tokens} are to be generated, and "
            f"the model takes {most} together; shorten one"
        )
    arguments = {"prompt": prompt, "chunks": chunks, "count": fields.max_tokens}
    made = await served.call("with_neighbors", arguments | {"sampling": asdict(sampling)})
    return _document(served, len(prompt), made)


def _neighbors(served: ServedModel) -> NeighborShape:
    """What the model takes. RequestError if it is no Retro, or on several ranks."""
    if served.neighbors is None:
        raise bad_request(
            f"{PATH} is for a Retro, and {served.name} is a {served.kind}, which has no "
            "neighbours; put contexts in the prompt of /v1/completions"
        )
    if served.num_ranks > 1:
        raise bad_request(f"{PATH} needs a model on one rank; start another server for it")
    return served.neighbors


async def _tokens(served: ServedModel, given: str | list[int], name: str) -> list[int]:
    if isinstance(given, str):
        return await encoded(prompt_tokens, served, given)
    vocab_size = served.tokenizer.vocab_size
    if any(token >= vocab_size for token in given):
        raise bad_request(f"{name}: tokens must be in [0, {vocab_size})", name)
    return given


def _document(served: ServedModel, num_read: int, made: list[int]) -> dict[str, Any]:
    is_ended = made[-1] == served.end_token
    text = served.tokenizer.decode(made[:-1] if is_ended else made)
    reason = "stop" if is_ended else "length"
    counts = {"prompt_tokens": num_read, "completion_tokens": len(made)}
    counts["total_tokens"] = num_read + len(made)
    note(**counts)
    if served.limits.log_prompts:
        note(texts=[text])
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.name,
        "choices": [{"index": 0, "text": text, "tokens": made, "finish_reason": reason}],
        "usage": counts,
    }
