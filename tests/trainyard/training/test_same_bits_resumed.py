"""A run that died and resumed has the ledger and checkpoints of one that did not, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.stages.pretrain_runs import arguments
from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import (
    RUN,
    certificate,
    check_kills,
    digest,
    go,
    ledger,
    leg,
)
from trainyard.parallel.data.buffers import Bucket
from trainyard.parallel.data.fp8_codec import Fp8Codec
from trainyard.testing.pool import RankPool

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "global_batch_size": 4,
    "train_iters": 8,
    "eval_interval": 4,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "lr_warmup_iters": 2,
    "min_lr": 0.001,
}
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4}
SAMPLES = {"train_iters": None, "train_samples": 28, "lr_warmup_iters": 0, "lr_warmup_samples": 6}
# The first steps overflow; later the scale is doubled, and they overflow again.
FP16 = {"fp16": True, "initial_loss_scale": 2.0**20, "loss_scale_window": 2, "hysteresis": 2}
HYBRID: dict[str, Any] = {
    "model_type": "mamba",
    "num_layers": 3,
    "hybrid_layer_pattern": "M*-",
    "mamba_state_dim": 4,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 8,
}
NARROW = {
    "bf16": True,
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
BLOCKWISE = {
    **{"hidden_size": 128, "seq_length": 64, "num_layers": 1},
    **{"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise"},
}
KINDS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "lion": {"optimizer": "lion"},
    "muon": {"optimizer": "muon", "bf16": True},
    "fp16": FP16,
    "cosine": {"lr_decay_style": "cosine", "lr_decay_iters": 6},
    "wsd exponential": WSD,
    "bf16": {"bf16": True},
    "moments in bf16": NARROW,
    "gradients in fp16": {**FP16, "grad_reduce_in_fp16": True},
    "fp8": {"bf16": True, "fp8_format": "hybrid"},
    "fp8 delayed": {
        **{"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "delayed"},
        **{"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max", "fp8_margin": 1},
    },
    "fp8 blockwise": BLOCKWISE,
    "fp16, constant scale": {"fp16": True, "loss_scale": 128.0},
    "fp16, sgd": {**FP16, "optimizer": "sgd"},
    "linear": {"lr_decay_style": "linear"},
    "constant": {"lr_decay_style": "constant"},
    "inverse square root": {"lr_decay_style": "inverse-square-root"},
    "wsd linear": {**WSD, "lr_wsd_decay_style": "linear"},
    "wsd cosine": {**WSD, "lr_wsd_decay_style": "cosine"},
    "wsd minus sqrt": {**WSD, "lr_wsd_decay_style": "minus_sqrt"},
    "weight decay grows": {
        "start_weight_decay": 0.0,
        "end_weight_decay": 0.1,
        "weight_decay_incr_style": "cosine",
    },
    "decoupled rate": {"decoupled_lr": 0.02, "untie_embeddings_and_output_weights": True},
    "a batch that grows": {**SAMPLES, "rampup_batch_size": [2, 2, 8]},
    "steps passed over": {"iterations_to_skip": [2, 5]},
    "per token, clipped": {"calculate_per_token_loss": True, "clip_grad": 0.1},
    "shuffled": {"dataloader_type": "cyclic"},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
    },
    "recomputed": {"recompute_granularity": "full"},
    "hybrid": HYBRID,
    "hybrid, bf16": {**HYBRID, "bf16": True, "recompute_granularity": "selective"},
    "experts": {
        "num_experts": 4,
        "moe_layer_freq": "[0,1]",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_expert_capacity_factor": 1.0,
        "bf16": True,
    },
}
KINDS["experts, fp8 delayed"] = {
    **KINDS["experts"],
    **{"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 2},
}
KINDS["experts, fp8"] = {"num_experts": 4, **KINDS["fp8"]}
QUICK = ("sgd", "fp16")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("tokens") / "t", [60] * 40)


@pytest.mark.parametrize(
    "kind", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in KINDS]
)
def test_a_killed_and_resumed_run_equals_an_undisturbed_one(
    kind: str, tokens: str, tmp_path: Path
) -> None:
    options = {**SMALL, **KINDS[kind], "save_interval": 3}
    assert go(tokens, tmp_path / "whole", **options) == "finished"
    folder = tmp_path / "run"
    assert go(tokens, folder, dies_after=5, **options) == "died"
    assert sorted(path.name for path in folder.glob("iter_*")) == ["iter_0000003"]
    assert go(tokens, folder, **options) == "finished"
    assert (folder / "ledger.jsonl").read_bytes() == (tmp_path / "whole/ledger.jsonl").read_bytes()
    assert digest(folder) == digest(tmp_path / "whole")
    found = certificate(folder)
    assert found.is_complete, found.sentence


def test_the_loss_scale_changes_in_these_runs(tokens: str, tmp_path: Path) -> None:
    """Or the equality above would say little."""
    assert go(tokens, tmp_path, **{**SMALL, **KINDS["fp16"]}) == "finished"
    lines = ledger(tmp_path)
    scales = [line["loss_scale"] for line in lines]
    skipped = [bool(line.get("skipped")) for line in lines]
    assert len(set(scales[:3])) == len(set(scales[3:])) == 2
    assert {*skipped[:5]} == {*skipped[5:]} == {True, False}


# --- over ranks ---------------------------------------------------------------------------------

ZERO = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2": {},
    "dp 2, zero, overlap, bf16": {**ZERO, **OVERLAP, "bf16": True},
    "dp 2, zero, fp16": {**ZERO, **FP16},
    "dp 2, zero, moments in bf16": {**ZERO, **NARROW},
    "tp 2, dp 2, zero, overlap, muon": {
        **{**ZERO, **OVERLAP, "optimizer": "muon", "bf16": True},
        **{"tensor_model_parallel_size": 2, "world_size": 4},
    },
    "dp 2, zero, overlap, fp8, gathered in 8 bits": {
        **{**ZERO, **OVERLAP, "ddp_bucket_size": 2000, "fp8_param_gather": True},
        **{"bf16": True, "fp8_format": "hybrid"},
    },
    "dp 4, ep 2, zero, experts, fp8, gathered in 8 bits": {
        **{**ZERO, **KINDS["experts, fp8"], "fp8_param_gather": True, "world_size": 4},
        **{"expert_model_parallel_size": 2, "global_batch_size": 8},
    },
    "dp 2, ep 2, experts, fp8 delayed": {
        **{**KINDS["experts, fp8 delayed"], "expert_model_parallel_size": 2},
    },
    "dp 2, zero, lion": {**ZERO, "optimizer": "lion"},
    "dp 2, weights sharded, fp16": {"use_torch_fsdp2": True, **FP16},
    "dp 4, gradients sharded, two instances": {
        **{"data_parallel_sharding_strategy": "optim_grads", "world_size": 4},
        **{"num_distributed_optimizer_instances": 2, "global_batch_size": 8},
    },
    "tp 2, sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp 2": {"pipeline_model_parallel_size": 2},
    "pp 2, two chunks": {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "num_layers": 4,
    },
    "cp 2": {"context_parallel_size": 2, "attention_dropout": 0.0},
    "tp 2, pp 2, dp 2, zero, bf16": {
        **{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        **{**ZERO, "bf16": True, "world_size": 8},
    },
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_and_resumed_run_on_two_ranks_equals_an_undisturbed_one(
    layout: str, tokens: str, ranks: RankPool, tmp_path: Path
) -> None:
    options = {**SMALL, "save_interval": 3, "world_size": 2, **LAYOUTS[layout]}
    assert go(tokens, tmp_path / "whole", ranks, **options) == "finished"
    folder = tmp_path / "run"
    assert go(tokens, folder, ranks, dies_after=5, **options) == "died"
    assert go(tokens, folder, ranks, **options) == "finished"
    assert digest(folder) == digest(tmp_path / "whole")
    assert certificate(folder).is_complete


@pytest.mark.slow
@pytest.mark.distributed
def test_lion_is_the_same_with_its_state_sharded(
    tokens: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Unclipped: a norm over shards has other last digits."""
    options = {**SMALL, "optimizer": "lion", "lr": 1e-3, "clip_grad": 0.0, "world_size": 2}
    assert go(tokens, tmp_path / "whole", ranks, **options) == "finished"
    assert go(tokens, tmp_path / "sharded", ranks, **options, **ZERO) == "finished"
    losses = [
        [line["lm_loss"] for line in ledger(tmp_path / name)] for name in ("whole", "sharded")
    ]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["fp8", "fp8 blockwise", "experts, fp8"])
def test_weights_gathered_in_8_bits_change_no_bit_of_a_training(
    kind: str, tokens: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Unclipped: other buckets sum a norm in another order."""
    options = {**SMALL, **KINDS[kind], **ZERO, "clip_grad": 0.0}
    folders = {gathers: tmp_path / str(gathers) for gathers in (False, True)}
    for gathers, folder in folders.items():
        paths = {"data_path": [tokens], "save": str(folder)}
        document = {**RUN, **options, **paths, "fp8_param_gather": gathers}
        updates = options["train_iters"] if gathers else 0
        assert ranks.run(encoded_buckets, 2, document) == [updates, updates]
    whole, in_8_bits = ([line["lm_loss"] for line in ledger(folder)] for folder in folders.values())
    assert whole == in_8_bits
    assert weights(folders[False]) == weights(folders[True])


def encoded_buckets(options: dict[str, Any]) -> int:
    """How many buckets this rank encodes in a training; one is all that is in 8 bits."""
    encode, count = Fp8Codec.encode, 0

    def counted(codec: Fp8Codec, bucket: Bucket) -> Tensor:
        nonlocal count
        count += 1
        return encode(codec, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fp8Codec, "encode", counted)
        assert leg(options) == "finished"
    return count


def weights(folder: Path) -> list[bytes]:
    """The files of the weights of all checkpoints."""
    found = sorted(folder.glob("iter_*/model-*.safetensors"))
    assert found
    return [path.read_bytes() for path in found]


# --- killed by the system -----------------------------------------------------------------------


@pytest.mark.kill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["fp16", "sgd", "wsd exponential", "a batch that grows"])
def test_a_run_survives_a_kill_anywhere(kind: str, tokens: str, tmp_path: Path) -> None:
    """SIGKILL before the n-th operation of the store: while a step is saved, published, listed."""
    options = {**SMALL, **KINDS[kind], "save_interval": 3, "seq_length": 16}

    def words(name: str) -> list[str]:
        found = arguments(tokens, tmp_path / name)
        for option, value in options.items():
            flag = "--" + option.replace("_", "-")
            if flag in found:
                at = found.index(flag)
                del found[at : at + 2]
            values = value if isinstance(value, list) else [value]
            if value is not None and value is not False:
                found += [flag, *([] if value is True else map(str, values))]
        return found

    check_kills(tmp_path, words, points=6)
