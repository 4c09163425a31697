"""lm-evaluation-harness by its own client of OpenAI's interface: the scores of our backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.checkpoint.samples import random_gpt, save_gpt, tokenizer_files
from tests.trainyard.serving.running import MODEL, NAME, Running

pytest.importorskip("lm_eval")

pytestmark = pytest.mark.full

PAIRS = [("the yard", " is open"), ("a", "b"), ("", "trains of words"), ("one two", " three")]


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def test_local_completions_scores_as_the_backend_in_process(
    server: Running, tmp_path: Path
) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from trainyard.evaluation.harness import TrainyardLM

    save_gpt(str(tmp_path / "run"), random_gpt(MODEL))
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, data in tokenizer_files().items():
        (folder / Path(name).name).write_bytes(data)
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
    (folder / "tokenizer_config.json").write_text(settings)
    theirs = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model=NAME,
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        max_length=MODEL.seq_length,
        num_concurrent=1,
    )
    ours = TrainyardLM(str(tmp_path / "run"), device="cpu")
    asked = instances("loglikelihood", *PAIRS)
    found, expected = theirs.loglikelihood(asked), ours.loglikelihood(asked)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], 1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    options = {"until": ["q"], "max_gen_toks": 8}
    generating = instances("generate_until", *((text, options) for text, _ in PAIRS if text))
    assert theirs.generate_until(generating) == ours.generate_until(generating)
