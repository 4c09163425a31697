"""POST /v1/completions, as OpenAI's clients use it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from trainyard.inference.prompts import prompt_tokens
from trainyard.inference.request import TopTokens
from trainyard.serving.access import note
from trainyard.serving.disconnect import unless_gone
from trainyard.serving.errors import bad_request
from trainyard.serving.openai_answers import ERRORS, EVENTS, CompletionAnswer, Responses
from trainyard.serving.openai_fields import CompletionFields
from trainyard.serving.openai_options import check_common, event_stream, text_options, usage
from trainyard.serving.outputs import Output, Outputs, ServedModel, TextOptions
from trainyard.serving.text_stream import TextStream
from trainyard.serving.tokenizing import encoded

DEFAULT_TOKENS = 16


def completions_router(served: ServedModel) -> APIRouter:
    """The route, also under the path of Megatron-LM's servers."""
    router = APIRouter(tags=["OpenAI"])

    async def complete(fields: CompletionFields, request: Request) -> Response:
        """Continue prompts."""
        job = CompletionJob(served, fields, await read_prompts(served, fields))
        if served.limits.log_prompts:
            note(prompt=fields.prompt)
        if fields.stream:
            return await event_stream(request, job.head(), job.chunks())
        return JSONResponse(await unless_gone(request, job.answer()))

    answers: Responses = {200: {"model": CompletionAnswer, **EVENTS}, **ERRORS}
    for path in ("/v1/completions", "/completions"):
        router.add_api_route(
            path,
            complete,
            methods=["POST"],
            responses=answers,
            include_in_schema=path.startswith("/v1"),
        )
    return router


async def read_prompts(served: ServedModel, fields: CompletionFields) -> list[list[int]]:
    """The tokens of every prompt."""
    given = fields.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    prompts: Sequence[str | list[int]] = [given] if is_one else given  # type: ignore
    if len(prompts) > served.limits.max_prompts:
        raise bad_request(
            f"{len(prompts)} prompts, and at most {served.limits.max_prompts} may be", "prompt"
        )
    return [
        list(one) if not isinstance(one, str) else await encoded(prompt_tokens, served, one)
        for one in prompts
    ]


def options_of(served: ServedModel, fields: CompletionFields) -> TextOptions:
    """How the prompts are continued; RequestError for fields that exclude each other."""
    check_common(served, fields)
    if fields.suffix:
        raise bad_request(
            "suffix is not supported: the model does not fill a gap; leave it out", "suffix"
        )
    count, best_of = fields.n or 1, fields.best_of or fields.n or 1
    if best_of < count:
        raise bad_request(f"best_of {best_of} is less than n {count}; raise it", "best_of")
    if best_of > count and fields.stream:
        raise bad_request("best_of compares whole texts; leave stream out", "best_of")
    max_tokens = DEFAULT_TOKENS if fields.max_tokens is None else fields.max_tokens
    if max_tokens == 0 and not fields.echo:
        raise bad_request("max_tokens 0 leaves nothing to return; give echo too", "max_tokens")
    top_n = fields.logprobs
    if top_n is None and best_of > count:
        top_n = 0
    return text_options(
        served,
        fields,
        max_tokens=max_tokens,
        top_n=top_n,
        prompt_log_probs=bool(fields.echo) and fields.logprobs is not None,
    )


class CompletionJob:
    """One request at work."""

    def __init__(
        self, served: ServedModel, fields: CompletionFields, prompts: list[list[int]]
    ) -> None:
        self._served, self._fields, self._prompts = served, fields, prompts
        self._count = fields.n or 1
        self._tries = fields.best_of or self._count
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        if len(prompts) * self._tries > served.limits.max_prompts:
            raise bad_request(
                f"{len(prompts)} prompts make {len(prompts) * self._tries} texts, and at most "
                f"{served.limits.max_prompts} may be in one request; lower n or best_of"
            )
        texts = [prompt for prompt in prompts for _ in range(self._tries)]
        self._outputs = Outputs(served, texts, options_of(served, fields))

    async def answer(self) -> dict[str, Any]:
        """All choices at once."""
        outputs = await self._outputs.finish()
        choices: list[Output] = []
        for begin in range(0, len(outputs), self._tries):
            tried = outputs[begin : begin + self._tries]
            if self._tries > self._count:
                tried = sorted(tried, key=lambda output: -output.mean_log_prob)
            choices += tried[: self._count]
        found = [self._choice(i, output) for i, output in enumerate(choices)]
        self._note(outputs)
        return self.head() | {"choices": found, "usage": usage(self._prompts, outputs)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Choices piece by piece, in any order, each with its index."""
        async with aclosing(self._outputs.steps()) as steps:
            async for step in steps:
                output, first = step.output, len(step.output.tokens) == step.num_new
                text = step.text
                logprobs = None
                if self._fields.logprobs is not None:
                    begin = len(output.tokens) - step.num_new
                    logprobs = self._logprobs(output, begin, first and bool(self._fields.echo))
                if first and self._fields.echo:
                    text = self._prompt_text(output) + text
                if not text and logprobs is None and output.finish_reason is None:
                    continue
                choice = {"index": step.index, "text": text, "logprobs": logprobs}
                choice["finish_reason"] = output.finish_reason
                yield {"choices": [choice]}
        self._note(self._outputs.all)
        options = self._fields.stream_options
        if options is not None and options.include_usage:
            yield {"choices": [], "usage": usage(self._prompts, self._outputs.all)}

    def head(self) -> dict[str, Any]:
        """The fields that an answer and the chunks of a stream begin with."""
        named = {"id": self._id, "object": "text_completion", "created": self._created}
        return named | {"model": self._served.name}

    def _note(self, outputs: Sequence[Output]) -> None:
        note(**usage(self._prompts, outputs))
        if self._served.limits.log_prompts:
            note(texts=[output.text for output in outputs])

    def _prompt_text(self, output: Output) -> str:
        given = self._fields.prompt
        if isinstance(given, str):
            return given
        return self._served.tokenizer.decode(output.request.prompt)

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        text = output.text
        if self._fields.echo:
            text = self._prompt_text(output) + text
        logprobs = None
        if self._fields.logprobs is not None:
            logprobs = self._logprobs(output, 0, bool(self._fields.echo))
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    def _logprobs(self, output: Output, begin: int, with_prompt: bool) -> dict[str, Any]:
        """OpenAI's four lists, of the output's tokens from `begin` on. The first token of a prompt
        has no probability."""
        tokens = output.tokens[begin:]
        values: list[float | None] = list(output.log_probs[begin:])
        places: list[TopTokens | None] = list(output.top[begin:])
        if with_prompt:
            tokens = [*output.request.prompt, *tokens]
            values = [None, *output.prompt_log_probs, *values]
            places = [None, *output.prompt_top, *places]
        return {
            "tokens": [self._served.token_text(token) for token in tokens],
            "token_logprobs": values,
            "top_logprobs": [self._named(place) for place in places] if output.top else None,
            "text_offset": self._offsets(output, begin, with_prompt),
        }

    def _offsets(self, output: Output, begin: int, with_prompt: bool) -> list[int]:
        """Where each token begins in the text, that of an echoed prompt included."""
        if not self._fields.echo:
            return output.offsets[begin:]
        before, places = TextStream(self._served.tokenizer.decode, ()), []
        for token in output.request.prompt:
            places.append(before.length)
            before.push([token], None)
        behind = [before.length + offset for offset in output.offsets[begin:]]
        return [*places, *behind] if with_prompt else behind

    def _named(self, place: TopTokens | None) -> dict[str, float] | None:
        """By the text of each token; of tokens with one text, that of the likeliest."""
        if place is None:
            return None
        return {self._served.token_text(token): value for token, value in reversed(place)}
