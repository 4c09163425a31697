"""Which products are in 8 bits, what is refused, and that a model learns with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainyard.models.small_gpt import LLAMA
from trainyard.errors import ConfigError
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.models.fp8 import check_device, fp8_weights, use_fp8
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.models.latent_config import LatentConfig
from trainyard.models.moe_config import MoEConfig
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.models.retro.config import RetroConfig
from trainyard.models.retro.model import RetroModel
from trainyard.models.t5.config import T5Config
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.parallel.model import ALONE
from trainyard.training.options.fp8_checks import check_fp8

RECIPE = Fp8Recipe("hybrid")
ROWWISE, BLOCKWISE = Fp8Recipe("e4m3", "rowwise"), Fp8Recipe("e4m3", "blockwise")
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def config(**options: Any) -> GPTConfig:
    return GPTConfig(**(SIZES | LLAMA | options))


def in_8_bits(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if getattr(module, "fp8", None)}


def test_the_four_matrices_of_each_layer_are_cast_and_nothing_else() -> None:
    model = GPTModel(config(untie_embeddings_and_output_weights=True), 64)
    use_fp8(model, RECIPE, first=1, last=2)
    names = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
    expected = {f"decoder.layers.1.{name}" for name in (*names, "mlp.linear_fc2")}
    assert in_8_bits(model) == expected
    assert fp8_weights(model) == {f"{name}.weight" for name in expected}


def test_cross_attention_and_encoder_of_a_retro_are_cast() -> None:
    sizes = {"retro_chunk_length": 4, "retro_cross_attention_layers": (2, 4)}
    model = RetroModel(RetroConfig(**(SIZES | LLAMA | sizes)), 64)
    use_fp8(model, RECIPE, last=1)
    matrices = {name for name, p in model.named_parameters() if p.dim() == 2}
    last = {name for name in matrices if name.startswith("decoder.layers.3.")}
    expected = {name for name in matrices - last if "embedding" not in name}
    assert fp8_weights(model) == expected
    assert "decoder.layers.1.cross_attention.encoder.layers.0.cross_attention.attn" in {
        name.rpartition(".linear_")[0] for name in expected
    }


def test_experts_are_cast_and_their_router_is_not() -> None:
    moe = MoEConfig(
        num_experts=4,
        moe_layer_freq="[0,0,1,1]",
        moe_shared_expert_intermediate_size=32,
        moe_shared_expert_gate=True,
    )
    model = GPTModel(config(moe=moe), 64)
    use_fp8(model, RECIPE, first=2, last=1)
    names = [f"mlp.{part}.linear_fc{n}" for part in ("experts", "shared_experts") for n in (1, 2)]
    names += ["self_attention.linear_qkv", "self_attention.linear_proj"]
    assert in_8_bits(model) == {f"decoder.layers.2.{name}" for name in names}


def test_first_and_last_layers_are_those_of_the_whole_model() -> None:
    for layers, has_some in ((range(0, 2), False), (range(2, 4), True)):
        stage = PipelineStage(layers, has_embedding=False, has_output=False)
        model = GPTModel(config(), 64, ALONE, stage)
        use_fp8(model, RECIPE, first=2)
        assert bool(in_8_bits(model)) == has_some


def losses(recipe: Fp8Recipe | None, width: int, steps: int = 30) -> list[float]:
    """width: hidden size, and tokens of a step."""
    torch.manual_seed(1)
    sizes = {"num_layers": 2, "hidden_size": width, "ffn_hidden_size": 2 * width}
    model = GPTModel(config(**sizes), 64).bfloat16()
    init_parameters(model, 1)
    if recipe is not None:
        use_fp8(model, recipe)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=3e-3)
    tokens = torch.arange(width).view(-1, 16) * 5 % 64
    found = []
    for _ in range(steps):
        loss = model.loss(tokens, tokens.roll(-1, 1)).mean()
        model.zero_grad()
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "width"), [(RECIPE, 64), (ROWWISE, 64), (BLOCKWISE, 128)])
def test_a_model_learns_in_8_bits_as_in_16(recipe: Fp8Recipe, width: int) -> None:
    in_16, in_8 = losses(None, width), losses(recipe, width)
    assert in_8[0] == pytest.approx(in_16[0], rel=0.01)
    assert in_8[-1] < in_8[0] / 2
    assert in_8[-1] == pytest.approx(in_16[-1], rel=0.15)


@pytest.mark.parametrize(
    ("model", "precision", "parallel", "micro_batch_size", "words"),
    [
        (
            {"hidden_size": 40, "kv_channels": 16},
            {},
            {},
            1,
            "--hidden-size is 40",
        ),
        ({"seq_length": 20}, {}, {}, 2, "--micro-batch-size x --seq-length is 40"),
        ({"ffn_hidden_size": 24, "swiglu": True}, {}, {}, 1, "the width inside the MLP is 24"),
        ({"kv_channels": 4}, {}, {}, 1, "width of queries, keys and values is 24"),
        (
            {},
            {},
            {"tensor_model_parallel_size": 4, "tp_comm_overlap": False},
            1,
            r"width of queries, keys and values of a tensor-parallel rank \(of 4\) is 24",
        ),
        (
            {},
            {},
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "tp_comm_overlap": True,
            },
            1,
            "--tp-comm-overlap and --fp8-format",
        ),
        (
            {},
            {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3},
            {},
            1,
            r"keeps 1 \+ 3 layers in bfloat16, which leaves none of 4 layers",
        ),
        (
            {"hidden_size": 128, "ffn_hidden_size": 128},
            {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
            {},
            1,
            "--micro-batch-size x --seq-length is 16, and --fp8-recipe blockwise needs a multiple "
            "of 128",
        ),
        (
            {},
            {"fp8_format": None},
            {
                "data_parallel": DataParallelConfig(
                    use_distributed_optimizer=True, fp8_param_gather=True
                )
            },
            1,
            "--fp8-param-gather needs --fp8-format; add it",
        ),
        (
            {"moe": MoEConfig(num_experts=4, moe_ffn_hidden_size=40)},
            {},
            {},
            1,
            "the width inside an expert is 40, and --fp8-format needs a multiple of 16",
        ),
        (
            {"moe": MoEConfig(num_experts=4, moe_ffn_hidden_size=48)},
            {},
            {"expert_tensor_parallel_size": 2},
            1,
            r"inside an expert of a rank \(--expert-tensor-parallel-size 2\) is 24",
        ),
        (
            {"moe": MoEConfig(num_experts=4, moe_shared_expert_intermediate_size=24)},
            {},
            {},
            1,
            "--moe-shared-expert-intermediate-size is 24",
        ),
        (
            {
                "position_embedding_type": "rope",
                "mla": LatentConfig(multi_latent_attention=True, kv_lora_rank=40),
            },
            {},
            {},
            1,
            "--kv-lora-rank is 40, and --fp8-format needs a multiple of 16",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    model: dict[str, Any],
    precision: dict[str, Any],
    parallel: dict[str, Any],
    micro_batch_size: int,
    words: str,
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_fp8(
            GPTConfig(**(SIZES | {"ffn_hidden_size": 64} | model)),
            PrecisionConfig(bf16=True, **{"fp8_format": "hybrid", **precision}),
            ParallelConfig(**parallel),
            micro_batch_size,
        )


@pytest.mark.parametrize(
    ("capability", "cuda", "recipe", "words"),
    [
        ((8, 0), "13.0", RECIPE, "--fp8-format hybrid needs a GPU of compute capability 8.9"),
        ((8, 9), "13.0", BLOCKWISE, r"blockwise needs a Hopper GPU .* found 8.9 and CUDA 13.0"),
        ((10, 0), "13.0", BLOCKWISE, "found 10.0 and CUDA 13.0; give tensorwise"),
        ((9, 0), "12.8", BLOCKWISE, "CUDA 12.9 or newer; found 9.0 and CUDA 12.8"),
    ],
)
def test_a_gpu_without_these_products_is_refused(
    capability: tuple[int, int], cuda: str, recipe: Fp8Recipe, words: str
) -> None:
    check_device(recipe, (9, 0), "13.0")
    with pytest.raises(ConfigError, match=words):
        check_device(recipe, capability, cuda)


def test_weights_that_nothing_shards_are_not_gathered_in_8_bits() -> None:
    words = "--fp8-param-gather needs --use-distributed-optimizer; add it"
    with pytest.raises(ConfigError, match=words):
        DataParallelConfig(fp8_param_gather=True)


def test_a_width_that_no_layer_has_is_free() -> None:
    moe = MoEConfig(num_experts=4, moe_ffn_hidden_size=64)
    fp8 = PrecisionConfig(bf16=True, fp8_format="hybrid")
    check_fp8(GPTConfig(**SIZES | {"ffn_hidden_size": 24}, moe=moe), fp8, ParallelConfig(), 1)
    moe = replace(moe, moe_layer_freq="2")
    with pytest.raises(ConfigError, match="the width inside the MLP is 24"):
        check_fp8(GPTConfig(**SIZES | {"ffn_hidden_size": 24}, moe=moe), fp8, ParallelConfig(), 1)


def test_encoder_and_decoder_of_a_t5_are_checked_each_for_itself() -> None:
    model = T5Config(**SIZES | {"seq_length": 32}, decoder_seq_length=8, decoder_num_layers=2)
    fp8 = PrecisionConfig(bf16=True, fp8_format="hybrid", first_last_layers_bf16=True)
    with pytest.raises(ConfigError, match="--micro-batch-size x --decoder-seq-length is 8"):
        check_fp8(model, fp8, ParallelConfig(), 1)
    check_fp8(model, fp8, ParallelConfig(), 2)


def test_the_recipe_and_the_16_bit_format_are_checked() -> None:
    PrecisionConfig(bf16=True, fp8_recipe="delayed")  # without effect
    with pytest.raises(ConfigError, match="--fp8-format hybrid needs --bf16"):
        PrecisionConfig(fp8_format="hybrid")
    with pytest.raises(ConfigError, match="--fp8-recipe mxfp8 is not implemented; give blockwise"):
        PrecisionConfig(bf16=True, fp8_format="e4m3", fp8_recipe="mxfp8")
    with pytest.raises(ConfigError, match="no blockwise products of e5m2; give --fp8-format e4m3"):
        PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe="blockwise")
    with pytest.raises(ConfigError, match="--fp8-amax-history-len must be at least 1"):
        PrecisionConfig(fp8_amax_history_len=0)
