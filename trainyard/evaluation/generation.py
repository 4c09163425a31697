"""Generated answers: the one place where evaluation calls the inference engine."""

from __future__ import annotations

from collections.abc import Sequence

from trainyard.inference.config import GREEDY, SamplingConfig
from trainyard.inference.static import generate
from trainyard.models.gpt.model import GPTModel
from trainyard.parallel.groups import ALONE, ProcessGroups
from trainyard.tokenizers.base import Tokenizer


def generated(
    model: GPTModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingConfig = GREEDY,
    first_request: int = 0,
    groups: ProcessGroups = ALONE,
) -> list[list[int]]:
    """The new tokens behind each prompt, up to the end of a document, which is left out.

    first_request: number of the first prompt among all, which decides its random numbers.
    groups: the ranks that hold the model, all of which call this and get the same tokens."""
    result = generate(
        model,
        prompts,
        max_new_tokens,
        sampling=sampling,
        eod=tokenizer.eod,
        vocab_size=tokenizer.vocab_size,
        first_request=first_request,
        groups=groups,
    )
    return [
        output[:-1] if output and output[-1] == tokenizer.eod else output
        for output in result.outputs
    ]
