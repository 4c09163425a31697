"""The gradients of models that `transformers` saved are those of `transformers`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.trainyard.checkpoint.samples import model_of_source
from tests.trainyard.conversion.huggingface.hf_models import make, some_tokens
from trainyard.conversion.huggingface.read import open_huggingface
from trainyard.conversion.huggingface.to_hf import targets

EXPERT = re.compile(r"(.*mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ["deepseek v3", "deepseek v2", "gpt-oss"])
def test_the_gradients_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs = make(name, tmp_path)
    with open_huggingface(str(tmp_path)) as source:
        ours = model_of_source(source).eval()  # training adds the loss that balances experts
    tokens = some_tokens()
    labels = tokens.roll(-1, dims=1)
    functional.cross_entropy(theirs(tokens).logits.transpose(1, 2), labels).backward()
    ours.loss(tokens, labels).mean().backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    parameters = dict(ours.named_parameters())
    compared = 0
    for target in targets(ours.config):
        if target.source not in parameters:  # a bias of the choice, which moves without a gradient
            continue
        got = parameters[target.source].grad
        wanted = _gradient(gradients, target.name)
        assert got is not None
        assert wanted.any(), target.name
        torch.testing.assert_close(
            target.convert(got), wanted, rtol=1e-4, atol=1e-6, msg=target.name
        )
        compared += 1
    assert compared > len(parameters) - 1


def _gradient(gradients: dict[str, torch.Tensor | None], name: str) -> torch.Tensor:
    """Of the parameter that a file has under `name`; experts are stacked in memory."""
    match = EXPERT.fullmatch(name)
    if match is None:
        found = gradients[name]
        assert found is not None, name
        return found
    stacked = "down_proj" if match[3] == "down" else "gate_up_proj"
    found = gradients[match[1] + stacked]
    assert found is not None, name
    of_expert = found[int(match[2])]
    return of_expert if match[3] == "down" else of_expert.chunk(2)[match[3] == "up"]
