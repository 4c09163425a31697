"""What both kinds of completions of OpenAI's interface have in common: options, usage, events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import Request
from pydantic import TypeAdapter

from trainyard.inference.config import SamplingConfig
from trainyard.serving.access import note
from trainyard.serving.disconnect import unless_gone
from trainyard.serving.errors import RequestError, bad_request, to_request_error
from trainyard.serving.event_stream import EventResponse
from trainyard.serving.openai_fields import MAX_STOPS, GenerationFields
from trainyard.serving.outputs import Output, ServedModel, TextOptions

DOCUMENT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
"""Writes JSON in a third of the time of the standard library."""
DONE = b"data: [DONE]\n\n"


def check_common(served: ServedModel, fields: GenerationFields) -> None:
    """Refuse another model, and fields that would have to be ignored."""
    if fields.model not in (None, served.name):
        raise RequestError(
            HTTPStatus.NOT_FOUND,
            f"the model {fields.model!r} is not served here; {served.name!r} is",
            "model",
            "model_not_found",
        )
    if fields.logit_bias:
        raise bad_request("logit_bias is not supported; leave it out", "logit_bias")
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options is of stream; give that too", "stream_options")


def text_options(
    served: ServedModel,
    fields: GenerationFields,
    *,
    max_tokens: int,
    top_n: int | None,
    prompt_log_probs: bool = False,
) -> TextOptions:
    """The options of a request. top_n: likeliest tokens beside each; None: no log-probabilities.

    Raises RequestError or ConfigError for those that exclude each other."""
    stop = fields.stop or ()
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens {min_tokens} is more than {max_tokens}", "min_tokens")
    stop_ids = frozenset(fields.stop_token_ids or ())
    if not fields.ignore_eos:
        stop_ids |= {served.end_token}
    return TextOptions(
        max_tokens=max_tokens,
        sampling=sampling_of(served, fields),
        min_tokens=min_tokens,
        stop_words=(stop,) if isinstance(stop, str) else tuple(stop[:MAX_STOPS]),
        stop_ids=stop_ids,
        log_probs=top_n is not None,
        prompt_log_probs=prompt_log_probs,
        top_n=top_n or 0,
    )


def sampling_of(served: ServedModel, fields: GenerationFields) -> SamplingConfig:
    """How tokens are drawn. Top-p 1 is the same as none."""
    defaults = served.defaults
    temperature = defaults.temperature if fields.temperature is None else fields.temperature
    is_filtered = fields.top_p is not None or fields.top_k is not None
    top_p = fields.top_p if is_filtered else defaults.top_p
    top_k = fields.top_k if is_filtered else defaults.top_k
    return SamplingConfig(
        temperature=temperature,
        top_k=top_k or 0,
        top_p=0.0 if top_p in (None, 1.0) else top_p,
        min_p=0.0 if temperature == 0.0 else fields.min_p or 0.0,
        repetition_penalty=fields.repetition_penalty or 1.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        seed=served.seed_of(fields.seed),
    )


def usage(prompts: Sequence[Sequence[int]], outputs: Sequence[Output]) -> dict[str, int]:
    """Tokens of a request: each prompt once, and all that was generated."""
    read = sum(map(len, prompts))
    made = sum(len(output.tokens) for output in outputs)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def encoded(document: dict[str, Any]) -> bytes:
    """JSON without spaces, in ASCII: clients that split a stream into lines as Python does would
    cut it at U+2028."""
    found = DOCUMENT.dump_json(document)
    if found.isascii():
        return found
    return json.dumps(json.loads(found), separators=(",", ":")).encode()


async def event_stream(
    request: Request, head: dict[str, Any], chunks: AsyncGenerator[dict[str, Any], None]
) -> EventResponse:
    """A response of chunks, server-sent events of the fields of `head` and their own. What raises
    before the first one is an error of the request; what raises later is the last event, since the
    status has been sent."""
    first = await unless_gone(request, anext(chunks))
    prefix = b"data: " + encoded(head)[:-1] + b","  # once, as a stream has an event for each token

    def event(chunk: dict[str, Any]) -> bytes:
        return prefix + encoded(chunk)[1:] + b"\n\n"

    async def events() -> AsyncIterator[bytes]:
        async with aclosing(chunks):
            yield event(first)
            try:
                async for chunk in chunks:
                    yield event(chunk)
            except Exception as error:
                failed = to_request_error(error)
                note(error=failed.message)
                yield b"data: " + encoded(failed.openai()) + b"\n\n"
                return
            yield DONE

    return EventResponse(events(), request.scope)
