"""From texts to requests, and from completions to texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainyard.errors import ConfigError
from trainyard.inference.config import OutputConfig, SamplingConfig, check_length
from trainyard.inference.decoders import CachedDecoder, Decoder, EncoderDecoder
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.request import Completion, Request, TopTokens
from trainyard.inference.stop_words import LineEnds, StopWords
from trainyard.models.config import TransformerConfig
from trainyard.models.t5.model import T5Model
from trainyard.parallel.device import check_memory


class TextRequests:
    """Requests of one run of a program: the same options for every prompt."""

    def __init__(
        self,
        generator: ModelOnRanks,
        sampling: SamplingConfig,
        output: OutputConfig,
        max_tokens: int,
        *,
        ignore_end: bool = False,
    ) -> None:
        """ignore_end: continue after a token that ends an output."""
        self.generator, self.sampling, self.output = generator, sampling, output
        self.max_tokens = max_tokens
        tokenizer, end = generator.tokenizer, output.termination_id
        if end is not None and end >= tokenizer.vocab_size:
            raise ConfigError(
                f"--termination-id {end}: the tokenizer has {tokenizer.vocab_size} tokens"
            )
        end = generator.end_token if end is None else end
        self.stop_ids = frozenset() if ignore_end else frozenset({end})
        words = output.all_stop_words
        self.stop_words = StopWords(tokenizer, words) if words else None
        self._line_ends = LineEnds(tokenizer)

    def make(self, prompt: Sequence[int], number: int, name: str) -> Request:
        """The request of a prompt. name: of it, for the refusal of one that is too long."""
        output = self.output
        check_prompt(self.generator.config, name, len(prompt), self.max_tokens)
        return Request(
            prompt=prompt,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            number=number,
            min_tokens=output.min_tokens,
            stop_ids=self.stop_ids,
            is_stop=self.stop_words,
            banned_after=self._line_ends if output.prevent_newline_after_colon else None,
            log_probs=output.return_log_probs,
            prompt_log_probs=output.return_log_probs and not output.skip_prompt_log_probs,
            top_n=output.top_n_logprobs,
        )

    def text(self, completion: Completion) -> str:
        """The output without what ended it."""
        tokens, decode = completion.tokens, self.generator.tokenizer.decode
        if completion.finish_reason != "stop":
            return decode(tokens)
        if tokens[-1] in self.stop_ids:
            return decode(tokens[:-1])
        assert self.stop_words is not None
        return self.stop_words.cut(tokens)

    def scores(self, completion: Completion) -> dict[str, Any]:
        """Log-probabilities for a document; {} unless they were asked for."""
        if not self.output.return_log_probs:
            return {}
        found: dict[str, Any] = {"log_probs": completion.log_probs}
        has_prompt = completion.request.prompt_log_probs
        if has_prompt:
            found["prompt_log_probs"] = completion.prompt_log_probs
        if self.output.top_n_logprobs:
            found["top_n_logprobs"] = self._named(completion.top)
            if has_prompt:
                found["prompt_top_n_logprobs"] = self._named(completion.prompt_top)
        return found

    def _named(self, places: Sequence[TopTokens]) -> list[dict[str, float]]:
        """By the text of each token; of tokens with one text, that of the likeliest."""
        decode = self.generator.tokenizer.decode
        return [{decode([token]): value for token, value in reversed(place)} for place in places]


def check_prompt(config: TransformerConfig, name: str, length: int, max_tokens: int) -> None:
    """Refuse a prompt that with its output exceeds the positions of the model."""
    what = f"{name} of {length} tokens"
    if config.model_type == "t5":
        check_length(what, length, 0, config.positions)
        check_length("the decoder's first token", 1, max_tokens - 1, config.positions)
    else:
        check_length(what, length, max_tokens, config.positions)


def build_decoder(
    generator: ModelOnRanks,
    batch_size: int,
    longest: int,
    max_tokens: int,
    *,
    compiled: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    """A decoder with room for this many prompts of at most `longest` tokens, and their outputs.

    compiled: see `graphs`; ConfigError for a model whose step cannot be compiled, and on a CPU for
    weights that do not fit its memory twice. kv_dtype: of keys and values in the cache; unset: the
    model's. ConfigError for a model that keeps more than those."""
    model, size = generator.model, generator.tokenizer.vocab_size
    config = generator.config
    if compiled and (config.model_type == "t5" or config.experts.enabled):
        kind = "a t5" if config.model_type == "t5" else "a mixture of experts"
        raise ConfigError(
            f"--cuda-graph-impl local: the step of {kind} is not compiled; give --cuda-graph-impl "
            "none"
        )
    if compiled and model.device.type == "cpu":
        weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        check_memory(
            "--cuda-graph-impl local: the weights and the compiler's copy of them take",
            2.0 * weights,
            model.device,
            "give --cuda-graph-impl none",
        )
    if kv_dtype is not None and config.model_type in ("t5", "retro"):
        raise ConfigError(
            f"--kv-cache-dtype is not for a {config.model_type}, whose cache holds more than keys "
            "and values; leave it out"
        )
    if isinstance(model, T5Model):
        assert generator.first_token is not None
        first = generator.first_token
        return EncoderDecoder(model, batch_size, max_tokens, first, generator.groups, size)
    return CachedDecoder(
        *(model, batch_size, longest + max_tokens, generator.groups, size),
        compiled=compiled,
        kv_dtype=kv_dtype,
    )
