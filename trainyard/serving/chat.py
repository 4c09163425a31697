"""POST /v1/chat/completions, as OpenAI's clients use it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from trainyard.errors import ConfigError
from trainyard.inference.request import TopTokens
from trainyard.inference.stop_words import INCOMPLETE
from trainyard.serving.access import note
from trainyard.serving.chat_format import ChatFormat
from trainyard.serving.disconnect import unless_gone
from trainyard.serving.errors import bad_request
from trainyard.serving.openai_answers import ERRORS, EVENTS, ChatAnswer, Responses
from trainyard.serving.openai_fields import ChatFields, Message
from trainyard.serving.openai_options import check_common, event_stream, text_options, usage
from trainyard.serving.outputs import Output, Outputs, ServedModel, TextOptions


def chat_router(served: ServedModel) -> APIRouter:
    """The route, also under the path of Megatron-LM's servers."""
    router = APIRouter(tags=["OpenAI"])
    refusal, layout = "", None
    try:
        layout = ChatFormat(served.tokenizer)
    except ConfigError as error:
        refusal = str(error)

    async def chat(fields: ChatFields, request: Request) -> Response:
        """Answer a conversation."""
        if layout is None:
            raise bad_request(refusal)
        prompt = await asyncio.to_thread(_tokens, layout, fields.messages)
        job = ChatJob(served, fields, prompt)
        if served.limits.log_prompts:
            note(messages=[message.model_dump(exclude_none=True) for message in fields.messages])
        if fields.stream:
            return await event_stream(request, job.head("chat.completion.chunk"), job.chunks())
        return JSONResponse(await unless_gone(request, job.answer()))

    answers: Responses = {200: {"model": ChatAnswer, **EVENTS}, **ERRORS}
    for path in ("/v1/chat/completions", "/chat/completions"):
        router.add_api_route(
            path,
            chat,
            methods=["POST"],
            responses=answers,
            include_in_schema=path.startswith("/v1"),
        )
    return router


def _tokens(layout: ChatFormat, messages: Sequence[Message]) -> list[int]:
    """Of a conversation; the parts of a message are joined."""
    turns = []
    for message in messages:
        content = message.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        turns.append({"role": role, "content": content})
    try:
        return layout.tokens(turns)
    except UnicodeEncodeError:
        raise bad_request("a text has half of a surrogate pair, which is no character") from None


def options_of(served: ServedModel, fields: ChatFields, length: int) -> TextOptions:
    """How a conversation of `length` tokens is answered; RequestError for fields that exclude each
    other."""
    check_common(served, fields)
    if fields.tools:
        raise bad_request("tools are not supported; leave them out", "tools")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise bad_request("top_logprobs is of logprobs; give that too", "top_logprobs")
    if None not in (fields.max_tokens, fields.max_completion_tokens):
        raise bad_request("give max_tokens or max_completion_tokens, not both", "max_tokens")
    most = fields.max_tokens or fields.max_completion_tokens
    if most is None:
        most = max(served.service.max_tokens - length, 1)
    top_n = (fields.top_logprobs or 0) if fields.logprobs else None
    return text_options(served, fields, max_tokens=most, top_n=top_n)


class ChatJob:
    """One request at work."""

    def __init__(self, served: ServedModel, fields: ChatFields, prompt: list[int]) -> None:
        self._served, self._fields, self._prompts = served, fields, [prompt]
        count = fields.n or 1
        if count > served.limits.max_prompts:
            raise bad_request(f"n must be at most {served.limits.max_prompts}", "n")
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        options = options_of(served, fields, len(prompt))
        self._outputs = Outputs(served, [prompt] * count, options)

    async def answer(self) -> dict[str, Any]:
        """All choices at once."""
        outputs = await self._outputs.finish()
        self._note()
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": self._logprobs(output, 0),
                "finish_reason": output.finish_reason,
            }
            for index, output in enumerate(outputs)
        ]
        head = self.head("chat.completion")
        return head | {"choices": choices, "usage": usage(self._prompts, outputs)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Choices piece by piece, in any order, each with its index; the role comes with the first
        token of a choice."""
        async with aclosing(self._outputs.steps()) as steps:
            async for step in steps:
                output, delta = step.output, {}
                if len(output.tokens) == step.num_new:
                    delta = {"role": "assistant", "content": ""}
                if step.text:
                    delta["content"] = step.text
                logprobs = self._logprobs(output, len(output.tokens) - step.num_new)
                if not delta and logprobs is None and output.finish_reason is None:
                    continue
                choice = {"index": step.index, "delta": delta, "logprobs": logprobs}
                choice["finish_reason"] = output.finish_reason
                yield {"choices": [choice]}
        self._note()
        options = self._fields.stream_options
        if options is not None and options.include_usage:
            yield {"choices": [], "usage": usage(self._prompts, self._outputs.all)}

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that an answer and the chunks of a stream begin with."""
        named = {"id": self._id, "object": kind, "created": self._created}
        return named | {"model": self._served.name}

    def _note(self) -> None:
        note(**usage(self._prompts, self._outputs.all))
        if self._served.limits.log_prompts:
            note(texts=[output.text for output in self._outputs.all])

    def _logprobs(self, output: Output, begin: int) -> dict[str, Any] | None:
        """Of the tokens from `begin` on; None unless asked for."""
        if not self._fields.logprobs:
            return None
        places: Sequence[TopTokens] = output.top[begin:] or [[] for _ in output.tokens[begin:]]
        content = [
            self._named(token, value) | {"top_logprobs": [self._named(*one) for one in place]}
            for token, value, place in zip(
                output.tokens[begin:], output.log_probs[begin:], places, strict=True
            )
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, value: float) -> dict[str, Any]:
        text = self._served.tokenizer.decode([token])
        is_part = INCOMPLETE in text  # its bytes are unknown here
        return {
            "token": self._served.token_text(token),
            "logprob": value,
            "bytes": None if is_part else list(text.encode()),
        }
