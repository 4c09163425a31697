"""PUT /api: the interface of Megatron-LM's tools/run_text_generation_server.py.

Every field has an effect; what the program refuses with status 200 and a bare string is refused
with status 400 and `{"message": ...}`, which its client reads. Beam search is that of its release
0.7."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from trainyard.inference.config import SamplingConfig
from trainyard.inference.prompts import prompt_tokens
from trainyard.serving.access import note
from trainyard.serving.disconnect import unless_gone
from trainyard.serving.errors import bad_request
from trainyard.serving.openai_answers import Responses
from trainyard.serving.openai_fields import MAX_COUNT, Count
from trainyard.serving.outputs import Output, Outputs, ServedModel, TextOptions
from trainyard.serving.tokenizing import encoded

MAX_PROMPTS = 128
MAX_BEAMS = 64
Probability = Annotated[float, Field(ge=0.0, le=1.0, strict=True)]


class MegatronFields(BaseModel):
    """The body of PUT /api."""

    model_config = ConfigDict(extra="forbid")

    prompts: Annotated[list[StrictStr], Field(min_length=1, max_length=MAX_PROMPTS)]
    tokens_to_generate: Count = 64
    """Most new tokens; 0 needs `logprobs`: the prompts are scored alone."""
    logprobs: StrictBool = False
    """Return the log-probability of every token but the first."""
    temperature: Annotated[float, Field(gt=0.0, le=100.0, strict=True)] | None = None
    """Unset: --temperature of the server, which is 1.0."""
    top_k: Annotated[StrictInt, Field(ge=0, le=1000)] | None = None
    """0: all tokens. Unset, and without top_p: --top_k of the server."""
    top_p: Probability | None = None
    """0: all tokens; excludes top_k. Unset, and without top_k: --top_p of the server."""
    top_p_decay: Probability = 0.0
    """Multiplies top_p after each token; 0: it stays."""
    top_p_bound: Probability = 0.0
    """Least top_p that top_p_decay leads to."""
    add_BOS: StrictBool = False  # noqa: N815  # Megatron-LM's name
    """Begin each prompt with the tokenizer's first token."""
    stop_on_double_eol: StrictBool = False
    """End an output at an empty line."""
    stop_on_eol: StrictBool = False
    """End an output at the end of a line."""
    prevent_newline_after_colon: StrictBool = False
    """Do not choose the end of a line right after a colon."""
    random_seed: Count | None = None
    """Unset: another one for each request."""
    stop_token: Annotated[StrictInt, Field(ge=0, le=MAX_COUNT)] | None = None
    """Token that ends an output; unset: the tokenizer's end of document, as 50256 is GPT-2's."""
    length_penalty: Annotated[float, Field(ge=-100.0, le=100.0, strict=True)] = 1.0
    """Of `beam_width`: a text scores its log-probability over its length to this power."""
    beam_width: Annotated[StrictInt, Field(ge=1, le=MAX_BEAMS)] | None = None
    """Search the likeliest texts of one prompt with this many beams, in place of sampling."""
    no_log: StrictBool = False
    """Leave the texts out of the access log, whatever --log-prompts says."""


class MegatronAnswer(BaseModel):
    """Of PUT /api."""

    text: list[str]
    """Prompt and output."""
    segments: list[list[str]]
    """The same as the texts of tokens."""
    tokens: list[list[int]]
    logprobs: list[list[float]] | None = None
    """Of every token but the first, if asked for."""
    scores: list[float] | None = None
    """With beam_width: of each text, the best first."""


class MegatronError(BaseModel):
    """Of a request that fails."""

    message: str


def megatron_router(served: ServedModel) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["Megatron-LM"])

    async def generate(fields: MegatronFields, request: Request) -> Response:
        """Continue prompts."""
        check(fields)
        work = searched if fields.beam_width else generated
        answer = await unless_gone(request, work(served, fields))
        new = sum(map(len, answer["tokens"]))
        note(prompts=len(fields.prompts), total_tokens=new)
        if served.limits.log_prompts and not fields.no_log:
            note(texts=answer["text"])
        return JSONResponse(answer)

    answers: Responses = {
        status: {"model": MegatronError, "description": text}
        for status, text in {
            400: "The request cannot be answered; the message says why",
            401: "The key is missing or wrong",
            413: "The body is too large",
            415: "The body is not declared as JSON",
            429: "Too many requests wait; Retry-After says when to try again",
            500: "The model computes NaN or infinite logits for a text",
            503: "The server ends, or its engine has failed",
            504: "The request took longer than the server allows",
        }.items()
    }
    answers[200] = {"model": MegatronAnswer}
    router.add_api_route("/api", generate, methods=["PUT"], responses=answers)
    return router


def check(fields: MegatronFields) -> None:
    """Raise RequestError for fields that exclude each other."""
    if fields.tokens_to_generate == 0 and not fields.logprobs:
        raise bad_request("tokens_to_generate 0 leaves nothing to return; give logprobs too")
    if fields.top_k and fields.top_p:
        raise bad_request("top_k and top_p exclude each other; leave one out", "top_p")
    if not fields.top_p and (fields.top_p_decay or fields.top_p_bound):
        raise bad_request("top_p_decay and top_p_bound change top_p; give that too", "top_p")
    if fields.top_p_bound > (fields.top_p or 0.0):
        raise bad_request("top_p_bound is the least top_p; lower it to that", "top_p_bound")
    if not all(fields.prompts) and not fields.add_BOS:
        raise bad_request("empty prompts need add_BOS", "prompts")
    if fields.length_penalty != 1.0 and not fields.beam_width:
        raise bad_request("length_penalty is of beam_width; give that too", "length_penalty")
    if fields.beam_width and len(fields.prompts) > 1:
        raise bad_request("beam_width takes one prompt at a time", "beam_width")
    if fields.beam_width and (fields.stop_on_eol or fields.stop_on_double_eol or fields.logprobs):
        raise bad_request(
            "beam_width ends texts with stop_token alone, and returns scores; leave stop_on_eol, "
            "stop_on_double_eol and logprobs out",
            "beam_width",
        )


async def generated(served: ServedModel, fields: MegatronFields) -> dict[str, Any]:
    """The answer by sampling."""
    lines = ("\n",) * fields.stop_on_eol + ("\n\n",) * fields.stop_on_double_eol
    options = TextOptions(
        max_tokens=fields.tokens_to_generate,
        sampling=sampling_of(served, fields),
        stop_words=lines,
        stop_ids=frozenset({_end(served, fields)}),
        log_probs=fields.logprobs,
        prompt_log_probs=fields.logprobs,
        prevent_newline_after_colon=fields.prevent_newline_after_colon,
    )
    outputs = await Outputs(served, await _prompts(served, fields), options).finish()
    tokens = [[*output.request.prompt, *output.tokens] for output in outputs]
    texts = [prompt + o.text for prompt, o in zip(fields.prompts, outputs, strict=True)]
    answer = _answer(served, texts, tokens)
    if fields.logprobs:
        answer["logprobs"] = [_log_probs(output) for output in outputs]
    return answer


def sampling_of(served: ServedModel, fields: MegatronFields) -> SamplingConfig:
    """How tokens are drawn."""
    defaults = served.defaults
    is_filtered = fields.top_k is not None or fields.top_p is not None
    return SamplingConfig(
        temperature=defaults.temperature if fields.temperature is None else fields.temperature,
        top_k=(fields.top_k or 0) if is_filtered else defaults.top_k,
        top_p=(fields.top_p or 0.0) if is_filtered else defaults.top_p,
        top_p_decay=fields.top_p_decay,
        top_p_bound=fields.top_p_bound,
        seed=served.seed_of(fields.random_seed),
    )


async def searched(served: ServedModel, fields: MegatronFields) -> dict[str, Any]:
    """The answer by beam search, which the engine waits for: it runs between two of its steps."""
    if served.num_ranks > 1:
        raise bad_request("beam_width needs a model on one rank; leave it out", "beam_width")
    ((prompt,), end) = await _prompts(served, fields), _end(served, fields)
    count, most = max(fields.tokens_to_generate, 1), served.service.max_tokens
    if len(prompt) + count > most:
        raise bad_request(
            f"the prompt has {len(prompt)} tokens and {count} are to be generated, and the model "
            f"takes {most} together; shorten one"
        )
    arguments = {"prompt": prompt, "count": count, "width": fields.beam_width, "end": end}
    arguments["length_penalty"] = fields.length_penalty
    found: list[tuple[float, list[int]]] = await served.call("beam_search", arguments)
    decode = served.tokenizer.decode
    texts = [fields.prompts[0] + decode([t for t in tokens if t != end]) for _, tokens in found]
    answer = _answer(served, texts, [[*prompt, *tokens] for _, tokens in found])
    return answer | {"scores": [score for score, _ in found]}


async def _prompts(served: ServedModel, fields: MegatronFields) -> list[list[int]]:
    if any(len(prompt) > served.limits.max_body_bytes for prompt in fields.prompts):
        raise bad_request("a prompt is longer than a request may be", "prompts")
    return [
        await encoded(prompt_tokens, served, prompt, add_bos=fields.add_BOS)
        for prompt in fields.prompts
    ]


def _end(served: ServedModel, fields: MegatronFields) -> int:
    return served.end_token if fields.stop_token is None else fields.stop_token


def _log_probs(output: Output) -> list[float]:
    return [*output.prompt_log_probs, *output.log_probs]


def _answer(
    served: ServedModel, texts: Sequence[str], tokens: Sequence[Sequence[int]]
) -> dict[str, Any]:
    decode = served.tokenizer.decode
    segments = [[decode([token]) for token in row] for row in tokens]
    return {"text": list(texts), "segments": segments, "tokens": [list(row) for row in tokens]}
