"""The answers of OpenAI's interface, for the description at /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length"]


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    """Of a choice, one entry for each token."""

    tokens: list[str]
    """Texts of the tokens; a part of a character is `token_id:NUMBER`."""
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionAnswer(BaseModel):
    """Of POST /v1/completions; a stream has events with choices whose texts are parts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of an answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of an answer."""

    content: list[TokenLogprob]
    refusal: None


class ChatMessage(BaseModel):
    """The turn that was generated."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """An answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(BaseModel):
    """Of POST /v1/chat/completions; a stream has events whose choices have a `delta`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Most tokens of a prompt with its output."""


class ModelList(BaseModel):
    """Of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class ErrorBody(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Of every request that fails."""

    error: ErrorBody


Responses = dict[int | str, dict[str, Any]]
"""As FastAPI takes them."""

EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENTS: dict[str, Any] = {"content": {"text/event-stream": {"itemSchema": EVENT}}}
"""Of status 200 of what can be streamed, beside the answer at once; as FastAPI describes a stream
of events."""

ERRORS: Responses = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "The request cannot be answered; the message says why",
        401: "The key is missing or wrong",
        404: "No such model",
        413: "The body is too large",
        415: "The body is not declared as JSON",
        429: "Too many requests wait; Retry-After says when to try again",
        500: "The model computes NaN or infinite logits for a text",
        503: "The server ends, or its engine has failed",
        504: "The request took longer than the server allows",
    }.items()
}
