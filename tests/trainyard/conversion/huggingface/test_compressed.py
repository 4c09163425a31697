"""Weights in 8 bits: error bounds, golden numbers, names that vLLM reads, and our own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from trainyard.artifacts import store
from trainyard.checkpoint.safetensors.file import TensorFile
from trainyard.conversion.huggingface.compressed import (
    Layout,
    Method,
    Quantization,
    Strategy,
    pack,
    read_quantization,
    unpack,
)
from trainyard.conversion.huggingface.folder import write_hf_folder
from trainyard.conversion.loaders import open_source
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.config import GPTConfig

MODEL = GPTConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    seq_length=32,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
"""A Llama."""

Kind = tuple[Method, Strategy, Layout]
VLLM: Layout = "compressed-tensors"
TENSORRT: Kind = ("int8", "channel", "modelopt")
KINDS: list[Kind] = [
    ("fp8", "channel", VLLM),
    ("fp8", "tensor", VLLM),
    ("int8", "channel", VLLM),
    TENSORRT,
]

PARAMETERS: dict[tuple[Method, Layout], dict[str, tuple[str, Any]]] = {
    # What vLLM's schemes W8A8Fp8 and WNA16 of `compressed_tensors` register for a linear layer.
    ("fp8", VLLM): {"weight": ("F8_E4M3", lambda o, i: (o, i)), "weight_scale": ("F32", None)},
    ("int8", VLLM): {
        "weight_packed": ("I32", lambda o, i: (o, i // 4)),
        "weight_scale": ("F32", None),
        "weight_shape": ("I64", lambda o, i: (2,)),
    },
    # What `WeightOnlyQuantLinearMethod` of TensorRT-LLM's `_torch/modules/linear.py` loads.
    ("int8", "modelopt"): {
        "weight": ("I8", lambda o, i: (o, i)),
        "weight_scale": ("F32", lambda o, i: (o,)),
    },
}


def dequantized(weight: torch.Tensor, kind: Quantization) -> torch.Tensor:
    parts = kind.quantized(weight)
    numbers = parts[".weight"] if ".weight" in parts else unpack(parts[".weight_packed"])
    return numbers.float() * parts[".weight_scale"].float().reshape(-1, 1)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_errors_are_within_half_a_step_of_the_format(
    rows: list[float], kind: Kind, dtype: torch.dtype, seed: int
) -> None:
    rows = (rows * 8)[:8]  # as many as every layout takes
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(len(rows), 16, generator=generator) * 2 - 1
    weight = (numbers * torch.tensor(rows).unsqueeze(1)).to(dtype)
    error = (dequantized(weight, Quantization(*kind)) - weight.float()).abs()
    largest = weight.float().abs()
    largest = largest.amax(1, keepdim=True) if kind[1] == "channel" else largest.amax()
    # The scale itself is rounded to the number format of the weight, so the largest may be cut.
    cut = largest * (torch.finfo(dtype).eps + 1e-6)
    if kind[0] == "int8":
        assert (error <= largest / 127 / 2 * 1.01 + cut).all()
    else:
        # Three bits of mantissa: 1/16 of the number; below the least normal one, half its step.
        step = largest / 448 * 2**-9
        assert (error <= weight.float().abs() / 16 * 1.01 + step / 2 * 1.01 + cut).all()


def test_numbers_and_scales_are_those_computed_by_hand() -> None:
    weight = torch.tensor([[127.0, -63.5, 0.4, 0.0], [0.0, 0.0, 0.0, 0.0]])
    parts = Quantization("int8").quantized(weight)
    assert parts[".weight_scale"][0].item() == 1.0
    assert unpack(parts[".weight_packed"]).tolist() == [[127, -64, 0, 0], [0, 0, 0, 0]]
    # Bytes 127 + 128, -64 + 128, 128, 128, the first the lowest: 0x808040FF, as a negative number.
    assert parts[".weight_packed"][0].tolist() == [0x808040FF - 2**32]
    assert parts[".weight_shape"].tolist() == [2, 4]
    fp8 = Quantization("fp8").quantized(torch.tensor([[448.0, -20.0, 17.0, 0.0]]))
    # e4m3 has 16, 18, 20 around 17, which lies halfway: to even, 16.
    assert fp8[".weight"].float().tolist() == [[448.0, -20.0, 16.0, 0.0]]
    assert fp8[".weight_scale"].tolist() == [[1.0]]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.lists(st.integers(-128, 127), min_size=8, max_size=8), min_size=1, max_size=4))
def test_packing_is_undone_by_unpacking(rows: list[list[int]]) -> None:
    numbers = torch.tensor(rows, dtype=torch.int8)
    assert torch.equal(unpack(pack(numbers)), numbers)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    run, folder = (tmp_path_factory.mktemp(name) for name in ("run", "llama"))
    save_gpt(str(run), random_gpt(MODEL))
    with open_source(str(run), "trainyard") as found:
        write_hf_folder(found, 1, lambda name: store.open_output(str(folder / name), name))
    return str(folder)


def quantize(source: str, folder: Path, kind: Quantization) -> None:
    with open_source(source, "hf") as found:
        write_hf_folder(
            found, 2, lambda name: store.open_output(str(folder / name), name), quantization=kind
        )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_has_the_parameters_that_loaders_register(
    plain: str, tmp_path: Path, kind: Kind
) -> None:
    method, strategy, layout = kind
    quantize(plain, tmp_path, Quantization(*kind))
    found = {
        name: extent.spec
        for file in sorted(tmp_path.glob("*.safetensors"))
        for name, extent in TensorFile(str(file)).extents.items()
    }
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    with open_source(plain, "hf") as source:
        width, inner, heads = 32, source.config.ffn_size, {"k": 16, "v": 16}
    shapes = {
        **{f"self_attn.{n}_proj": (heads.get(n, width), width) for n in "qkvo"},
        **{f"mlp.{n}_proj": (inner, width) for n in ("gate", "up")},
        "mlp.down_proj": (width, inner),
    }
    for layer in range(2):
        for module, (out, size) in shapes.items():
            stem = f"model.layers.{layer}.{module}."
            names = {name.removeprefix(stem) for name in found if name.startswith(stem)}
            assert names == PARAMETERS[method, layout].keys()
            for name, (dtype, shape) in PARAMETERS[method, layout].items():
                of_scale = (out, 1) if strategy == "channel" else (1,)
                wanted = of_scale if shape is None else shape(out, size)
                assert (found[stem + name].dtype, found[stem + name].shape) == (dtype, wanted)
    assert found["lm_head.weight"].dtype == found["model.embed_tokens.weight"].dtype == "F32"
    document = json.loads((tmp_path / "config.json").read_text())
    assert document["dtype"] == "float32"
    assert read_quantization(document, "") == Quantization(*kind)
    assert (tmp_path / "hf_quant_config.json").exists() == (layout == "modelopt")
    if layout == "modelopt":
        return
    config = document["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert (config["quant_method"], config["ignore"]) == ("compressed-tensors", ["lm_head"])
    assert config["format"] == {"fp8": "float-quantized", "int8": "pack-quantized"}[method]
    assert (weights["num_bits"], weights["strategy"], weights["dynamic"]) == (8, strategy, False)


def algorithm_of_tensorrt_llm(folder: Path) -> tuple[str, list[str]]:
    """Algorithm and matrices left out, as TensorRT-LLM's `_torch/model_config.py` finds them:
    hf_quant_config.json comes first, in ModelOpt's older form or the newer one of config.json."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    if (folder / "hf_quant_config.json").exists():
        older = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
        found = (older["quant_algo"], older["exclude_modules"])
        # Where the two differ, it warns.
        assert config["quant_method"] == "modelopt"
        assert found == (config["quant_algo"], config["ignore"])
        assert older["kv_cache_quant_algo"] is None
        return found
    assert config["quant_method"] == "compressed-tensors"
    (group,) = config["config_groups"].values()
    weights, inputs = group["weights"], group["input_activations"]
    if inputs is None or weights["num_bits"] != 8 or weights["strategy"] != "channel":
        return "not read", []
    assert inputs["strategy"] == "token"
    return "FP8_PER_CHANNEL_PER_TOKEN", config["ignore"]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        (TENSORRT, "W8A16"),
        (("fp8", "channel", VLLM), "FP8_PER_CHANNEL_PER_TOKEN"),
        (("fp8", "tensor", VLLM), "not read"),
        (("int8", "channel", VLLM), "not read"),
    ],
)
def test_tensorrt_llm_reads_channels_of_fp8_and_modelopts_int8(
    plain: str, tmp_path: Path, kind: Kind, algorithm: str
) -> None:
    """Its linear layer of FP8 loads `weight` and `weight_scale`, flattened, under the names that
    vLLM registers; that of int8 the tensors of the test above."""
    quantize(plain, tmp_path, Quantization(*kind))
    ignored = [] if algorithm == "not read" else ["lm_head"]
    assert algorithm_of_tensorrt_llm(tmp_path) == (algorithm, ignored)


def test_tensorrt_llm_computes_with_these_numbers_and_scales(plain: str, tmp_path: Path) -> None:
    """Its load of fused queries, keys and values: `weight` and `weight_scale` of each one after
    the other, (in, out) int8 and (out), then input @ weight * scale. (Before, it orders the numbers
    as its kernel reads them, by `preprocess_weights_for_mixed_gemm`.)"""
    quantize(plain, tmp_path, Quantization(*TENSORRT))
    with open_source(plain, "hf") as source:
        ours = source.read("model.decoder.layers.0.self_attention.linear_qkv.weight")
    files = [TensorFile(str(file)) for file in sorted(tmp_path.glob("*.safetensors"))]
    stored = {name: file.read(name) for file in files for name in file.extents}
    stems = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    fused = torch.cat([stored[f"{stem}.weight"] for stem in stems]).T.contiguous()
    scale = torch.cat([stored[f"{stem}.weight_scale"] for stem in stems])
    assert (fused.dtype, fused.shape, scale.shape) == (torch.int8, (32, 64), (64,))
    assert fused.shape[0] % 16 == 0
    assert fused.shape[1] % 8 == 0
    given = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    product = (given @ fused.float()) * scale
    # Our matrix has the heads of each group together: two groups of two queries, a key, a value.
    grouped = ours.view(2, 4, 8, 32)
    wanted = torch.cat(
        [grouped[:, :2].flatten(0, 2), *(grouped[:, i].flatten(0, 1) for i in (2, 3))]
    )
    torch.testing.assert_close(product, given @ wanted.T, atol=0.02, rtol=0.02)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_our_reader_gives_number_times_scale(plain: str, tmp_path: Path, kind: Kind) -> None:
    quantization = Quantization(*kind)
    quantize(plain, tmp_path, quantization)
    with open_source(plain, "hf") as before, open_source(str(tmp_path), "hf") as after:
        assert before.specs == after.specs
        assert before.config == after.config
        name = "model.decoder.layers.1.mlp.linear_fc2.weight"
        expected = dequantized(before.read(name), quantization)
        assert torch.equal(after.read(name), expected)
        for name in before.specs:
            near = torch.allclose(before.read(name), after.read(name), atol=0.01, rtol=0.07)
            assert near, name
            if "linear" not in name:
                assert torch.equal(before.read(name), after.read(name))


def test_what_no_loader_reads_is_refused(tmp_path: Path, plain: str) -> None:
    with pytest.raises(ConfigError, match="give --strategy channel"):
        Quantization("int8", "tensor")
    with pytest.raises(ConfigError, match="--layout modelopt is of int8 weights"):
        Quantization("fp8", "channel", "modelopt")
    with pytest.raises(ConfigError, match="a matrix of 6 inputs is not stored in int8"):
        pack(torch.zeros(2, 6, dtype=torch.int8))
    for shape in ((8, 24), (12, 16)):
        with pytest.raises(ConfigError, match=f"a matrix of {shape[0]} outputs and {shape[1]} in"):
            Quantization(*TENSORRT).quantized(torch.zeros(shape))
    other = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    with pytest.raises(ConfigError, match="ModelOpt's 'NVFP4' is not read, only W8A16"):
        read_quantization(other, "config.json")
    with pytest.raises(ConfigError, match="a GPT2LMHeadModel is not quantized"):
        Quantization("fp8").targets([], "GPT2LMHeadModel")
    quantize(plain, tmp_path, Quantization("fp8"))
    document = json.loads((tmp_path / "config.json").read_text())
    group = document["quantization_config"]["config_groups"]["group_0"]["weights"]
    group["num_bits"] = 4
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="quantization_config is not one that is read here"):
        open_source(str(tmp_path), "hf")
    group |= {"num_bits": 8, "strategy": "group"}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="scales are by 'group'"):
        open_source(str(tmp_path), "hf")
    del document["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="weight_scale"):
        open_source(str(tmp_path), "hf")
