"""Scores of a trained model are those that transformers computes: stories260K, as a Hugging Face
folder."""

from __future__ import annotations

import json
import math
import shutil
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.inference.test_stories import read_model
from trainyard.datasets.plain_text import PlainText
from trainyard.evaluation.config import EvaluationConfig, QuestionConfig
from trainyard.evaluation.scoring import Scorer
from trainyard.evaluation.tasks import TASKS, Subject
from trainyard.inference.load import ModelOnRanks, load_on_ranks

pytestmark = pytest.mark.slow

PERPLEXITY = 1e-4
"""Relative."""
NUM_PASSAGES = 60
QUESTIONS = {
    "nq": "nq/NQ-open.dev.jsonl",
    "triviaqa": "triviaqa/triviaqa.dev.2000.jsonl",
    "squad": "squad/squad_dev_xquad.en.json",
}
NUM_QUESTIONS = 12


@pytest.fixture(scope="module")
def stories(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published model as a folder of transformers, with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    source = shared / "data/checkpoints/stories260K"
    ours = read_model(source / "stories260K.bin")
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(state_of(ours.state_dict()), strict=False)
    folder = tmp_path_factory.mktemp("stories")
    theirs.save_pretrained(folder)
    shutil.copyfile(source / "tok512.model", folder / "tokenizer.model")
    return folder


def state_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our weights under transformers' names."""
    found = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "lm_head.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
    }
    for layer in range(5):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        q, k, v = (
            state[f"{ours}self_attention.linear_qkv.weight"].view(4, 32, 64).split((16, 8, 8), 1)
        )
        gate, up = state[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        found |= {
            f"{theirs}self_attn.q_proj.weight": q.reshape(64, 64),
            f"{theirs}self_attn.k_proj.weight": k.reshape(32, 64),
            f"{theirs}self_attn.v_proj.weight": v.reshape(32, 64),
            f"{theirs}self_attn.o_proj.weight": state[f"{ours}self_attention.linear_proj.weight"],
            f"{theirs}mlp.gate_proj.weight": gate,
            f"{theirs}mlp.up_proj.weight": up,
            f"{theirs}mlp.down_proj.weight": state[f"{ours}mlp.linear_fc2.weight"],
            f"{theirs}input_layernorm.weight": state[f"{ours}input_layernorm.weight"],
            f"{theirs}post_attention_layernorm.weight": state[f"{ours}pre_mlp_layernorm.weight"],
        }
    return found


@pytest.fixture(scope="module")
def reference(stories: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(stories).eval()


@pytest.fixture(scope="module")
def loaded(stories: Path) -> ModelOnRanks:
    return load_on_ranks(str(stories), torch.device("cpu"))


def subject(loaded: ModelOnRanks, path: Path, config: EvaluationConfig) -> Subject:
    return Subject(
        scorer=Scorer(loaded.model, batch_size=7),
        tokenizer=loaded.tokenizer,
        path=str(path),
        config=config,
        questions=QuestionConfig(),
    )


@torch.no_grad()
def test_perplexity_in_the_same_windows_is_that_of_transformers(
    loaded: ModelOnRanks, reference: Any, shared: Path, tmp_path: Path
) -> None:
    text = (shared / "data/corpora/wikitext-103/wiki.test.tokens").read_text()[:12_000]
    (tmp_path / "wiki.txt").write_text(text)
    config = EvaluationConfig(task="WIKITEXT103", seq_length=256, overlapping_eval=64)
    config = config.for_files((str(tmp_path / "wiki.txt"),))
    examples: Any = TASKS["WIKITEXT103"](subject(loaded, tmp_path / "wiki.txt", config))
    rows = examples.score(range(len(examples)))
    numbers = examples.summarize(rows).numbers
    # The windows as a person would write them: each is scored from where the last one ended.
    tokens, total, scored = torch.tensor(examples.tokens), 0.0, 0
    for begin in range(0, len(tokens), 64):
        end = min(begin + 256, len(tokens) - 1)
        logits = reference(tokens[begin:end].unsqueeze(0)).logits[0].double().log_softmax(-1)
        picked = logits.gather(1, tokens[begin + 1 : end + 1].unsqueeze(1))[scored - begin :]
        total, scored = total - picked.sum().item(), end
        if end == len(tokens) - 1:
            break
    assert numbers["ppl"] == pytest.approx(math.exp(total / (len(tokens) - 1)), rel=PERPLEXITY)
    assert numbers["num_tokens"] == len(tokens) > 5000


@torch.no_grad()
@pytest.mark.parametrize("protocol", ["megatron", "megatron-strict", "lm-eval"])
def test_predictions_of_lambada_are_those_of_transformers(
    loaded: ModelOnRanks, reference: Any, shared: Path, tmp_path: Path, protocol: Any
) -> None:
    lines = (shared / "data/eval/lambada/lambada_test.jsonl").read_text().splitlines()
    # Real passages, and stories of the model's own, whose last words it knows.
    own = [{"text": text} for text in ("Once upon a time", "She was so happy and said thank you")]
    passages = [json.loads(line) for line in lines[:NUM_PASSAGES]] + own
    data = tmp_path / "lambada.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in passages))
    config = EvaluationConfig(task="LAMBADA", lambada_protocol=protocol)
    examples: Any = TASKS["LAMBADA"](subject(loaded, data, config))
    rows = examples.score(range(len(examples)))
    for row, request in zip(rows, examples.requests, strict=True):
        logits = reference(torch.tensor([request.tokens[:-1]])).logits[0, -request.num_scored :]
        assert row["predicted"] == logits.argmax(-1).tolist()
        assert row["is_right"] == int(row["predicted"] == row["label"])
    assert 0 < sum(row["is_right"] for row in rows) < len(rows)


@torch.no_grad()
@pytest.mark.parametrize("task", QUESTIONS)
def test_published_questions_get_the_answers_of_transformers(
    loaded: ModelOnRanks, reference: Any, shared: Path, task: Any
) -> None:
    path = shared / "data/eval" / QUESTIONS[task]
    config = QuestionConfig(out_seq_length=8, num_gen=NUM_QUESTIONS, short_format=True)
    told = subject(loaded, path, EvaluationConfig(task=task, seq_length=256))
    examples: Any = TASKS[task](replace(told, questions=config))
    rows = examples.score(range(len(examples)))
    plain = PlainText(loaded.tokenizer)
    for row, question in zip(rows, examples.questions, strict=True):
        prompt = [*plain.before, *examples.format.prompt(question, plain, 248 - len(plain.before))]
        found = reference.generate(
            torch.tensor([prompt[-248:]]), do_sample=False, max_new_tokens=8, eos_token_id=None
        )
        said = loaded.tokenizer.decode(found[0, -8:].tolist()).strip().replace("\n", " ")
        assert row["pred"] == said
        assert row["exact_match"] == int(squad_text(said) in map(squad_text, question.answers))
    assert len(rows) == NUM_QUESTIONS


def squad_text(text: str) -> str:
    """As SQuAD's own evaluation compares texts: small letters, no punctuation, no articles."""
    letters = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(word for word in letters.split() if word not in ("a", "an", "the"))
