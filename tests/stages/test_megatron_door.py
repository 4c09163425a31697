"""`python -m stages.megatron`: commands of Megatron-LM's scripts and of guides, as they stand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flows.stage_configs import CONFIGS
from stages.runtime.cli import known_flags
from tests.stages.directly import Done, run_program
from tests.stages.megatron_answers import ANSWERS, PRINTED, RUNS
from tests.test_docs import ROOT
from tests.trainyard.retrieval.projects import make_project
from tests.vectors import GOLDEN
from trainyard.config import leaves
from trainyard.config_text import parse_document
from trainyard.megatron_cli.program_lookup import find_program
from trainyard.megatron_cli.spellings import flag
from trainyard.megatron_cli.tools import TOOLS

TEXT = (GOLDEN / "megatron_commands.jsonl").read_text()
LINES: list[dict[str, Any]] = [json.loads(line) for line in TEXT.splitlines()]
NAMES = [Path(line["script"]).name for line in LINES]


@pytest.fixture(autouse=True)
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # what a command sets is taken back
        monkeypatch.delenv(name)


def door(program: str, *words: str) -> Done:
    return run_program("stages.megatron", program, *words)


def test_the_lines_are_those_of_the_reference(shared: Path) -> None:
    assert (shared / "reference/megatron_commands.jsonl").read_text() == TEXT


def test_every_line_is_in_the_table_and_nothing_else() -> None:
    assert set(NAMES) == set(ANSWERS)


@pytest.mark.parametrize(("name", "line"), list(zip(NAMES, LINES, strict=True)), ids=NAMES)
def test_a_line_is_answered_as_the_table_says(name: str, line: dict[str, Any]) -> None:
    done = door(line["program"], *line["argv"], "--dry-run")
    expected = ANSWERS[name]
    last = done.err.splitlines()[-1] if done.err else ""
    if expected == RUNS:
        assert done.status == 0, last
        assert set(PRINTED.get(name, ())) <= set(done.out.splitlines())
        return
    assert expected in last
    assert done.status == (1 if "is missing" in expected else 2)
    assert "Traceback" not in done.err


def test_every_flag_of_pretrain_means_something_to_every_tool() -> None:
    """Of commands that train nothing: an option of a training is never an unknown one."""
    flags = [flag(name) for name, _, _ in leaves(CONFIGS["pretrain"])]
    own = {"on-code-change"}  # of ours, not of Megatron-LM
    for tool in TOOLS:
        known = known_flags(tool, CONFIGS[tool], None)
        unknown = [name for name in flags if known.meaning(name).kind == "unknown"]
        assert set(unknown) <= own, tool


OTHER_RELEASES = {
    "examples/classes/pretrain_gpt.py": "",
    "examples/classes/pretrain_mamba.py": "",
    "examples/inference/t5/simple_t5_batch_inference.py": "generates texts with a T5 too",
    "examples/multimodal/combine_state_dicts.py": "image models are not supported yet",
    "examples/multimodal/train.py": "image models are not supported yet",
    "examples/multimodal/model_converter/internvit_converter.py": "image models are not",
    "examples/multimodal/evaluation/evaluate_vqav2.py": "image models are not supported yet",
    "tasks/vision/main.py": "image models are not supported yet",
    "examples/export/knowledge_distillation/pretrain_gpt_modelopt.py": "drafting heads are not",
    "examples/export/ptq_and_trtllm_export/text_generation_ptq.py": "use stages.quantize",
    "examples/export/ptq_and_trtllm_export/trtllm_text_generation.py": "stages.reshard --saver hf",
    "examples/gptoss/01_convert_from_hf.py": "use stages.reshard",
    "examples/post_training/modelopt/convert_model.py": "use stages.reshard",
    "examples/post_training/modelopt/export.py": "use stages.reshard",
    "examples/post_training/modelopt/finetune.py": "use stages.finetune",
    "examples/post_training/modelopt/generate.py": "use stages.generate",
    "examples/post_training/modelopt/mmlu.py": "use stages.lm_eval",
    "examples/post_training/modelopt/quantize.py": "use stages.quantize",
    "examples/post_training/modelopt/train.py": "and drafting heads are not",
    "examples/deploy/text_generation_ptq.py": "use stages.quantize",
    "examples/deploy/trtllm_text_generation.py": "use stages.reshard --saver hf",
    "examples/inference/advanced/gpt_dynamic_inference.py": "",
    "examples/inference/gpt/simple_gpt_batch_inference.py": "",
    "examples/inference/launch_inference_server.py": "",
    "examples/inference/offline_inference.py": "",
    "examples/mimo/train.py": "image models are not supported yet",
    "tools/create_doc_index.py": "training of retrievers is not supported yet",
    "tools/generate_samples_gpt.py": "",
    "tools/openwebtext/blacklist_urls.py": "--url-preset openwebtext",
    "tasks/msdp/main.py": "dialogue by prompts in stages is not supported yet",
    "tools/checkpoint/hybrid_conversion.py": "use tools/checkpoint/convert.py",
}
"""Programs that other releases have, from core_v0.8 to main, and what is said to them."""


@pytest.mark.parametrize("path", OTHER_RELEASES)
def test_a_program_of_another_release_is_answered_by_its_whole_path(path: str) -> None:
    program = find_program(path)
    words = OTHER_RELEASES[path]
    assert bool(program.stage) == (not words)
    assert words in program.answer


OF_OTHER_SCRIPTS = {
    "modelopt/conf/openai/gpt-oss-20b.sh": (
        "pretrain_gpt.py",
        "--num-experts 4 --moe-router-topk 2 --moe-router-dtype fp32 --softmax-type learnable "
        "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 "
        "--window-size 127,0 --window-attn-skip-freq 2 --export-force-local-attention "
        "--enable-gpt-oss",
    ),
    "deepseekv3_proxy_flex_tp1pp4emp16etp1cp1/model_config.yaml": (
        "pretrain_gpt.py",
        "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --v-head-dim 8 "
        "--qk-pos-emb-head-dim 4 --num-experts 4 --moe-layer-freq ([0]*1+[1]*1) "
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep "
        "--moe-router-pre-softmax --moe-router-score-function sigmoid --mtp-num-layers 1 "
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tmL "
        "--nproc-per-node 2 --enable-experimental --no-load-optim --no-load-rng "
        "--recompute-granularity selective --recompute-modules mla_up_proj moe layernorm",
    ),
    "hybrid/model_config.yaml": (
        "pretrain_hybrid.py",
        "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec "
        "--hybrid-layer-pattern M- --mamba-head-dim 8 --mamba-num-heads 4 --mamba-num-groups 2",
    ),
    "modelopt/conf/deepseek-ai/DeepSeek-V2-Lite.sh": (
        "pretrain_gpt.py",
        "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --v-head-dim 8 "
        "--qk-pos-emb-head-dim 4 --num-experts 4 --moe-layer-freq ([0]+[1]*1) "
        "--moe-router-load-balancing-type seq_aux_loss --moe-token-drop-policy probs "
        "--rotary-scaling-factor 40 --mscale 0.707 --mscale-all-dim 0.707",
    ),
    "modelopt/conf/nvidia/Nemotron-H-8B-Base-8K.sh": (
        "pretrain_mamba.py",
        "--hybrid-layer-pattern M- --mamba-head-dim 8 --mamba-num-heads 4 --mamba-num-groups 2 "
        "--squared-relu --trust-remote-code --export-model-type MambaModel",
    ),
    "megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh": (
        "pretrain_gpt.py",
        "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --init-model-with-meta-device --use-nccl-ub "
        "--fsdp-double-buffer --fsdp-manual-registration --calculate-per-token-loss "
        "--use-distributed-optimizer --split '99,1,0' --deprecated-use-mcore-models",
    ),
}
"""What is new in scripts that are not in the file, over a small model."""
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3 "
    "--max-position-embeddings 64 --micro-batch-size 1 --train-iters 2 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --position-embedding-type rope "
    "--normalization RMSNorm --disable-bias-linear --dry-run"
)


@pytest.mark.slow
@pytest.mark.parametrize("script", OF_OTHER_SCRIPTS)
def test_options_of_scripts_of_other_releases_run(script: str) -> None:
    program, words = OF_OTHER_SCRIPTS[script]
    base = SMALL.replace("--num-layers 2 ", "") if "pattern" in words else SMALL
    if "--enable-gpt-oss" in words:  # which says what the positions are
        base = base.replace("--position-embedding-type rope ", "")
    done = door(program, *base.split(), *words.split())
    assert done.status == 0, done.err.splitlines()[-1]


def test_a_run_is_told_what_the_name_stands_for() -> None:
    line = next(line for line in LINES if line["script"] == "examples/pretrain_t5.sh")
    done = door(f"/m/{line['program']}", *line["argv"], "--dry-run")
    assert "--model-type t5 --tokenizer-type BertWordPieceLowerCase" in done.err
    assert 'model_type = "t5"' in done.out
    assert 'tokenizer_type = "BertWordPieceLowerCase"' in done.out


def test_the_hybrid_of_the_script_is_the_published_kind() -> None:
    line = next(line for line in LINES if line["program"] == "pretrain_mamba.py")
    done = door(line["program"], *line["argv"], "--dry-run")
    assert done.status == 0, done.err
    read = parse_document(done.out, ".toml", "dry run")
    assert (read["model_type"], read["hybrid_attention_ratio"]) == ("mamba", 0.08)
    newer = door("pretrain_hybrid.py", *_with_pattern(line["argv"]), "--dry-run")
    assert newer.status == 0, newer.err
    read = parse_document(newer.out, ".toml", "dry run")
    assert (read["hybrid_layer_pattern"], read["num_layers"]) == ("MM*-", 4)
    words = [*_with_pattern(line["argv"])[:-1], "MMM|*-"]
    staged = door("pretrain_hybrid.py", *words, "--pipeline-model-parallel-size", "2", "--dry-run")
    assert staged.status == 0, staged.err
    assert "the stages are --pipeline-model-parallel-layout 'Et*3|t*2L'" in staged.err
    read = parse_document(staged.out, ".toml", "dry run")
    assert (read["hybrid_layer_pattern"], read["num_layers"]) == ("MMM*-", 5)
    assert read["pipeline_model_parallel_layout"] == "Et*3|t*2L"


def _with_pattern(words: list[str]) -> list[str]:
    """The command with a pattern in place of a number of layers and ratios."""
    kept = list(words)
    for name in ("--num-layers", "--hybrid-attention-ratio", "--hybrid-mlp-ratio"):
        at = kept.index(name)
        del kept[at : at + 2]
    return [*kept, "--hybrid-layer-pattern", "MM*-"]


def test_help_is_the_table_and_is_quick() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "stages.megatron", "--help"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert time.monotonic() - began < 5  # half a second on an idle machine
    assert "pretrain_gpt.py" in done.stdout
    assert "image models are not supported yet" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "numpy", "tyro", "stages.pretrain.config"} & imported


def test_a_retro_project_brings_its_options_of_data(tmp_path: Path) -> None:
    made = make_project(tmp_path)
    line = next(line for line in LINES if line["program"] == "pretrain_retro.py")
    folder = str(made.project.url)
    words = [folder if word == "/x" else word for word in line["argv"]]
    few = ("--lr-decay-samples", "24", "--lr-warmup-samples", "4", "--save", str(tmp_path / "run"))
    done = door(line["program"], *words, *few, "--dry-run")
    assert done.status == 0, done.err
    read = parse_document(done.out, ".toml", "dry run")
    config = made.project.config
    assert read["seq_length"] == config.retro_gpt_seq_length
    assert read["train_samples"] == config.retro_gpt_train_samples
    assert read["eval_iters"] == config.retro_gpt_eval_iters  # not the line's 10
    assert read["split"] == "98,2,0"  # the line's
    assert read["model_type"] == "retro"
