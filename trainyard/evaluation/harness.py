"""The backend of lm-evaluation-harness: its three kinds of requests, answered by `scoring` and
`generation`. Importing this module registers it as `--model trainyard`. Needs lm-eval (the extra of
this name); `stages.lm_eval` runs its command line with it."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from trainyard.checkpoint.model import SCORERS
from trainyard.errors import ConfigError
from trainyard.evaluation.continuations import Continuations
from trainyard.evaluation.generation import generated
from trainyard.evaluation.ranks import evaluation_ranks
from trainyard.evaluation.scoring import Request, Score, Scorer, is_greedy
from trainyard.inference.config import LayoutConfig, SamplingConfig
from trainyard.inference.load import load_on_ranks
from trainyard.parallel.groups import gather_objects

NEW_TOKENS = 256
"""Tokens of an answer, unless the task says otherwise; the default of the harness."""


@register_model("trainyard")
class TrainyardLM(LM):
    """A checkpoint of any kind, on any number of ranks.

    Every rank of a launcher runs the harness with all requests; the copies of the model share them,
    and every rank gets all answers."""

    def __init__(
        self,
        load: str,
        batch_size: int | str = 4,
        device: str | None = None,
        max_length: int | None = None,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        max_batch_size: int | None = None,
    ) -> None:
        """load: checkpoint, as of stages.evaluate. max_length: tokens of a window; unset: the
        sequence length of the training. max_batch_size: of the harness, which has no use here."""
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ConfigError(f"--batch_size {batch_size} must be a number, at least 1")
        layout = LayoutConfig(
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
        )
        stack = ExitStack()
        atexit.register(stack.close)
        self._groups, where = stack.enter_context(evaluation_ranks(layout, device or "auto"))
        loaded = load_on_ranks(load, where, layout=layout, groups=self._groups, families=SCORERS)
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._batch_size = int(batch_size)
        self._scorer = Scorer(loaded.model, self._groups, self._batch_size)
        self._continuations = Continuations.of(loaded.tokenizer)
        self.max_length = max_length or loaded.config.seq_length
        """Tokens of a window."""
        if self.max_length > loaded.config.positions:
            raise ConfigError(
                f"max_length={max_length} is longer than the {loaded.config.positions} positions "
                "of the model"
            )

    @property
    def tokenizer_name(self) -> str:
        """For the caches of the harness."""
        return f"trainyard-{self._tokenizer.config.tokenizer_type}-{self._tokenizer.vocab_size}"

    # --- likelihoods --------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """For each (context, continuation): its log-likelihood in nats, and whether every token of
        it is the likeliest."""
        asked = []
        for context, continuation in (request.args for request in requests):
            pair = self._continuations.behind(context, continuation)
            asked.append(self._continuations.fitted(*pair, self.max_length)[0])
        answers = [
            (-score.loss, is_greedy(request, score))
            for request, score in zip(asked, self._scored(asked), strict=True)
        ]
        self._keep("loglikelihood", requests, answers)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """For each text: its log-likelihood in nats, in windows without overlap as the harness cuts
        them, from the token that begins a text."""
        windows: list[Request] = []
        counts = []
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(
                token_list=self._continuations.plain.encode(text),
                prefix_token=self._continuations.beginning[-1],
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [Request([*c, *p], len(p)) for c, p in map(make_disjoint_window, pairs)]
            windows += own
            counts.append(len(own))
        scores, at = self._scored(windows), 0
        answers = []
        for count in counts:
            answers.append(-sum(score.loss for score in scores[at : at + count]))
            at += count
        self._keep("loglikelihood_rolling", requests, answers)
        return answers

    def _scored(self, requests: Sequence[Request]) -> list[Score]:
        """All scores, on all ranks; each copy of the model computes its share."""
        dp, dp_rank = self._groups.dims.dp, self._groups.dp_rank
        own = self._scorer.score(requests[dp_rank::dp])
        shares = gather_objects(own, self._groups.dp)
        return [shares[number % dp][number // dp] for number in range(len(requests))]

    # --- generation ---------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """For each (context, options): the text behind it, up to the first of `until`."""
        dp, dp_rank = self._groups.dims.dp, self._groups.dp_rank
        own = {
            number: self._generated(number, *requests[number].args)
            for number in range(dp_rank, len(requests), dp)
        }
        found = {
            n: text for share in gather_objects(own, self._groups.dp) for n, text in share.items()
        }
        answers = [found[number] for number in range(len(requests))]
        self._keep("generate_until", requests, answers)
        return answers

    def _generated(self, number: int, context: str, options: dict[str, Any]) -> str:
        stops, count, sampling = generation_options(options)
        room = self.max_length - count
        if room < 1:
            raise ConfigError(
                f"max_gen_toks {count} leaves no room for a context in {self.max_length} tokens; "
                "lower it with --gen_kwargs, or raise max_length"
            )
        prompt = self._continuations.whole(context)[-room:] or self._continuations.beginning
        (output,) = generated(
            self._model,
            self._tokenizer,
            [prompt],
            count,
            sampling,
            number,
            self._groups,
        )
        text = self._tokenizer.decode(output)
        ends = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _keep(self, kind: str, requests: Sequence[Any], answers: Sequence[Any]) -> None:
        """Hand answers to the cache of the harness."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)


def generation_options(options: dict[str, Any]) -> tuple[list[str], int, SamplingConfig]:
    """The texts that end an answer, its most tokens, and how they are chosen. ConfigError for a
    value that is none, which the file of a task may have."""
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else until
    if not isinstance(stops, list | tuple) or not all(isinstance(one, str) for one in stops):
        raise ConfigError("generation_kwargs: `until` must be a text or a list of texts")
    try:
        count, sampling = int(options.get("max_gen_toks", NEW_TOKENS)), _sampling(options)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"generation_kwargs: {str(error)[:200]}") from error
    if count < 1:
        raise ConfigError(f"generation_kwargs: max_gen_toks must be at least 1, got {count}")
    return list(stops), count, sampling


def _sampling(options: dict[str, Any]) -> SamplingConfig:
    """Greedy, unless the task asks for samples."""
    temperature = float(options.get("temperature", 0.0))
    if not options.get("do_sample") or temperature == 0.0:
        return SamplingConfig()
    top_k, top_p = int(options.get("top_k", 0)), float(options.get("top_p", 0.0))
    return SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p % 1.0)
