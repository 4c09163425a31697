"""Every family that generates: a static batch = one prompt at a time = the training's forward."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.trainyard.inference.small_models import (
    KINDS,
    build,
    full_logits,
    greedy_by_training,
    run,
    some_prompts,
)
from trainyard.inference.config import SamplingConfig
from trainyard.models.t5.model import T5Model
from trainyard.testing.tolerances import BF16_LOG_PROBS, FP32_SUM_ORDER, relative_error

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.few_cases(3)
@every_kind
def test_a_static_batch_is_one_by_one_is_the_forward_of_training(kind: str) -> None:
    model, prompts = build(kind), some_prompts(3, 17, 9)
    together = run(model, prompts, 7).outputs
    assert together == [run(model, [prompt], 7).outputs[0] for prompt in prompts]
    assert together == [greedy_by_training(model, prompt, 7) for prompt in prompts]


@every_kind
def test_log_probabilities_are_the_losses_of_training(kind: str) -> None:
    model, prompts = build(kind), some_prompts(12, 5)
    sampling = SamplingConfig(top_k=0, temperature=1.5)
    options = {"sampling": sampling, "log_probs": True, "prompt_log_probs": True, "top_n": 3}
    for completion in run(model, prompts, 8, **options).completions:
        prompt, output = completion.request.prompt, completion.tokens
        logits = full_logits(model, prompt, output)[:-1]
        losses = functional.cross_entropy(logits, torch.tensor(output), reduction="none")
        torch.testing.assert_close(torch.tensor(completion.log_probs), -losses, **FP32_SUM_ORDER)
        top = logits.log_softmax(-1).topk(3)
        assert [[token for token, _ in place] for place in completion.top] == top.indices.tolist()
        found = torch.tensor([[value for _, value in place] for place in completion.top])
        torch.testing.assert_close(found, top.values, **FP32_SUM_ORDER)
        if isinstance(model, T5Model):
            assert completion.prompt_log_probs == [], "texts of an encoder have no scores"
            continue
        text = torch.tensor([[*prompt]])
        with torch.no_grad():
            losses = model.loss(text[:, :-1], text[:, 1:])[0]
        torch.testing.assert_close(
            torch.tensor(completion.prompt_log_probs), -losses, **FP32_SUM_ORDER
        )
        assert len(completion.prompt_top) == len(prompt) - 1
        assert all(len(place) == 3 for place in completion.prompt_top)


@pytest.mark.few_cases(3)
@every_kind
def test_bf16_scores_a_text_as_its_training_does(kind: str) -> None:
    model, prompts = build(kind).to(torch.bfloat16), some_prompts(12, 5)
    together = run(model, prompts, 8, log_probs=True).completions
    alone = [run(model, [p], 8, log_probs=True).completions[0] for p in prompts]
    for completion in (*together, *alone):
        logits = full_logits(model, completion.request.prompt, completion.tokens)[:-1].float()
        chosen = torch.tensor(completion.tokens)
        losses = functional.cross_entropy(logits, chosen, reduction="none")
        assert relative_error(torch.tensor(completion.log_probs), -losses) < BF16_LOG_PROBS
