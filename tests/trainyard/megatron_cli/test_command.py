"""Megatron-LM's command lines: every flag is translated, ignored or answered."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from stages.pretrain.config import PretrainConfig
from stages.runtime.common_options import MegatronOptions
from tests.trainyard.megatron_cli.flags import TRAINING
from trainyard.errors import ConfigError
from trainyard.megatron_cli.absent import HARMLESS
from trainyard.megatron_cli.command import RULES, understand
from trainyard.megatron_cli.spellings import EXACT, NOT_OPTIONS, RENAMED, vocabulary
from trainyard.megatron_cli.spellings import RULES as OF_TRAINING
from trainyard.megatron_cli.tools import TOOLS

MORE = ("yaml-cfg", "config", "log-level", "help", "world-size", "init-method")
VOCABULARY = vocabulary(PretrainConfig, MORE)

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
LAUNCHED |= {"LOCAL_RANK": "1"}


def ours(line: str, environ: dict[str, str] | None = None) -> str:
    return " ".join(understand(line.split(), VOCABULARY, environ or {}).arguments)


def remarks(line: str, environ: dict[str, str] | None = None) -> list[str]:
    return understand(line.split(), VOCABULARY, environ or {}).remarks


def test_every_flag_has_an_answer() -> None:
    kinds = Counter(_check(name) for name in TRAINING.split())
    assert kinds.keys() == {"ours", "rule", "accepted", "absent"}
    assert kinds["ours"] > 200


def _check(name: str) -> str:
    meaning = VOCABULARY.meaning(name.replace("_", "-"))
    assert meaning.reason or meaning.kind in ("ours", "rule"), name
    if meaning.kind == "accepted":
        for line in (f"--{name}", f"--{name} 2 15 --lr 1", f"--{name}=15"):
            understood = understand(line.split(), VOCABULARY, {})
            assert understood.arguments in ([], ["--lr", "1"])
            assert understood.remarks == [f"--{name}: ignored: {meaning.reason}"]
    elif meaning.kind == "absent":
        with pytest.raises(ConfigError, match=f"--{name} is not supported: "):
            ours(f"--{name} 77")
    return meaning.kind


def test_no_option_of_ours_is_in_the_tables() -> None:
    others = {*EXACT, *RENAMED} - {"batch-size", "train-steps"}
    assert [name for name in others if VOCABULARY.ours(name) is not None] == []
    assert [new for new in RENAMED.values() if VOCABULARY.meaning(new).kind == "unknown"] == []
    assert not set(NOT_OPTIONS) & {*EXACT, *RENAMED}
    assert [name for name in HARMLESS if VOCABULARY.meaning(name).kind != "absent"] == []


def test_every_flag_that_is_more_than_a_spelling_has_a_rule_and_every_rule_a_flag() -> None:
    named = {*OF_TRAINING, *(name for tool in TOOLS.values() for name in tool.rules)}
    assert named == RULES.keys()


@pytest.mark.parametrize("field", ["yaml_cfg", "world_size", "init_method"])
def test_additional_flags_are_in_the_help(field: str) -> None:
    assert field in MegatronOptions.__dataclass_fields__


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--batch-size 4 --train-steps 9", "--micro-batch-size 4 --train-iters 9"),
        ("--warmup-steps 5 --gradient-clip-val .5", "--lr-warmup-iters 5 --clip-grad .5"),
        ("--encoder-seq-length 64", "--seq-length 64"),
        (
            "--model-type T5 --encoder-num-layers 12 --decoder-num-layers 6",
            "--model-type t5 --num-layers 12 --decoder-num-layers 6",
        ),
        (
            "--decoder-seq-length 128 --softmax-scale 1",
            "--decoder-seq-length 128 --softmax-scale 1",
        ),
        ("--model-parallel-size 2", "--tensor-model-parallel-size 2"),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --fsdp-double-buffer"
            " --ckpt-format fsdp_dtensor --init-model-with-meta-device",
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
        ),
        (
            "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
            "--use-torch-fsdp2 --no-torch-fsdp2-reshard-after-forward",
        ),
        (
            "--retro-add-retriever --retro-workdir p --retro-encoder-layers 2",
            "--model-type retro --retro-project-dir p --retro-encoder-layers 2",
        ),
        ("--model-type retro --retro-add-retriever", "--model-type retro"),
        ("--spec x.mamba_layer_specs mamba_stack_spec --lr 1", "--model-type mamba --lr 1"),
        ("--model-type mamba --spec x mamba_stack_spec", "--model-type mamba"),
        ("--spec x hybrid_stack_spec", "--model-type mamba"),
        ("--spec local", ""),
        (
            "--enable-gpt-oss --num-layers 24",
            "--position-embedding-type yarn --yarn-rotary-scaling-factor 32 "
            "--yarn-original-max-position-embeddings 131072 "
            "--no-yarn-correction-range-round-to-int --num-layers 24",
        ),
        (
            "--enable-gpt-oss --position-embedding-type yarn --rotary-scaling-factor 8 "
            "--original-max-position-embeddings 4096",
            "--no-yarn-correction-range-round-to-int --position-embedding-type yarn "
            "--yarn-rotary-scaling-factor 8 --yarn-original-max-position-embeddings 4096",
        ),
        (
            "--moe-token-dispatcher-type flex --moe-router-score-function sigmoid "
            "--moe-router-pre-softmax",
            "--moe-token-dispatcher-type alltoall --moe-router-score-function sigmoid",
        ),
        ("--moe-router-pre-softmax", "--moe-router-pre-softmax"),
        ("--moe-token-dispatcher-type alltoall_seq", "--moe-token-dispatcher-type alltoall"),
        (
            "--recompute-modules core_attn moe_act mla_up_proj shared_experts",
            "--recompute-modules core_attn mlp",
        ),
        ("--moe-layer-recompute", "--recompute-granularity selective --recompute-modules mlp"),
        (
            "--checkpoint-activations --checkpoint-num-layers 2",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        ),
        (
            "--checkpoint-activations --recompute-num-layers 4",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
        ),
        (
            "--recompute-activations --moe-layer-recompute",
            "--recompute-activations --recompute-modules core_attn mlp",
        ),
        (
            "--moe-layer-recompute --recompute-activations --recompute-modules layernorm moe",
            "--recompute-activations --recompute-modules layernorm mlp",
        ),
        ("--recompute-granularity full --moe-layer-recompute", "--recompute-granularity full"),
        (
            "--hybrid-layer-pattern MM*- --is-hybrid-model",
            "--hybrid-layer-pattern MM*- --num-layers 4 --is-hybrid-model",
        ),
        (
            "--hybrid-override-pattern M- --num-layers 2",
            "--hybrid-layer-pattern M- --num-layers 2",
        ),
        (
            "--hybrid-layer-pattern 'MM|*-M|' --pipeline-model-parallel-size 3",
            "--hybrid-layer-pattern MM*-M --pipeline-model-parallel-layout Et*2|t*3|L "
            "--num-layers 5 --pipeline-model-parallel-size 3",
        ),
        (
            "--hybrid-layer-pattern M|M/MM --num-layers 2",
            "--hybrid-layer-pattern M|M/MM --num-layers 2",
        ),
        ("--warmup 0.01", "--lr-warmup-fraction 0.01"),
        ("--data-impl mmap --lr 1", "--lr 1"),
        ("--layernorm-epsilon=1e-6", "--norm-epsilon 1e-6"),
        ("--disable-bias-linear", "--disable-bias-linear"),
        ("--no-save-optim", "--no-save-optim"),
        ("--no_async_save", "--no-async-save"),
        ("--no-bias-gelu-fusion", "--no-bias-gelu-fusion"),
        ("--no-check-for-nan-in-loss-and-grad", "--no-check-for-nan-in-loss-and-grad"),
        ("--no-overlap-p2p-communication --lr 1", "--lr 1"),
        ("--disable-bias-gelu-fusion", "--no-bias-gelu-fusion"),
        ("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
        ("--override-lr-scheduler", "--override-opt-param-scheduler"),
        ("--retro-neighbors 2", "--retro-num-neighbors 2"),
        ("--num_layers 2 --lr_decay_style cosine", "--num-layers 2 --lr-decay-style cosine"),
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        (
            "--use-rotary-position-embeddings --no-position-embedding",
            "--position-embedding-type rope",
        ),
        (
            "--position-embedding-type rope --use-rotary-position-embeddings --rope-type rope",
            "--position-embedding-type rope",
        ),
        (
            "--position-embedding-type rope --multi-latent-attention --rope-type yarn --mscale 1.0",
            "--position-embedding-type rope --multi-latent-attention --yarn-mscale 1.0",
        ),
        ("--moe-input-jitter-eps 0 --lr 1", "--lr 1"),
        ("--optimizer dist_muon", "--optimizer muon --use-distributed-optimizer"),
        (
            "--use-distributed-optimizer --optimizer dist_muon --muon-no-split-qkv",
            "--use-distributed-optimizer --optimizer muon --no-muon-split-qkv",
        ),
        ("--load r/ --ckpt-step 300", "--load r/iter_0000300"),
        ("--pretrained-checkpoint p --save s", "--load p --finetune --save s"),
        ("--load s --pretrained-checkpoint p --save s", "--load p --finetune --save s"),
        ("--finetune --load p --no-load-optim", "--finetune --load p"),
        ("--no-load-optim --pretrained-checkpoint p", "--load p --finetune"),
        ("--no-load-optim --no-load-rng --lr 1", "--lr 1"),
        ("--no-load-optim --load p", "--no-load-optim --load p"),
        ("--logging-level 30", "--log-level warning"),
        ("--rerun-mode report_stats", "--rerun-mode report_determinism_stats"),
        ("--data-path 0.3 a 0.7 b --split 9,1,0", "--data-path 0.3 a 0.7 b --split 9,1,0"),
        ("--num-layers 2 --num-layers 4", "--num-layers 2 --num-layers 4"),
        ("--mock-data --vocab-size 9", "--mock-data --tokenizer-type NullTokenizer --vocab-size 9"),
        ("--mock-data --vocab-size 9 --config f", "--mock-data --vocab-size 9 --config f"),
        ("--sequence-parallel --lr 1", "--lr 1"),
        ("--sequence-parallel --tensor-model-parallel-size 1", "--tensor-model-parallel-size 1"),
        ("--sequence-parallel --config f", "--sequence-parallel --config f"),
        (
            "--sequence-parallel --model-parallel-size 2",
            "--sequence-parallel --tensor-model-parallel-size 2",
        ),
        ("--world-size 4", "--nproc-per-node 4"),
        ("--world-size 4 --nproc-per-node 4", "--nproc-per-node 4"),
        ("--nope --help", "--help"),
        ("--exit-signal SIGUSR1 --exit-signal-handler", "--exit-signal-handler"),
        ("--exit-signal term --lr 1", "--lr 1"),
        ("--exit-signal 2 --lr 1", "--lr 1"),
        ("--exit-signal signal.SIGINT --lr 1", "--lr 1"),
    ],
)
def test_other_spellings_are_translated(given: str, expected: str) -> None:
    assert ours(given) == expected
    assert ours(expected) == expected  # ranks get the command again


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--num-layer 2", "--num-layer is not an option: did you mean --num-layers or"),
        ("--tensor-model-parallel 2", "did you mean --tensor-model-parallel-size"),
        ("--hiden-size 2", "did you mean --hidden-size"),
        ("--max-steps 2", "did you mean --train-steps or --warmup-steps"),
        ("--nothing-like-it 2", "--help lists all options"),
        ("--batch-size 2 --micro-batch-size 2", "--batch-size and --micro-batch-size are names of"),
        ("--seq-length 2 --encoder-seq-length 2", "are names of one option; give one"),
        ("--checkpoint-num-layers 2", "--recompute-granularity"),
        (
            "--exit-signal SIGUSR2",
            "--exit-signal SIGUSR2: a run saves and stops at SIGTERM, SIGINT",
        ),
        ("--exit-signal HUP", "would end it with nothing saved"),
        ("--exit-signal 1", "would end it with nothing saved"),
        ("--moe-use-upcycling", "stages.reshard --upcycle-num-experts"),
        ("--moe-input-jitter-eps 0.1", "an experiment with routers"),
        ("--no-position-embedding", "give --position-embedding-type rope, or none"),
        (
            "--use-rotary-position-embeddings --position-embedding-type none",
            "means --position-embedding-type rope, but --position-embedding-type is none",
        ),
        (
            "--enable-gpt-oss --position-embedding-type rope",
            "means --position-embedding-type yarn, but --position-embedding-type is rope",
        ),
        ("--rope-type yarn", "give --position-embedding-type yarn"),
        (
            "--multi-latent-attention --rope-type rope --rotary-scaling-factor 40",
            "--rope-type rope does not stretch positions, and --rotary-scaling-factor is 40",
        ),
        ("--recompute-modules mla_up_proj", "made of latents are kept; give core_attn, mlp or"),
        ("--mtp-num-layers 1 --mtp-use-repeated-layer", "has a transformer layer of its own"),
        ("--spec my.module my_spec", "--spec my.module my_spec: pass a model of your own"),
        (
            "--model-type gpt --spec x mamba_stack_spec",
            "means --model-type mamba, but --model-type is gpt",
        ),
        ("--ckpt-step 300", "--ckpt-step is a step of --load"),
        ("--ckpt-step x --load r", "--ckpt-step must be a whole number above 0, got 'x'"),
        ("--load r --pretrained-checkpoint p --save s", "two checkpoints to begin with"),
        ("--logging-level 15", "give --log-level, one of debug"),
        ("--world-size 8 --nproc-per-node 4", "torchrun --nnodes"),
        (
            "--hybrid-layer-pattern M|M --pipeline-model-parallel-layout Et|tL",
            r"M\|M and --pipeline-model-parallel-layout both say which layers",
        ),
        ("--world-size none", "--world-size must be a whole number"),
        ("--init-method file:///x", "must be tcp://HOST:PORT"),
        ("--init-method tcp://h:99999999", "must be tcp://HOST:PORT"),
        ("--nnodes 2", "it is an option of torchrun"),
        ("--rank 0", "torchrun or the scheduler gives each process its rank"),
        ("--world-size 1 2", "--world-size takes one value"),
        ("--zero-stage 1", "--use-distributed-optimizer is its ZeRO stage 1"),
        ("--json-key text", "stages.tokenize --json-keys"),
    ],
)
def test_errors_say_what_to_do_instead(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(given)


def test_instruction_data_is_named_as_for_sft_retro() -> None:
    given = "--data-path 0.3 nq 0.7 open_inst --data-folder /d/ --ft_neighbours 2 --k 2 --task none"
    files = [
        f"0.3 /d/nq/nq_QA_{kind}.json 0.7 /d/open_inst/open_inst_QA_{kind}.json" for kind in "TV"
    ]
    train, valid = (one.replace("_T.", "_train.").replace("_V.", "_dev.") for one in files)
    expected = f"--train-data-path {train} --valid-data-path {valid} --sft --ft-neighbours 2"
    assert ours(given) == expected
    assert ours(f"{given} --sft").count("--sft") == 1
    assert "--k, --task: ignored: Megatron-LM's sft_retro.py does not use it" in remarks(given)[0]
    with pytest.raises(ConfigError, match="--data-folder is the folder of --data-path"):
        ours("--data-folder /d")


def test_what_messages_call_a_pretrained_checkpoint_is_said() -> None:
    said = "--pretrained-checkpoint: the same as --load p --finetune"
    assert remarks("--pretrained-checkpoint p --save s") == [said]


def test_ignored_flags_are_grouped_by_reason() -> None:
    line = "--no-rope-fusion --moe-permute-fusion --no_masked_softmax_fusion --lr 1"
    first, second = remarks(line)
    assert first.startswith("--no-rope-fusion, --no_masked_softmax_fusion: ignored: ")
    assert "--moe-grouped-gemm" in second
    assert ours(line) == "--lr 1"


@pytest.mark.parametrize(
    ("given", "environ", "sets"),
    [
        ("--world-size 4 --local_rank 1", LAUNCHED, {}),
        ("--init-method env://", {}, {}),
        ("--init-method tcp://h:29500", {}, {}),
        ("--init-method tcp://h:29500", LAUNCHED, {}),
        (
            "--init-method tcp://h:29500 --world-size 4 --local-rank 1",
            {"RANK": "1", "WORLD_SIZE": "4"},
            {"MASTER_ADDR": "h", "MASTER_PORT": "29500", "LOCAL_RANK": "1"},
        ),
        (
            "--init-method tcp://[::1]:29500",
            {"RANK": "1", "MASTER_PORT": "7"},
            {"MASTER_ADDR": "::1"},
        ),
    ],
)
def test_flags_of_ranks_become_environment_variables(
    given: str, environ: dict[str, str], sets: dict[str, Any]
) -> None:
    understood = understand(given.split(), VOCABULARY, environ)
    assert understood.environment == sets
    assert understood.arguments == []


def test_the_launchers_variables_win_over_flags() -> None:
    with pytest.raises(ConfigError, match="--world-size 8: the launcher started 4 ranks"):
        ours("--world-size 8", LAUNCHED)
    assert remarks("--init-method tcp://h:1", LAUNCHED) == [
        "--init-method: the launcher's MASTER_ADDR=a wins"
    ]
    assert remarks("--local_rank 3", LAUNCHED) == [
        "--local_rank: ignored: the launcher's LOCAL_RANK=1 wins"
    ]
    assert "this command starts all ranks itself" in remarks("--local-rank 3")[0]
