"""The table of programs: how one is found, and what its name stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_docs import ROOT
from trainyard.errors import ConfigError
from trainyard.megatron_cli.implied import implied
from trainyard.megatron_cli.program_lookup import find_program, table
from trainyard.megatron_cli.programs import PROGRAMS

LAUNCHED = {"WORLD_SIZE": "8"}


def added(program: str, line: str, environ: dict[str, str] | None = None) -> str:
    return " ".join(implied(find_program(program), line.split(), environ or {})[1])


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("pretrain_gpt.py", "pretrain_gpt.py"),
        ("pretrain_gpt", "pretrain_gpt.py"),
        ("./pretrain_t5.py", "pretrain_t5.py"),
        ("/workspace/Megatron-LM/pretrain_bert.py", "pretrain_bert.py"),
        ("examples/bert/pretrain_bert.py", "pretrain_bert.py"),
        ("preprocess_data.py", "tools/preprocess_data.py"),
        ("/m/tools/retro/preprocess_data.py", "tools/retro/preprocess_data.py"),
        ("tools.checkpoint.convert", "tools/checkpoint/convert.py"),
        ("tools.retro.cli", "tools/retro/cli"),
        ("main.py", "tasks/main.py"),
        (
            "examples/academic_paper_scripts/detxoify_lm/finetune_gpt.py",
            "examples/detxoify_lm/finetune_gpt.py",
        ),
    ],
)
def test_a_program_is_found_by_any_path_to_it(given: str, path: str) -> None:
    assert find_program(given).path == path


def test_every_program_is_found_and_has_a_stage_or_an_answer() -> None:
    stages = {path.parent.name for path in Path(ROOT, "stages").glob("*/__main__.py")}
    stages.add("finetune")  # a module
    for program in PROGRAMS:
        assert find_program(program.path) is program
        assert bool(program.stage) != bool(program.answer), program.path
        assert program.stage in ("", *stages)
        assert program.path in table()


def test_an_unknown_program_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"pretrain_gtp.py is not a program .*pretrain_gpt\.py"):
        find_program("pretrain_gtp.py")
    with pytest.raises(ConfigError, match="--help lists all"):
        find_program("--num-layers")
    with pytest.raises(ConfigError, match=r"mean examples/multimodal/train\.py or examples/mimo/"):
        find_program("examples/rl/train.py")


@pytest.mark.parametrize(
    ("program", "line", "expected"),
    [
        ("pretrain_gpt.py", "", "--model-type gpt --tokenizer-type GPT2BPETokenizer"),
        ("pretrain_t5.py", "", "--model-type t5 --tokenizer-type BertWordPieceLowerCase"),
        ("pretrain_t5.py", "--tokenizer_type=BertWordPieceCase", "--model-type t5"),
        ("pretrain_gpt.py", "--mock-data --vocab-size 9", "--model-type gpt"),
        ("pretrain_gpt.py", "--mock-data", "--model-type gpt --tokenizer-type GPT2BPETokenizer"),
        ("pretrain_gpt.py", "--yaml-cfg f", "--model-type gpt"),
        ("pretrain_gpt.py", "--use-checkpoint-args --load c", "--model-type gpt"),
        (
            "pretrain_bert.py",
            "--use-checkpoint-args --load c --vocab-file v",
            "--model-type bert --tokenizer-type BertWordPieceLowerCase",
        ),
        ("tools/checkpoint/convert.py", "--saver core", "--loader megatron"),
        ("tools/preprocess_data.py", "--input a", ""),
        ("tools/generate_samples_gpt.py", "--top_p 0.9", "--top-k 0"),
        ("tools/generate_samples_gpt.py", "--top_k 5", ""),
        (
            "detxoify_lm/generate_samples_gpt.py",
            "--top_p 0.9",
            "--prompt-key prompt.text --prompt-format jsonl --top-k 0 --out-seq-length 1024",
        ),
        (
            "detxoify_lm/generate_samples_gpt.py",
            "--top-k 5 --num-tokens-to-generate 20 --prompt-key text --prompt-format txt",
            "",
        ),
        (
            "annotations/filter-selfgeneration.py",
            "--keep-fraction 0.25",
            "--classifier annotated",
        ),
    ],
)
def test_a_name_stands_for_what_is_not_given(program: str, line: str, expected: str) -> None:
    assert added(program, line) == expected


@pytest.mark.parametrize(
    ("program", "line", "recipe"),
    [
        ("pretrain_gpt.py", "--fp8-format hybrid", "delayed"),
        ("pretrain_mamba.py", "--fp8_format e4m3", "delayed"),
        ("sft_retro.py", "--fp8-format=hybrid", "delayed"),
        ("pretrain_gpt.py", "--fp8-format hybrid --fp8-recipe tensorwise", ""),
        ("pretrain_gpt.py", "--fp8-format hybrid --config c.toml", ""),
        ("pretrain_gpt.py", "--bf16", ""),
        ("tools/report_theoretical_memory.py", "--fp8-format hybrid", ""),
    ],
)
def test_a_training_in_8_bits_has_the_recipe_of_megatron(
    program: str, line: str, recipe: str
) -> None:
    words = added(program, line).split()
    assert ("--fp8-recipe" in words) == bool(recipe)
    assert not recipe or words[words.index("--fp8-recipe") + 1] == recipe


def test_a_flag_that_means_something_else_to_a_program_is_renamed() -> None:
    program = find_program("examples/detxoify_lm/finetune_gpt.py")
    line = "--data-path a --data-path2 1 b 2 c --split 100,0,0 --vocab-size 9 --mock-data"
    arguments, _ = implied(program, line.split(), {})
    assert " ".join(arguments[:6]) == "--train-data-path a --valid-data-path 1 b 2"
    assert " ".join(arguments).endswith("--model-type gpt --valid-data-split 98,2,0")
    with pytest.raises(ConfigError, match=r"--split 98,2,0: finetune_gpt\.py trains on all docu"):
        implied(program, ["--split", "98,2,0"], {})
    with pytest.raises(ConfigError, match=r"--data-path2 is --valid-data-path to .*; give one"):
        implied(program, ["--valid-data-path", "q", "--data-path2", "b"], {})
    assert "--valid-data-split" not in implied(program, ["--data-path", "a"], {})[0]


EXAMPLE = "megatron_core_training_example.py"


@pytest.mark.parametrize(
    ("line", "environ", "steps"),
    [
        ("", {}, 1000),  # 3 epochs of 625 batches are longer
        ("--epochs 1", {}, 625),
        ("--epochs=3 --batch-size=16", LAUNCHED, 237),  # 3 x ceil(1250 / 16)
        ("--tensor-model-parallel-size=2 --batch-size=16 --epochs=3", LAUNCHED, 471),
        ("--dataset-size=100 --batch-size=4 --train-steps=10", {}, 10),
        ("--dataset-size=100 --batch-size=4 --epochs 1 --world-size 2", {}, 13),
        ("--train-iters 7", {}, 7),
    ],
)
def test_the_example_ends_with_its_steps_or_its_epochs(
    line: str, environ: dict[str, str], steps: int
) -> None:
    assert f"--train-iters {steps}" in added(EXAMPLE, line, environ)


def test_a_memory_report_counts_the_ranks_of_a_launcher() -> None:
    report, environ = "tools/report_theoretical_memory.py", {"WORLD_SIZE": "16"}
    assert added(report, "--num-layers 2", environ) == "--world-size 16"
    assert added(report, "--nproc-per-node 8", environ) == ""
    assert added(report, "--num-layers 2", {"WORLD_SIZE": "1"}) == ""
    assert added("tools/merge_datasets.py", "--input a", environ) == ""


def test_the_example_warms_up_over_more_steps_than_it_has() -> None:
    small = added(EXAMPLE, "--train-steps=10")
    assert "--lr-warmup-iters 100" in small
    assert "--lr-decay-iters 101" in small
    assert "--lr-decay-iters" not in added(EXAMPLE, "--train-steps 10 --warmup-steps 2")


def test_the_example_has_its_documented_defaults() -> None:
    words, more = implied(find_program(EXAMPLE), ["--hidden-size=64", "--wandb"], {})
    assert words[:2] == ["--hidden-size", "64"]
    assert words[2:4] == ["--wandb-project", "megatron-core"]
    assert " ".join(more).startswith(
        "--num-layers 4 --num-attention-heads 8 --ffn-hidden-size 1024 --vocab-size 10000"
    )
    assert "--mock-data" in more
    own, _ = implied(find_program(EXAMPLE), ["--data-path", "p", "--wandb-project", "x"], {})
    assert "--mock-data" not in own
    assert "--wandb-project" not in own  # without --wandb it logs nowhere
