"""The generate stage: texts of the engine, from any kind of checkpoint, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.generate.config import GenerateConfig
from stages.generate.run import run
from tests.stages.directly import run_directly, run_program
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt, tokenizer_files
from tests.trainyard.conversion.huggingface import hf_models
from trainyard.config import from_dict, to_dict
from trainyard.conversion.tokenizer_files import tokenizer_of
from trainyard.errors import ConfigError, DataError
from trainyard.inference.decoders import Decoder
from trainyard.inference.static import generate
from trainyard.inference.texts import build_decoder
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.mamba.config import MambaConfig

MODEL = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=64)
HYBRID = MambaConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=2,
    seq_length=64,
    hybrid_layer_pattern="M*-",
    mamba_head_dim=8,
    mamba_state_dim=8,
    mamba_num_groups=2,
)
TEXTS = ("the yard", "a", "trains of words", "x y", "shunts")
EOD = 0


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return random_gpt(MODEL)


@pytest.fixture(scope="module")
def checkpoint(model: GPTModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("run"))
    save_gpt(folder, model, step=50)
    return folder


def texts_of(load: str, out: Path, **options: Any) -> list[dict[str, Any]]:
    options = {"device": "cpu", "prompts": list(TEXTS), "num_tokens_to_generate": 6} | options
    run_directly(GenerateConfig, run, load=load, output_dir=str(out), **options)
    return [json.loads(line) for line in (out / "generations.jsonl").read_text().splitlines()]


def test_every_prompt_is_continued_by_the_engine(
    model: GPTModel, checkpoint: str, tmp_path: Path
) -> None:
    rows = texts_of(checkpoint, tmp_path, ignore_eod=True)
    assert [row["prompt"] for row in rows] == list(TEXTS)
    prompts = [row["prompt_tokens"] for row in rows]
    expected = generate(model, prompts, 6, vocab_size=257).outputs
    assert [row["generated_tokens"] for row in rows] == expected
    decode = tokenizer_of(
        {name.removeprefix("tokenizer/"): data for name, data in tokenizer_files().items()}
    ).decode
    assert [row["generated_text"] for row in rows] == [decode(tokens) for tokens in expected]
    assert {row["finish_reason"] for row in rows} == {"length"}


def test_a_hybrid_is_continued_by_the_engine(tmp_path: Path) -> None:
    model = random_gpt(HYBRID)
    save_gpt(str(tmp_path / "run"), model)
    rows = texts_of(str(tmp_path / "run"), tmp_path / "out", ignore_eod=True)
    prompts = [row["prompt_tokens"] for row in rows]
    expected = [generate(model, [prompt], 6).outputs[0] for prompt in prompts]
    assert [row["generated_tokens"] for row in rows] == expected


def test_files_of_prompts_give_what_the_command_line_gives(checkpoint: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"top_k": 0, "seed": 3}
    expected = texts_of(checkpoint, tmp_path / "a", **options)
    lines = [json.dumps({"q": text}) for text in TEXTS]
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "p.txt").write_text("\n".join(TEXTS) + "\n")
    for name in ("p.jsonl", "p.txt"):
        file = {"prompt_file": str(tmp_path / name), "prompts": [], "prompt_key": "q"}
        more = {"inference_max_requests": 2}
        assert texts_of(checkpoint, tmp_path / name[2:], **options, **file, **more) == expected


def test_each_prompt_is_continued_several_times(checkpoint: str, tmp_path: Path) -> None:
    """RealToxicityPrompts has its texts in an object; continuations stand side by side."""
    drawn: dict[str, Any] = {"top_k": 0, "seed": 3, "prompts": [], "prompt_key": "prompt.text"}
    lines = [json.dumps({"prompt": {"text": text, "toxicity": 0.1}}) for text in TEXTS]
    (tmp_path / "prompts").write_text("\n".join(lines) + "\n")
    drawn |= {"prompt_file": str(tmp_path / "prompts"), "prompt_format": "jsonl"}
    rows = texts_of(checkpoint, tmp_path / "a", **drawn, num_samples=2, samples_per_prompt=3)
    assert [row["prompt"] for row in rows] == [TEXTS[0]] * 3 + [TEXTS[1]] * 3
    assert len({row["generated_text"] for row in rows[:3]}) == 3
    with pytest.raises(DataError, match=f"--num-samples 99: there are {len(TEXTS)} prompts"):
        texts_of(checkpoint, tmp_path / "b", **drawn, num_samples=99)


def test_texts_begin_from_nothing(checkpoint: str, tmp_path: Path) -> None:
    drawn: dict[str, Any] = {"top_k": 0, "prompts": [], "num_samples": 3}
    rows = texts_of(checkpoint, tmp_path / "a", **drawn)
    assert [(row["prompt"], row["prompt_tokens"]) for row in rows] == [("", [EOD])] * 3
    assert len({row["generated_text"] for row in rows}) == 3


def test_stop_words_end_a_text_and_are_left_out(checkpoint: str, tmp_path: Path) -> None:
    free = texts_of(checkpoint, tmp_path / "free", ignore_eod=True, num_tokens_to_generate=12)
    text = free[2]["generated_text"]
    word = text[3:5]
    ended = texts_of(
        checkpoint,
        tmp_path / "ended",
        prompts=[TEXTS[2]],
        stop_words=[word],
        num_tokens_to_generate=12,
    )[0]
    assert ended["generated_text"] == text[: text.index(word)]
    assert ended["finish_reason"] == "stop"


def test_log_probabilities_come_with_the_text(checkpoint: str, tmp_path: Path) -> None:
    scored = {"return_log_probs": True, "top_n_logprobs": 2, "add_bos": True}
    row = texts_of(checkpoint, tmp_path / "a", prompts=["the yard"], **scored)[0]
    assert row["prompt_tokens"][0] == EOD
    assert len(row["log_probs"]) == len(row["generated_tokens"]) == len(row["top_n_logprobs"])
    assert len(row["prompt_log_probs"]) == 8 == len(row["prompt_top_n_logprobs"])
    for value, place in zip(row["log_probs"], row["top_n_logprobs"], strict=True):
        assert value == max(place.values()), "greedy takes the likeliest"
    short = texts_of(checkpoint, tmp_path / "b", return_log_probs=True, skip_prompt_log_probs=True)
    assert "prompt_log_probs" not in short[0]


def test_beams_are_written_the_best_first(checkpoint: str, tmp_path: Path) -> None:
    (row,) = texts_of(checkpoint, tmp_path, prompts=["a"], beam_width=3, length_penalty=0.5)
    scores = [beam["score"] for beam in row["beams"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert row["generated_text"] == row["beams"][0]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama 3.2", "mixtral with a window", "gpt2"])
def test_a_hugging_face_folder_generates_as_transformers_does(tmp_path: Path, name: str) -> None:
    theirs = hf_models.make(name, tmp_path / "hf").eval()
    rows = texts_of(str(tmp_path / "hf"), tmp_path / "out", ignore_eod=True)
    for row in rows:
        prompt = torch.tensor([row["prompt_tokens"]])
        made = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=list(range(257, theirs.config.vocab_size)),
        )
        assert made[0, prompt.shape[1] :].tolist() == row["generated_tokens"]


def test_without_a_folder_texts_are_printed(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--load", checkpoint, "--prompts", "the yard", "a", "--out-seq-length", "3"]
    done = run_program("stages.generate", *line, "--top_k", "0", "--top_p", "0.9")
    assert "RESULT FOR PROMPT 0 ---------------\nthe yard" in done.out
    assert "RESULT FOR PROMPT 1 ---------------\na" in done.out


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", [("1", "1"), ("2", "1"), ("1", "2")], ids=["dp", "tp", "pp"])
def test_ranks_make_the_same_file(checkpoint: str, tmp_path: Path, layout: tuple[str, str]) -> None:
    texts_of(checkpoint, tmp_path / "one", top_k=5, inference_max_requests=2)
    tp, pp = layout
    line = ["--load", checkpoint, "--prompts", *TEXTS, "--num-tokens-to-generate", "6"]
    line += ["--top-k", "5", "--inference-max-requests", "2", "--device", "cpu"]
    line += ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]
    line += ["--nproc-per-node", "2", "--output-dir", str(tmp_path / "two")]
    run_program("stages.generate", *line)
    one, two = ((tmp_path / name / "generations.jsonl").read_bytes() for name in ("one", "two"))
    assert one == two


def test_one_step_is_compiled_for_batches_of_all_sizes(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[int, int]] = []

    def build(*given: Any, compiled: bool = False, **options: Any) -> Decoder:
        built.extend([(given[1], given[2])] * compiled)
        return build_decoder(*given, **options)  # what is compiled: test_generation.py

    monkeypatch.setattr("stages.generate.run.build_decoder", build)
    options: dict[str, Any] = {"inference_max_requests": 2, "top_k": 5, "return_log_probs": True}
    padded = texts_of(checkpoint, tmp_path / "a", **options, cuda_graph_impl="local")
    assert built == [(2, max(len(row["prompt_tokens"]) for row in padded))]
    plain = texts_of(checkpoint, tmp_path / "b", **options)
    for row, expected in zip(padded, plain, strict=True):
        for key in ("log_probs", "prompt_log_probs"):
            assert row.pop(key) == pytest.approx(expected.pop(key), abs=1e-5)
        assert row == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "--prompts .* and --prompt-file .* neither was given"),
        ({"prompts": ["a"], "prompt_file": "p.txt"}, "both were given"),
        ({"prompt_file": "p.csv"}, "--prompt-file p.csv: the name must end with .jsonl"),
        ({"num_samples": 2}, "--num-samples 2: every text would be the same"),
        ({"prompts": ["a"], "samples_per_prompt": 2}, "--samples-per-prompt 2: every text would"),
        ({"num_samples": 2, "samples_per_prompt": 2}, "--samples-per-prompt is of prompts, and"),
        ({"num_samples": 1, "chat": True}, "--chat answers prompts"),
        ({"prompts": ["a"], "num_tokens_to_generate": 0}, "--num-tokens-to-generate"),
        ({"prompts": ["a"], "min_tokens": 31}, "--min-tokens 31 is more than"),
        ({"prompts": ["a"], "bf16": True, "fp16": True}, "not both"),
        ({"prompts": ["a"], "beam_width": 2, "ignore_eod": True}, "--beam-width needs an end"),
        ({"prompts": ["a"], "beam_width": 2, "top_k": 0, "top_p": 0.5}, "draws no token"),
        (
            {"prompts": ["a"], "cuda_graph_impl": "local", "pipeline_model_parallel_size": 2},
            "--cuda-graph-impl local is for a model on one rank",
        ),
        ({"prompts": ["a"], "cuda_graph_impl": "local", "beam_width": 2}, "without a compiled"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_dict(GenerateConfig, {"load": "x", **options})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "holds no prompt"),
        ('{"text": "a"}\n{"q": 1}\n', "line 2, is no object with a text in 'text'"),
        ("{]\n", "line 1,"),
        ('{"text": "a", "neighbors": ["b"]}\n', "'neighbors' must be a list of texts"),
    ],
)
def test_lines_without_a_prompt_are_refused(
    checkpoint: str, tmp_path: Path, text: str, named: str
) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(DataError, match=named):
        texts_of(checkpoint, tmp_path / "o", prompts=[], prompt_file=str(tmp_path / "p.jsonl"))


def test_prompts_that_the_model_cannot_take_are_refused(checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompt 1 of 60 tokens .* the model has 64 positions"):
        texts_of(checkpoint, tmp_path / "o", prompts=["a", "x" * 60])
    (tmp_path / "p.jsonl").write_text('{"text": "a", "neighbors": [["b"]]}\n')
    with pytest.raises(ConfigError, match=r"line 1, has neighbors, .* they are for a retro"):
        texts_of(checkpoint, tmp_path / "o", prompts=[], prompt_file=str(tmp_path / "p.jsonl"))
    with pytest.raises(ConfigError, match="--termination-id 999"):
        texts_of(checkpoint, tmp_path / "o", termination_id=999)
    with pytest.raises(ConfigError, match="no format of conversations"):
        texts_of(checkpoint, tmp_path / "o", chat=True)


def test_the_options_of_a_run_are_a_flat_document() -> None:
    config = from_dict(GenerateConfig, {"load": "x", "prompts": ["a"], "top_k": 3, "min_tokens": 1})
    assert from_dict(GenerateConfig, to_dict(config)) == config
