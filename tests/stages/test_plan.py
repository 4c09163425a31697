"""The plan stage: the report that users of Megatron-LM know, and the document behind it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stages.plan.config import PlanConfig
from stages.plan.run import plan, report, run
from stages.runtime.cli import parse_options
from tests.stages.directly import run_directly, run_program
from trainyard.config import digest_relevant, from_dict
from trainyard.errors import ConfigError

GPT_345M: dict[str, Any] = {
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "micro_batch_size": 4,
    "vocab_size": 50257,
}
MIXTRAL: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "ffn_hidden_size": 14336,
    "seq_length": 4096,
    "group_query_attention": True,
    "num_query_groups": 8,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 32000,
    "num_experts": 8,
}
LLAMA3_8B = {**MIXTRAL, "seq_length": 8192, "vocab_size": 128256, "num_experts": None}


def configure(base: dict[str, Any] = GPT_345M, **changes: Any) -> PlanConfig:
    return from_dict(PlanConfig, base | changes)


def test_the_report_equals_the_upstream_one_line_by_line() -> None:
    upstream, blank, *ours = report(configure()).partition("\n\n")
    assert upstream.splitlines() == [
        "Number of parameters in transformer block in billions:  0.30",
        "Number of parameters in embedding layers in billions: 0.05",
        "Total number of parameters in billions: 0.35",
        "Number of parameters in most loaded shard in billions: 0.3536",
        "Activation memory footprint per transformer layer (precise, without SP): 272.0 MB",
        "Theoretical memory footprints: weight and optimizer=6069.97 MB, "
        "activation=7704.97 MB, total=13774.94 MB",
    ]
    assert blank
    assert "FLOPs per token: 2.4" in ours[0]


def test_a_small_model_is_counted_in_millions() -> None:
    small = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 4096}
    lines = report(configure(**small)).splitlines()
    assert lines[:4] == [
        "Number of parameters in transformer block in millions:  3.15",
        "Number of parameters in embedding layers in millions: 1.05",
        "Total number of parameters in millions: 4.20",
        "Number of parameters in most loaded shard in millions: 4.1989",
    ]


def test_the_memory_of_a_small_model_is_in_a_unit_that_shows_it() -> None:
    small = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 512}
    text = report(configure(**small, seq_length=64))
    found = re.search(r"Memory of a device, .*: ([0-9.]+) MB\n  parameters ([0-9.]+) \+", text)
    assert found is not None, text
    assert 0 < float(found[2]) < float(found[1]) < 100


def test_a_pipeline_inserts_its_lines() -> None:
    lines = report(
        configure(
            pipeline_model_parallel_size=4,
            tensor_model_parallel_size=2,
            num_layers_per_virtual_pipeline_stage=3,
            sequence_parallel=True,
            recompute_granularity="selective",
            global_batch_size=64,
        )
    ).splitlines()
    assert lines[4] == "Number of parameters in other shards in billions: 0.0378"
    assert lines[5] == "Activation memory footprint per transformer layer: 136.0 MB"
    assert lines[6] == "Memory penalty from interleaved schedule: 1.38"
    assert lines[7] == "Number of in-flight microbatches: 6"


def test_experts_insert_their_lines() -> None:
    lines = report(configure(MIXTRAL)).splitlines()
    assert lines[0] == "Number of parameters in transformer block in billions:  46.44"
    assert lines[1] == "Number of active parameters in transformer block in billions: 12.62"
    assert lines[4] == "Total number of active parameters in billions: 12.88"
    assert plan(configure(MIXTRAL))["parameters"]["exact"] == 46_702_792_704


def test_the_parts_of_memory_add_up_to_the_total() -> None:
    shared = {"use_distributed_optimizer": True, "world_size": 8, "global_batch_size": 64}
    document = plan(configure(**shared))
    memory, shard = document["memory_bytes"], document["parameters"]["most_loaded_shard"]
    assert memory["parameters"] == 2 * shard
    assert memory["gradients"] == 4 * shard
    assert memory["optimizer"] == 12 * shard / 8
    parts = ("parameters", "gradients", "optimizer", "activations")
    assert memory["total"] == sum(memory[part] for part in parts)
    assert document["data_parallel_size"] == 8
    assert document["tokens_per_iteration"] == 64 * 2048


@pytest.mark.parametrize(("name", "model"), [("gpt_345m", GPT_345M), ("llama3_8b_gqa", LLAMA3_8B)])
def test_memory_equals_megatrons_figures(golden: Path, name: str, model: dict[str, Any]) -> None:
    vectors = json.loads((golden / "megatron_vectors.json").read_text())["compute"][name]
    upstream = vectors["weight_and_optimizer_bytes"]
    memory = plan(configure(model))["memory_bytes"]
    assert memory["parameters"] + memory["gradients"] + memory["optimizer"] == upstream
    assert memory["activations"] == vectors["activation_bytes_without_sp"]
    line = report(configure(model)).splitlines()[5]
    assert f"weight and optimizer={upstream / 2**20:.2f} MB" in line


def test_full_recompute_has_its_own_number() -> None:
    assert plan(configure())["activations_with_full_recompute_bytes"] is None
    config = configure(recompute_granularity="full")
    assert plan(config)["activations_with_full_recompute_bytes"] > 0
    assert "Activations with full recomputation" in report(config)


def test_the_document_and_the_picture_are_written_to_the_output_folder(tmp_path: Path) -> None:
    options = {**GPT_345M, "show_schedule": True}
    metrics = run_directly(PlanConfig, run, **options, output_dir=str(tmp_path / "plan"))
    document = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert document == plan(configure(options))
    assert "pipeline" in document
    assert metrics == {"num_parameters": document["parameters"]["exact"]}
    assert (tmp_path / "plan" / "schedule.svg").read_text().startswith("<svg ")


# --- the pipeline -----------------------------------------------------------------------------

PIPELINE: dict[str, Any] = {
    "pipeline_model_parallel_size": 4,
    "global_batch_size": 32,
    "show_schedule": True,
}


def test_the_schedule_is_drawn_with_the_cost_of_every_stage() -> None:
    text = report(configure(**PIPELINE))
    assert "Pipeline schedule: 1F1B, 4 ranks, 8 micro-batches" in text
    assert "rank 3 |......0--0======1--1=====" in text  # longer: the output layer is there
    assert "stages of equal cost would idle 27.3%" in text
    assert "rank 0: embedding, layers 0-5; idle 49.0%, activations of up to 4 micro-" in text
    assert "rank 3: layers 18-23, output; idle 19.1%" in text


def test_the_schedule_is_left_out_unless_asked_for() -> None:
    quiet = configure(**PIPELINE | {"show_schedule": False})
    assert "Pipeline" not in report(quiet)
    assert "pipeline" not in plan(quiet)


def test_a_layout_that_counts_the_output_layer_idles_less() -> None:
    even = plan(configure(**PIPELINE))["pipeline"]
    better = plan(configure(**PIPELINE, pipeline_model_parallel_layout="Et*7|t*7|t*7|t*3L"))
    assert better["pipeline"]["bubble"] < even["bubble"] - 0.1
    assert better["pipeline"]["step_duration"] < even["step_duration"]
    layers = [rank["stages"][0]["layers"] for rank in better["pipeline"]["ranks"]]
    assert list(map(len, layers)) == [7, 7, 7, 3]


def test_memory_is_that_of_the_first_of_uneven_ranks() -> None:
    even = plan(configure(pipeline_model_parallel_size=4))
    heavy = plan(configure(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=9))
    light = plan(configure(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=3))
    for part in ("parameters", "activations"):
        sizes = [plan_["memory_bytes"][part] for plan_ in (light, even, heavy)]
        assert sizes == sorted(sizes)
        assert sizes[0] < sizes[2]
    assert heavy["parameters"]["other_shards"] < even["parameters"]["other_shards"]


def test_interleaving_by_layers_equals_interleaving_by_number() -> None:
    by_layers = plan(configure(**PIPELINE, num_layers_per_virtual_pipeline_stage=3))
    by_number = plan(configure(**PIPELINE, num_virtual_stages_per_pipeline_rank=2))
    assert by_layers == by_number
    pipeline = by_number["pipeline"]
    assert pipeline["virtual_stages"] == 2
    assert pipeline["microbatch_group_size"] == 4
    assert pipeline["ranks"][1]["stages"][1]["layers"] == [15, 16, 17]
    assert [rank["peak_in_flight"] for rank in pipeline["ranks"]] == [11, 9, 7, 5]


def test_a_plan_with_other_recomputation_is_another_plan() -> None:
    full = configure(recompute_granularity="full")
    assert digest_relevant(full) != digest_relevant(configure())


GROUP_OF_3 = {
    **{"num_virtual_stages_per_pipeline_rank": 2},
    **{"microbatch_group_size_per_virtual_pipeline_stage": 3},
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {**PIPELINE, "microbatch_group_size_per_virtual_pipeline_stage": 4},
            "only to the interleaved schedule",
        ),
        ({**PIPELINE, **GROUP_OF_3}, "stage 3: .* choose 4 or 8"),
        (
            {**PIPELINE, "pipeline_model_parallel_layout": "Et*12|tL"},
            "has 13 transformer layers",
        ),
        ({"global_batch_size": 6}, r"--global-batch-size \(6\) must be divisible by --micro-batch"),
        (
            {"world_size": 6, "tensor_model_parallel_size": 4},
            r"6 ranks in all .* must be .* replicas: 4 or 8 would do",
        ),
        (
            {"world_size": 3, "tensor_model_parallel_size": 4},
            r"3 ranks in all .* must be .* replicas: 4 would do",
        ),
        ({"world_size": 8, "data_parallel_size": 2}, r"x --data-parallel-size \(2\): 2 would do"),
        (
            {"world_size": 6, "context_parallel_size": 4},
            r"x --context-parallel-size \(4\) x a whole number of replicas",
        ),
        ({"context_parallel_size": 3}, r"--seq-length \(2048\) must be divisible by 2 x --context"),
        ({"context_parallel_size": 0}, "--context-parallel-size must be above 0"),
        ({"sequence_parallel": True}, "--sequence-parallel needs --tensor-model-parallel-size"),
        ({"vocab_size": 0}, "--vocab-size must be above 0"),
        ({"data_parallel_size": 0}, "--data-parallel-size must be above 0"),
        ({"pipeline_model_parallel_size": 7}, "--num-layers"),
        ({"hidden_size": 10**15}, "--hidden-size must be at most 2147483647, got 1000000000000000"),
        ({"num_layers": 10**9}, "--num-layers must be at most 4096, got 1000000000"),
        ({"vocab_size": 2**31}, "--vocab-size must be at most 2147483647, got 2147483648"),
        (
            {"hidden_size": 2**20, "vocab_size": 2**30},
            "the model has 1.4e.15 parameters, .*rows of",
        ),
        ({"num_experts": 10**15}, "--num-experts must be at most"),
        ({"num_experts": 4, "expert_model_parallel_size": 3}, "--num-experts"),
    ],
)
def test_sizes_that_do_not_match_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        configure(**changes)


# --- presets, context parallelism -------------------------------------------------------------

PRESETS = sorted((Path(__file__).parents[2] / "recipes" / "models").glob("*.toml"))


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_can_be_planned(preset: Path) -> None:
    document = tomllib.loads(preset.read_text())
    config = from_dict(PlanConfig, {**document, "vocab_size": 50257}, preset.stem)
    found = plan(config)
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    degrees += ("expert_model_parallel_size",)  # the fewest replicas that hold all experts
    assert found["num_devices"] == math.prod(document.get(degree, 1) for degree in degrees)
    samples = document["micro_batch_size"] * found["data_parallel_size"]
    assert found["num_microbatches"] * samples == document["global_batch_size"]
    assert found["memory_detail_bytes"]["total"] > 0
    lines = report(config).splitlines()
    (cut,) = [line for line in lines if line.startswith("Devices: ")]
    assert ("sequence parallel" in cut) == document.get("sequence_parallel", False)
    assert ("distributed optimizer" in cut) == document.get("use_distributed_optimizer", False)
    assert max(map(len, lines)) <= 150


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_the_plan_command_in_every_preset_works(preset: Path) -> None:
    text = preset.read_text()
    (command,) = re.findall(r"python -m stages\.plan (--config \S+ \\\n#.*)\n", text)
    words = command.replace("\\\n#", "").split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert Path(given.pop("--config")) == preset.relative_to(preset.parents[2])
    flags = {name[2:].replace("-", "_"): int(value) for name, value in given.items()}
    assert flags.keys() == {"vocab_size", "world_size"}
    assert f"{flags['vocab_size']:,} tokens" in text
    assert plan(from_dict(PlanConfig, tomllib.loads(text) | flags))["num_devices"] > 1


def test_flags_override_a_preset() -> None:
    flags = ["--vocab-size", "128256", "--world-size", "64", "--context-parallel-size", "4"]
    preset = next(str(path) for path in PRESETS if path.stem == "llama3-8b")
    done = run_program("stages.plan", "--config", preset, *flags, expect=0)
    assert (
        "Devices: 64 = 2 tensor x 1 pipeline x 4 context x 8 data parallel; sequence parallel; "
        "distributed optimizer; 128 x 1 samples a replica and step\n"
    ) in done.out


def test_a_document_of_pretrain_is_planned_for_the_ranks_that_it_starts(tmp_path: Path) -> None:
    run = {"nproc_per_node": 4, "train_iters": 5, "tensor_model_parallel_size": 2}
    document = plan(configure(**run))
    assert (document["num_devices"], document["data_parallel_size"]) == (4, 2)
    (tmp_path / "run.json").write_text(json.dumps({**GPT_345M, **run}))
    arguments = ["--config", str(tmp_path / "run.json"), "--world-size", "16"]
    over, _ = parse_options(PlanConfig, arguments, None, None, [])
    assert over.num_devices == 16


def test_a_key_that_is_no_option_of_pretrain_either_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key 'overlap_grad_reduc'; did you mean 'over"):
        configure(overlap_grad_reduc=True)


def test_context_parallel_ranks_share_activations_and_the_state_of_the_optimizer() -> None:
    zero = {"use_distributed_optimizer": True, "global_batch_size": 64, "data_parallel_size": 2}
    one, four = (plan(configure(**zero, context_parallel_size=cp)) for cp in (1, 4))
    assert (one["num_devices"], four["num_devices"]) == (2, 8)
    for kind in ("memory_bytes", "memory_detail_bytes"):
        of_one, of_four = one[kind], four[kind]
        assert of_four["parameters"] == of_one["parameters"], kind
        assert of_four["gradients"] == of_one["gradients"], kind
        assert of_four["optimizer"] == of_one["optimizer"] / 4, kind
        assert of_four["activations"] == of_one["activations"] / 4, kind
    assert four["flops_per_iteration"] == one["flops_per_iteration"]


def test_expert_parallelism_shares_out_the_experts_and_their_optimizer_state() -> None:
    one = MIXTRAL | {"world_size": 8, "use_distributed_optimizer": True}
    spread = plan(configure(one | {"expert_model_parallel_size": 8}))["memory_detail_bytes"]
    whole = plan(configure(one))["memory_detail_bytes"]
    experts = 32 * 8 * 3 * 4096 * 14336
    assert whole["parameters"] - spread["parameters"] == pytest.approx(2 * experts * 7 / 8)
    # Either way every number of the optimizer's state is on one device.
    assert spread["optimizer"] == pytest.approx(whole["optimizer"])


@pytest.mark.slow
def test_the_command_prints_json_without_loading_torch_or_numpy() -> None:
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in GPT_345M.items()]
    began = time.monotonic()
    command = [sys.executable, "-X", "importtime", "-m", "stages.plan", *flags, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 5
    assert json.loads(done.stdout) == plan(configure())
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "trainyard.models.costs.flops" in imported
    assert not imported & {"torch", "numpy", "tokenizers", "prefect"}
