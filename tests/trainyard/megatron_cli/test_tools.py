"""Megatron-LM's vocabulary in commands that train nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stages.benchmark.config import BenchmarkConfig
from stages.evaluate.config import EvaluateConfig
from stages.generate.config import GenerateConfig
from stages.merge.config import MergeConfig
from stages.plan.config import PlanConfig
from stages.pretrain.config import PretrainConfig
from stages.reshard.config import ReshardConfig
from stages.retro_preprocess.config import RetroPreprocessConfig
from stages.score.config import ScoreConfig
from stages.serve.config import ServeConfig
from stages.tokenize.config import TokenizeConfig
from tests.trainyard.megatron_cli.flags import CHOICES, MAIN, TRAINING
from trainyard.config import leaves
from trainyard.errors import ConfigError
from trainyard.megatron_cli.command import understand
from trainyard.megatron_cli.spellings import ToolVocabulary, Vocabulary, vocabulary
from trainyard.megatron_cli.tools import TOOLS
from trainyard.models.expected import COMPARED, check_expected
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.latent_config import LatentConfig
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.moe_config import MoEConfig

PRETRAIN = vocabulary(PretrainConfig)
CONFIGS = {
    "tokenize": TokenizeConfig,
    "merge": MergeConfig,
    "reshard": ReshardConfig,
    "plan": PlanConfig,
    "evaluate": EvaluateConfig,
    "benchmark": BenchmarkConfig,
    "generate": GenerateConfig,
    "retro_preprocess": RetroPreprocessConfig,
    "score": ScoreConfig,
    "serve": ServeConfig,
}
KNOWN = {
    name: ToolVocabulary(
        config, ("yaml-cfg",) if name == "plan" else (), TOOLS[name], lambda: PRETRAIN, COMPARED
    )
    for name, config in CONFIGS.items()
}


def ours(stage: str, line: str) -> str:
    return " ".join(understand(line.split(), KNOWN[stage], {}).arguments)


def test_every_flag_of_main_is_known_to_a_training() -> None:
    kinds = {name: PRETRAIN.meaning(name).kind for name in MAIN.split()}
    assert [name for name, kind in kinds.items() if kind == "unknown"] == []


def test_every_value_that_megatron_offers_is_one_of_ours_or_refused_with_a_reason() -> None:
    choices = {
        name.replace("_", "-"): str(annotation) for name, annotation, _ in leaves(PretrainConfig)
    }
    for flag, values in CHOICES.items():
        for value in values.split():
            said = translated_or_refused(f"--{flag} {value}")
            if said and not said[0].startswith(f"--{flag} {value}: "):
                assert f"'{said[1]}'" in choices[said[0][2:]], (flag, value)


def translated_or_refused(line: str) -> list[str]:
    """The arguments of ours, none if the flag is ignored; or the one line of a refusal."""
    try:
        return understand(line.split(), PRETRAIN, {}).arguments
    except ConfigError as error:
        return [str(error)]


@pytest.mark.parametrize("stage", TOOLS)
def test_every_flag_has_an_answer_in_every_command(stage: str) -> None:
    known: Vocabulary = KNOWN[stage]
    for flag in f"{TRAINING} {MAIN}".split():
        meaning = known.meaning(flag.replace("_", "-"))
        assert meaning.kind != "unknown", flag
        assert meaning.reason or meaning.kind in ("ours", "rule", "checked"), flag
    assert known.meaning("no-such-flag").kind == "unknown"


@pytest.mark.parametrize(
    ("stage", "line", "expected"),
    [
        ("tokenize", "--input a --chunk-size 25 --num-layers 2 --fp16", "--input a"),
        (
            "score",
            "--data-path a --out-path b --total 9 --workers 2",
            "--input a --output-dir b --workers 2",
        ),
        ("generate", "--genfile a --num_samples 9", "--output-dir a --num-samples 9"),
        ("generate", "--sample-input-file p --num-samples", "--prompt-file p"),
        (
            "tokenize",
            "--input a --vocab v --dataset-impl mmap --tokenizer-type BertWordPieceCase",
            "--input a --vocab-file v --tokenizer-type BertWordPieceCase",
        ),
        ("merge", "--input a --lr 1 --use-torch-fsdp2", "--input a"),
        ("reshard", "--model-type GPT --loader mcore", "--model-type GPT --loader core"),
        ("reshard", "--saver megatron --max-queue-size 50", "--saver megatron"),
        (
            "reshard",
            "--loader loader_mixtral_hf --saver saver_core",
            "--loader mixtral_hf --saver core",
        ),
        ("plan", "--num-layers 2 --train-iters 9 --profile", "--num-layers 2"),
        ("plan", "--sequence-parallel --num-layers 2", "--num-layers 2"),
        ("plan", "--optimizer dist_muon", "--optimizer muon --use-distributed-optimizer"),
        ("plan", "--spec x mamba_stack_spec --num-layers 2", "--model-type mamba --num-layers 2"),
        ("plan", "--hybrid-layer-pattern MM*-", "--hybrid-layer-pattern MM*- --num-layers 4"),
        (
            "plan",
            "--hybrid-layer-pattern MM|*-",
            "--hybrid-layer-pattern MM*- --pipeline-model-parallel-layout Et*2|t*2L --num-layers 4",
        ),
        ("plan", "--recompute-modules moe_act", "--recompute-modules mlp"),
        ("plan", "--nproc-per-node 8", "--world-size 8"),
        ("plan", "--nproc-per-node 8 --world-size 16", "--world-size 16"),
        ("plan", "--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type alltoall"),
        ("plan", "--use-custom-fsdp --outer-dp-sharding-strategy no_shard", "--use-megatron-fsdp"),
        ("evaluate", "--batch-size 8 --fp16 --no-load-optim", "--micro-batch-size 8"),
        ("evaluate", "--task SQUAD --valid-data a b", "--task squad --valid-data a b"),
        (
            "evaluate",
            "--load c --num-layers 24 --swiglu --ckpt-step 7",
            "--load c/iter_0000007 --expect num_layers=24 swiglu=true",
        ),
        ("benchmark", "--load c --max-tokens-to-oom 9 --stream", "--load c --stream"),
        ("generate", "--load c --engine-type static --stream", "--load c"),
        (
            "generate",
            "--load c --prompts a --out-seq-length 9 --top_p 0.5 --return-log-probs --num-layers 2",
            "--load c --prompts a --num-tokens-to-generate 9 --top-p 0.5 --return-log-probs "
            "--expect num_layers=2",
        ),
        ("retro_preprocess", "--load b --num-layers 24 --DDP-impl local", "--load b"),
        (
            "retro_preprocess",
            "--retro-num-neighbors-query 20",
            "--retro-query-num-neighbors-query 20",
        ),
        (
            "retro_preprocess",
            "--retro-index-nprobe 4096 --retro-bert-chunk-length 256",
            "--retro-query-nprobe 4096 --retro-bert-max-chunk-length 256",
        ),
        ("benchmark", "--max-batch-size 2 --top_p 0.5", "--inference-max-requests 2 --top-p 0.5"),
        (
            "benchmark",
            "--engine-type dynamic --cuda-graph-impl local --incoming-requests-per-sec -1 "
            "--inference-dynamic-batching-num-cuda-graphs -1 --model-provider hybrid",
            "--engine-type dynamic --inference-dynamic-batching-num-cuda-graphs 16",
        ),
        (
            "benchmark",
            "--cuda-graph-impl local --incoming-requests-per-sec 2.5",
            "--cuda-graph-impl local --request-rate 2.5",
        ),
        (
            "evaluate",
            "--moe-router-score-function sigmoid --moe-router-pre-softmax",
            "--expect moe_router_score_function=sigmoid",
        ),
    ],
)
def test_options_of_a_training_are_ignored_or_compared(
    stage: str, line: str, expected: str
) -> None:
    assert ours(stage, line) == expected


@pytest.mark.parametrize(
    ("stage", "line", "message"),
    [
        ("plan", "--mtp-use-repeated-layer", "has a transformer layer of its own"),
        ("plan", "--spec my.module my_spec", "pass a model of your own to the library"),
        (
            "tokenize",
            "--tokenizer-type Llama3Tokenizer",
            "--tokenizer-type Llama3Tokenizer: give --tokenizer-type HuggingFaceTokenizer",
        ),
        ("plan", "--outer-dp-sharding-strategy optim", "hold copies of each other's shards"),
        (
            "evaluate",
            "--task RACE",
            "--task RACE: the task RACE trains a BERT, which stages.classify does",
        ),
        ("benchmark", "--num-tokens-to-prompt 8 16", "give --input-lengths uniform:LOW:HIGH"),
        ("benchmark", "--output-path x", "name a folder for the results with --output-dir"),
        ("generate", "--engine-type dynamic", "--engine-type dynamic run requests as they come"),
        ("benchmark", "--num-tokens-from-file", "give --trace-file, whose lines have"),
        ("generate", "--num-input-tokens 3", "random prompts are for stages.benchmark"),
        ("merge", "--inputt a", "--inputt is not an option: did you mean --input"),
    ],
)
def test_what_would_change_the_result_is_refused(stage: str, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(stage, line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--img-h 100", "--img-h is not supported: it is an option of pretrain_vision_classify.py"),
        ("--retriever-seq-length 9", "it is an option of pretrain_ict.py"),
        ("--optimizer soap", "--optimizer soap: the optimizer soap is not supported yet"),
    ],
)
def test_a_training_refuses_options_of_other_programs(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        understand(line.split(), PRETRAIN, {})
    assert understand(["--img-h", "224"], PRETRAIN, {}).arguments == []


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("tokenizer-type", "the checkpoint brings its tokenizer"),
        ("expert-model-parallel-size", "not the sequences or the experts"),
        ("fp8-format", "--inference-weight-dtype fp8 compute in FP8"),
    ],
)
def test_commands_that_generate_say_why_they_ignore_what_is_not_of_training_alone(
    flag: str, reason: str
) -> None:
    for stage in ("benchmark", "generate", "serve"):
        (remark,) = understand([f"--{flag}", "x"], KNOWN[stage], {}).remarks
        assert remark.startswith(f"--{flag}: ignored: ")
        assert remark.endswith(reason)


def test_a_switch_for_what_an_engine_does_anyway_is_named_so() -> None:
    for stage in ("benchmark", "serve"):
        for flag, off in (
            ("enable-chunked-prefill", "--disable-chunked-prefill"),
            ("inference-dynamic-batching-prefix-caching", "--disable-prefix-caching"),
        ):
            (remark,) = understand([f"--{flag}"], KNOWN[stage], {}).remarks
            assert remark.startswith(f"--{flag}: ignored: ")
            assert remark.endswith(f"unless {off}")


def test_quotes_that_a_script_left_are_taken_off() -> None:
    words = ["--split", "'99,1,0'", "--data-path", '"a"', "b's"]
    assert understand(words, PRETRAIN, {}).arguments == [
        *("--split", "99,1,0", "--data-path", "a", "b's")
    ]
    said = understand(["--prompts", '"quoted"'], KNOWN["benchmark"], {}).arguments
    assert said == ["--prompts", '"quoted"']


MODEL = GPTConfig(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32)


MIXTURE = replace(
    MODEL,
    moe=MoEConfig(num_experts=4, moe_layer_freq="[0,1]", moe_ffn_hidden_size=32),
    mla=LatentConfig(multi_latent_attention=True, kv_lora_rank=8),
    position_embedding_type="rope",
)
HYBRID = MambaConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=32,
    hybrid_layer_pattern="M*",
    mamba_num_groups=2,
)


def test_the_parts_that_only_some_models_have_are_compared_too() -> None:
    same = "num_experts=4 moe_layer_freq=[0]*1+[1]*1 moe_ffn_hidden_size=32 kv_lora_rank=8"
    check_expected((*same.split(), "yarn_mscale=1.0"), MIXTURE, "c")
    check_expected(("hybrid_layer_pattern=M*", "mamba_num_heads=2"), HYBRID, "c")
    check_expected(("hybrid_layer_pattern=M|*",), HYBRID, "c")
    check_expected(("moe_router_topk=8", "kv_lora_rank=512", "yarn_mscale=3"), MODEL, "c")
    for model, entry, found in (
        (MIXTURE, "moe_layer_freq=1", "[0,1], not 1"),
        (MIXTURE, "moe_router_pre_softmax=true", "false, not true"),
        (MIXTURE, "q_lora_rank=16", "not set, not 16"),
        (MIXTURE, "rotary_scaling_factor=40", "is not an option that"),
        (MODEL, "num_experts=8", "not set, not 8"),
        (MODEL, "hybrid_layer_pattern=M*", "not set, not M*"),
        (HYBRID, "hybrid_layer_pattern=M-", "M*, not M-"),
    ):
        with pytest.raises(ConfigError) as error:
            check_expected((entry,), model, "c")
        assert found in str(error.value)


@pytest.mark.parametrize(
    "expect",
    [
        ("num_layers=2", "ffn_hidden_size=256", "rotary_base=10000", "swiglu=false"),
        ("max_position_embeddings=32", "kv_channels=16", "num_query_groups=4"),
    ],
)
def test_a_model_that_is_the_expected_one_passes(expect: tuple[str, ...]) -> None:
    check_expected(expect, MODEL, "--load c")


def test_a_model_that_differs_is_refused_with_every_difference() -> None:
    with pytest.raises(
        ConfigError,
        match=r"c: its --num-layers is 2, not 24; its --swiglu is false, not true; leave out",
    ):
        check_expected(("num_layers=24", "hidden_size=64", "swiglu=true"), MODEL, "c")
    with pytest.raises(ConfigError, match="--expect lr=1: 'lr' is not an option that describes"):
        check_expected(("lr=1",), MODEL, "c")
