"""The requests of OpenAI's interface, as far as they are answered, with the extensions that vLLM's
clients send. Every other field is refused, since none is ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from trainyard.inference.config import LEAST_PENALTY

MAX_TOP = 20
"""Likeliest tokens in each place, at most."""
MAX_STOPS = 16
MAX_COUNT = 2**31 - 1

Count = Annotated[StrictInt, Field(ge=0, le=MAX_COUNT)]
Word = Annotated[StrictStr, Field(min_length=1, max_length=1000)]
Tokens = Annotated[list[Count], Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, strict=True)]


class Fields(BaseModel):
    """A part of a request, in which no unknown field is."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: StrictBool = False
    """Whether the last chunk counts tokens."""


class GenerationFields(Fields):
    """What both kinds of completions take."""

    model: StrictStr | None = None
    """Name of the model, as /v1/models has it; unset: the one that is served."""
    n: Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)] | None = None
    """Texts for each prompt."""
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    stop: Word | Annotated[list[Word], Field(max_length=MAX_STOPS)] | None = None
    """Texts that end an output; they are left out of it."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0, strict=True)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] | None = None
    top_k: Count | None = None
    """0: all tokens."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0, strict=True)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_PENALTY, le=100.0, strict=True)] | None = (
        None
    )
    seed: Count | None = None
    min_tokens: Count | None = None
    ignore_eos: StrictBool = False
    """Whether to continue after the token that ends a document."""
    stop_token_ids: Annotated[list[Count], Field(max_length=MAX_STOPS)] | None = None
    priority: Annotated[StrictInt, Field(ge=-MAX_COUNT, le=MAX_COUNT)] = 0
    """Lower ones run first."""
    logit_bias: dict[str, Any] | None = None
    """Refused unless empty."""
    user: StrictStr | None = None
    """Of the client, for its own records."""


class CompletionFields(GenerationFields):
    """The body of POST /v1/completions."""

    prompt: StrictStr | Tokens | Annotated[list[StrictStr | Tokens], Field(min_length=1)]
    """A text or its tokens, or a list of such."""
    max_tokens: Count | None = None
    """Most new tokens; unset: 16. 0 with `echo`: the prompt is scored alone."""
    best_of: Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)] | None = None
    """Texts of which the `n` with the highest mean log-probability are returned."""
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP)] | None = None
    """Log-probabilities of the tokens, and of this many likeliest ones in each place."""
    echo: StrictBool | None = None
    """Whether to return the prompt before the output."""
    suffix: StrictStr | None = None
    """Refused: no text is put before another one."""


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: StrictStr


class Message(Fields):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | list[TextPart]
    name: StrictStr | None = None


class ResponseFormat(Fields):
    """`response_format`; text alone."""

    type: Literal["text"]


class ChatFields(GenerationFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)] | None = None
    """Most new tokens; unset: as many as the model takes."""
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)] | None = None
    """OpenAI's newer name of `max_tokens`."""
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    """Refused unless empty."""
