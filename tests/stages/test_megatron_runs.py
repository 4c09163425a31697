"""Lines of Megatron-LM's scripts and of guides, really run: the same commands at small sizes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.stages.directly import run_process, torchrun
from tests.stages.test_megatron_door import LINES, NAMES, OF_OTHER_SCRIPTS
from tests.stages.test_megatron_door import SMALL as SMALL_MODEL
from trainyard.megatron_cli.options import split_options

pytestmark = pytest.mark.slow

BY_NAME: dict[str, dict[str, Any]] = dict(zip(NAMES, LINES, strict=True))

SAME = {"batch-size": "micro-batch-size", "encoder-seq-length": "seq-length"}
SAME |= {"encoder-num-layers": "num-layers", "train-steps": "train-iters", "json-key": "json-keys"}

SMALL = {
    **{"num-layers": "2", "hidden-size": "32", "num-attention-heads": "4"},
    **{"ffn-hidden-size": "64", "kv-channels": "8", "seq-length": "32"},
    **{"max-position-embeddings": "64", "decoder-seq-length": "16", "decoder-num-layers": "2"},
    **{"micro-batch-size": "2", "global-batch-size": "4", "train-iters": "2", "eval-iters": "1"},
    **{"lr-decay-iters": "2", "log-interval": "1", "save-interval": "2"},
    **{"tensor-model-parallel-size": "1", "pipeline-model-parallel-size": "1", "workers": "1"},
    "rampup-batch-size": "2 2 4",
}
"""Values that replace those of a line, where it has the option."""


def shrunken(name: str, **others: str) -> list[str]:
    """The program and words of a line, smaller and in places that exist. others: more values, which
    are added where the line has none; an empty one takes the option out."""
    values = SMALL | {key.replace("_", "-"): value for key, value in others.items()}
    line, words = BY_NAME[name], []
    for option in split_options(line["argv"])[1]:
        key = SAME.get(option.name, option.name)
        instead = values.pop(key, None) if key in values else " ".join(option.values)
        if instead == "":
            if key.replace("-", "_") not in others:
                words.append(option.given)
            continue
        if instead is not None:
            words += [option.given, *instead.split()]
    for key in others:
        flag = key.replace("_", "-")
        if values.get(flag):
            words += [f"--{flag}", *values[flag].split()]
    return [line["program"], *words]


def run(words: list[str], seconds: float = 300) -> str:
    return run_process("stages.megatron", *words, seconds=seconds)


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moved")
    texts = [f"The {i}th train leaves the yard. It carries {i} words." for i in range(200)]
    lines = [json.dumps({"text": text, "title": f"Train {i}"}) for i, text in enumerate(texts)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    (folder / "held.txt").write_text(" ".join(texts[:20]))
    return folder


@pytest.fixture(scope="module")
def files(shared: Path) -> dict[str, str]:
    vocab = shared / "data/vocab/gpt2"
    return {"vocab_file": f"{vocab}/vocab.json", "merge_file": f"{vocab}/merges.txt"}


@pytest.fixture(scope="module")
def said_by_gpt(yard: Path, files: dict[str, str]) -> str:
    """What the training of `yard`/gpt on `yard`/merged said."""
    (yard / "pairs").mkdir()
    corpus = {"input": f"{yard}/corpus.jsonl", "output_prefix": f"{yard}/pairs/gpt"}
    run(shrunken("tok-gpt2", **corpus, **files))
    merged = {"input": f"{yard}/pairs", "output_prefix": f"{yard}/merged"}
    assert "documents" in run(shrunken("merge", **merged))

    save = {"save": f"{yard}/gpt", "load": f"{yard}/gpt", "tensorboard_dir": f"{yard}/tb"}
    return run(
        shrunken("train_gpt3_175b_distributed.sh", data_path=f"{yard}/merged", **files, **save)
    )


def test_a_gpt_from_text_to_a_converted_checkpoint(
    yard: Path, files: dict[str, str], said_by_gpt: str
) -> None:
    assert "iteration        2/       2 | consumed samples:            4 |" in said_by_gpt
    assert (yard / "gpt/manifest.json").exists()

    model = {"seq_length": "32", "max_position_embeddings": "64"}
    said = run(
        shrunken("eval-wiki", load=f"{yard}/gpt", valid_data=f"{yard}/held.txt", **model, **files)
    )
    assert "validation results on WIKITEXT103" in said
    assert "RESULT FOR PROMPT 1" in run(
        shrunken("bench-prompts", load=f"{yard}/gpt", num_tokens_to_generate="4")
    )
    first = shrunken("conv-megatron", loader="trainyard", load_dir=f"{yard}/gpt")
    run([*first, "--save-dir", f"{yard}/core", "--bf16"])
    run(shrunken("conv-default", load_dir=f"{yard}/core", save_dir=f"{yard}/split"))
    assert (yard / "split/iter_0000002/mp_rank_01_001/model_optim_rng.pt").exists()
    assert "weight and optimizer=" in run(shrunken("plan-basic"))


@pytest.mark.full
@pytest.mark.usefixtures("said_by_gpt")
def test_a_gpt_is_detoxified(yard: Path, files: dict[str, str]) -> None:
    model = {"max_position_embeddings": "64", "load": f"{yard}/gpt", **files}
    short = {"seq_length": "32", "out_seq_length": "8", "fp16": ""}
    run(
        shrunken(
            "selfgenerate-1.3b-unconditional.sh",
            **{**model, **short, "genfile": f"{yard}/own", "num_samples": "20"},
        )
    )
    texts = [json.loads(line) for line in (yard / "own/generations.jsonl").open()]
    assert len(texts) == 20
    prompts = [{"prompt": {"text": f"The {i}th train"}} for i in range(3)]
    (yard / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    asked = {"sample_input_file": f"{yard}/prompts.jsonl", "sample_output_file": f"{yard}/said"}
    run(shrunken("generate-1.3b.sh", **model, **short, **asked, num_samples=""))
    assert len((yard / "said/generations.jsonl").read_text().splitlines()) == 3

    programs = "examples/detxoify_lm/annotations"
    of_texts = ["--json-key", "generated_text", "--data-path"]
    labels = Path(__file__).parents[2] / "recipes/detoxify/labels.jsonl"
    classified = ["--classifier", "ngrams", "--classifier-data", str(labels)]
    words = [*of_texts, f"{yard}/own/generations.jsonl", "--out-path", f"{yard}/annotated"]
    run([f"{programs}/perspective_api_annotate.py", *words, *classified])
    words = [*of_texts, f"{yard}/annotated/documents-*.jsonl", "--out-path", f"{yard}/kept"]
    run([f"{programs}/filter-selfgeneration.py", *words])
    kept = [line for one in (yard / "kept").glob("documents-*.jsonl") for line in one.open()]
    assert len(kept) == 10

    corpus = {"input": f"{yard}/kept/documents-*.jsonl", "output_prefix": f"{yard}/kept-tokens"}
    run(shrunken("tok-gpt2", **corpus, **files, json_keys="generated_text"))
    pairs = {"data_path": f"{yard}/kept-tokens_generated_text_document"}
    pairs |= {"data_path2": f"{yard}/merged", "save": f"{yard}/detoxified"}
    said = run(
        shrunken(
            "finetune_gpt_distributed-1.3b.sh",
            **{**model, **pairs, "tensorboard_dir": f"{yard}/detoxified-tb", "fp16": ""},
            distributed_backend="gloo",
        )
    )
    assert "iteration        2/       2 | consumed samples:            8 |" in said
    assert "validation loss at iteration 2" in said


def test_a_bert_and_a_t5_from_sentences(yard: Path, shared: Path) -> None:
    vocab = {"vocab_file": f"{shared}/data/vocab/bert/bert-base-uncased-vocab.txt"}
    run(
        shrunken(
            "tok-bert",
            input=f"{yard}/corpus.jsonl",
            output_prefix=f"{yard}/bert",
            lang="none",
            **vocab,
        )
    )
    for name in ("pretrain_bert.sh", "pretrain_t5.sh"):
        save = f"{yard}/{name}"
        said = run(
            shrunken(name, data_path=f"{yard}/bert_text_sentence", save=save, load=save, **vocab)
        )
        assert "iteration        2/       2 |" in said


MOCK = {"tokenizer_type": "NullTokenizer", "tokenizer_model": "", "vocab_size": "96"}
MOCK |= {"data_path": "", "data_cache_path": "", "tensorboard_dir": "", "num_query_groups": "2"}


SAMPLES = {"train_samples": "8", "lr_warmup_samples": "2", "lr_decay_samples": "8"}
NO_PROFILE = {"profile": "", "profile_step_start": "", "profile_step_end": ""}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "others", "ranks"),
    [
        (
            "train_mixtral_8x7b_distributed.sh",
            {"expert_model_parallel_size": "2", "lr_warmup_iters": "1", "wandb_project": ""}
            | {"wandb_exp_name": ""},
            2,
        ),
        ("train.sh", SAMPLES | {"num_layers": "8", "mamba_num_groups": "1"}, 1),
        (
            "train_llama3_8b_h100_fp8.sh",
            SAMPLES | NO_PROFILE | {"exit_duration_in_mins": "", "attention_backend": "auto"},
            1,
        ),
    ],
    ids=["mixtral", "hybrid", "fp8"],
)
def test_other_families_train(
    tmp_path: Path, name: str, others: dict[str, str], ranks: int
) -> None:
    places = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    words = [*shrunken(name, **MOCK, **places, **others), "--mock-data"]
    launcher = torchrun("--standalone", "--nproc-per-node", str(ranks))
    said = run_process("stages.megatron", *words, launcher=launcher, seconds=300)
    assert "iteration        2/       2 | consumed samples:            8 |" in said


FSDP_SCRIPT = "megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh"
FP8 = "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-compute-algo max"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [f"{OF_OTHER_SCRIPTS[FSDP_SCRIPT][1]} {FP8}", "--bf16 --use-torch-fsdp2"],
    ids=["megatron fsdp, fp8", "torch fsdp2"],
)
def test_weights_sharded_over_ranks_train_and_resume(tmp_path: Path, options: str) -> None:
    script, launcher = OF_OTHER_SCRIPTS[FSDP_SCRIPT][0], torchrun("--nproc-per-node", "2")
    words = [script, *shlex.split(SMALL_MODEL.replace("--dry-run", "")), *shlex.split(options)]
    words += ["--global-batch-size", "4", "--log-interval", "1", "--lr-decay-iters", "3"]
    words += ["--eval-iters", "0"]
    words += ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    said = run_process("stages.megatron", *words, launcher=launcher, seconds=300)
    assert "iteration        2/       2 | consumed samples:            8 |" in said
    words += ["--train-iters", "3"]
    said = run_process("stages.megatron", *words, launcher=launcher, seconds=300)
    assert "iteration        3/       3 | consumed samples:           12 |" in said
    assert "iteration        2/       3 |" not in said


EXAMPLE = {
    "num_layers": "2",
    "hidden_size": "32",
    "num_attention_heads": "4",
    "seq_length": "16",
    "batch_size": "2",
    "dataset_size": "8",
    "train_steps": "2",
    "log_interval": "1",
}
"""Sizes for the guide's own program, which has defaults for all of them."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "parallel", "ranks"),
    [
        ("guide-noargs", {}, 1),
        ("guide-tp", {"tensor_model_parallel_size": "2"}, 2),
        ("guide-tp", {"pipeline_model_parallel_size": "2", "sequence_parallel": ""}, 2),
        (
            "guide-tp",
            {"tensor_model_parallel_size": "2", "pipeline_model_parallel_size": "2"},
            4,
        ),
    ],
    ids=["single", "tensor", "pipeline", "mixed"],
)
def test_the_guides_program_runs_under_torchrun(
    tmp_path: Path, name: str, parallel: dict[str, str], ranks: int
) -> None:
    words = shrunken(name, **EXAMPLE, **parallel, save=str(tmp_path / "run"))
    launcher = torchrun("--standalone", "--nproc-per-node", str(ranks))
    said = run_process("stages.megatron", *words, launcher=launcher, seconds=400)
    assert "iteration        2/       2 | consumed samples:" in said


@pytest.mark.distributed
def test_the_guides_program_runs_on_two_hosts(tmp_path: Path) -> None:
    """As a Slurm job starts it: one torchrun on each host, with the address of the first."""
    port = str(free_port())
    words = shrunken(
        "guide-multi",
        **EXAMPLE,
        tensor_model_parallel_size="2",
        pipeline_model_parallel_size="2",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size="4",
        save=str(tmp_path / "run"),
    )
    hosts = []
    for host in ("0", "1"):
        meeting = ("--master-addr", "127.0.0.1", "--master-port", port, "--node-rank", host)
        launcher = torchrun("--nnodes", "2", "--nproc-per-node", "2", *meeting)
        hosts.append(
            subprocess.Popen(
                [*launcher, "-m", "stages.megatron", *words],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [host.communicate(timeout=400)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert "iteration        2/       2 | consumed samples:" in "".join(said)
