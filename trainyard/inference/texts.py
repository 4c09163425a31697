"""From texts to requests, and from completions to texts.

Stop words are found in the text and not in the tokens, since a tokenizer may join the end of a word
with what follows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from trainyard.errors import ConfigError
from trainyard.inference.config import OutputConfig, SamplingConfig, check_length
from trainyard.inference.decoders import CachedDecoder, Decoder, EncoderDecoder
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.request import Completion, Request, TopTokens
from trainyard.models.config import TransformerConfig
from trainyard.models.t5.model import T5Model
from trainyard.parallel.device import check_memory
from trainyard.tokenizers.base import Tokenizer

INCOMPLETE = "\ufffd"
"""Decoded from the first bytes of a character."""

EMPTY_TOKENS = 8
"""Tokens that may decode to nothing within a stop word."""


class StopWords:
    """Whether an output ends with a text that holds a stop word, and the text before it."""

    def __init__(self, tokenizer: Tokenizer, words: Sequence[str]) -> None:
        self._decode, self._words = tokenizer.decode, tuple(words)
        # A token other than an empty one has at least a byte.
        self._reach = max(len(word.encode()) for word in words) + EMPTY_TOKENS

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Whether the last token completes a stop word."""
        return self._begin(tokens[-self._reach :]) is not None

    def cut(self, tokens: Sequence[int]) -> str:
        """The text of an output without the stop word that its last token completed."""
        text = self._decode(list(tokens))
        begin = self._begin(tokens)
        return text if begin is None else text[:begin]

    def _begin(self, tokens: Sequence[int]) -> int | None:
        """Where the first stop word that the last token completed begins in the text."""
        before = len(self._decode(list(tokens[:-1])).rstrip(INCOMPLETE))
        return find_stop(self._decode(list(tokens)), before, self._words)


def find_stop(text: str, before: int, words: Sequence[str]) -> int | None:
    """Where the first of the words begins that ends behind the first `before` characters."""
    places = (text.find(word, max(before - len(word) + 1, 0)) for word in words)
    return min((place for place in places if place >= 0), default=None)


class LineEnds:
    """The tokens that may not follow a token with --prevent-newline-after-colon: behind a colon,
    those whose text begins with the end of a line."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token: int) -> Sequence[int]:
        """Those that may not follow this one."""
        return self._banned if self._tokenizer.decode([token]).endswith(":") else ()

    @cached_property
    def _banned(self) -> tuple[int, ...]:
        decode = self._tokenizer.decode
        ids = range(self._tokenizer.vocab_size)
        return tuple(token for token in ids if decode([token]).startswith("\n"))


def prompt_tokens(tokenizer: Tokenizer, text: str, *, add_bos: bool = False) -> list[int]:
    """A prompt as tokens. An empty one is the token that begins or ends documents."""
    bos = getattr(tokenizer, "bos", None)
    first = tokenizer.eod if bos is None else int(bos)
    tokens = tokenizer.encode(text)
    if not tokens or (add_bos and tokens[0] != first):
        return [first, *tokens]
    return tokens


def chat_tokens(tokenizer: Any, text: str) -> list[int]:
    """A conversation of one user's turn, and what invites the model to answer it."""
    lay_out = getattr(tokenizer, "tokenize_conversation", None)
    if lay_out is None:
        raise ConfigError(
            f"--chat: the checkpoint's tokenizer ({tokenizer.config.tokenizer_type}) has no format "
            "of conversations, so the model was not tuned on any; leave it out"
        )
    turns = [{"role": "user", "content": text}]
    ids: list[int] = lay_out(turns, return_target=False, add_generation_prompt=True).tolist()
    return ids


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
