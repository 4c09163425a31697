"""The table of kernels: of a trace made by hand as CUDA's look, and of a real one of a CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernel_table import (
    HELD,
    Row,
    group_of,
    kernel_table,
    markdown,
    product_of,
    read_trace,
)

ADAM = "_update"
NORM = "triton_red_fused_native_layer_norm_0"
ATTENTION = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7"
PRODUCT = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT"


def kernel(name: str, begin: float, ms: float, op: int = 0, cat: str = "kernel") -> dict[str, Any]:
    args = {"External id": op, "stream": 7, "device": 0}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin * 1e3, "dur": ms * 1e3, "args": args}


def operator(name: str, number: int, dims: list[list[int]], kind: str) -> dict[str, Any]:
    args = {"External id": number, "Input Dims": dims, "Input type": [kind] * len(dims)}
    at = {"ts": 0.0, "dur": 9.0, "pid": 1, "tid": 1}
    return {"ph": "X", "cat": "cpu_op", "name": name, "args": args, **at}


def step(number: int) -> dict[str, Any]:
    at = {"ts": 0.0, "dur": 1.0, "pid": 1, "tid": 1}
    return {"ph": "X", "cat": "user_annotation", "name": f"step {number}", **at}


def two_steps() -> dict[str, Any]:
    """10 ms each: a product of 2.5 ms and its sum of 0.5, attention, a norm, the optimizer; a gap
    of 2 ms before it and one of 0.5 between the steps; NCCL on another stream."""
    bf16 = "c10::BFloat16"
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {}}]
    for number, begin in ((11, 100.0), (12, 110.0)):
        events += [
            step(number),
            operator("aten::addmm", number, [[28672], [8192, 4096], [4096, 28672]], bf16),
            kernel(PRODUCT, begin, 2.5, op=number),
            kernel("void cublasLt::splitKreduce_kernel<32, 16>", begin + 2.5, 0.5, op=number),
            kernel(ATTENTION, begin + 3.0, 1.0),
            kernel(NORM, begin + 4.0, 1.0),
            kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", begin + 2.0, 2.0),
            kernel("Memcpy DtoH (Device -> Pinned)", begin + 5.0, 0.5, cat="gpu_memcpy"),
            kernel(ADAM, begin + 7.5, 2.0),
        ]
    return {"traceEvents": events}


def row(rows: tuple[Row, ...], name: str) -> Row:
    (found,) = (one for one in rows if one.name == name)
    return found


def test_kernels_are_counted_by_step() -> None:
    table = kernel_table(two_steps())
    assert table.steps == 2
    assert table.ms == pytest.approx(9.75)  # the last step ends with its last kernel
    groups = {one.name: (one.calls, one.ms) for one in table.groups}
    assert groups == {
        "matrix products": (2.0, 3.0),
        "attention": (1.0, 1.0),
        "norms and elementwise": (1.0, 1.0),
        "NCCL": (1.0, 2.0),
        "copies": (1.0, 0.5),
        "optimizer": (1.0, 2.0),
    }
    assert row(table.groups, "optimizer").share == pytest.approx(2 / 9.75)


def test_times_without_a_kernel_are_gaps() -> None:
    table = kernel_table(two_steps())
    assert table.idle_ms == pytest.approx((2.0 + 0.5 + 2.0) / 2)
    longest = table.longest_gaps[0]
    assert longest.ms == pytest.approx(2.0)
    assert (longest.after, longest.before) == ("Memcpy DtoH (Device -> Pinned)", ADAM)
    covered = sum(one.ms for one in table.groups) - 2.0  # NCCL ran beside the others
    assert covered + table.idle_ms == pytest.approx(table.ms)


def test_a_product_of_known_size_has_its_speed() -> None:
    found = row(kernel_table(two_steps()).kernels, PRODUCT)
    flops = 2 * 8192 * 4096 * 28672
    assert found.shape == "8192 x 4096 x 28672"
    assert found.tflops == pytest.approx(flops / 2.5e-3 / 1e12)
    assert found.of_ceiling == pytest.approx(flops / 2.5e-3 / HELD["bf16"])
    groups = kernel_table(two_steps()).groups
    assert row(groups, "attention").tflops is None
    products = row(groups, "matrix products")  # the sum of its parts takes time, too
    assert products.tflops == pytest.approx(flops / 3e-3 / 1e12)


def test_a_product_in_8_bits_has_another_ceiling() -> None:
    kind = "c10::Float8_e4m3fn"
    events = [
        operator("aten::_scaled_mm", 1, [[8192, 4096], [4096, 28672], [1], [1]], kind),
        kernel(PRODUCT, 1.0, 2.0, op=1),
    ]
    (found,) = kernel_table({"traceEvents": events}).kernels
    assert found.of_ceiling == pytest.approx(2 * 8192 * 4096 * 28672 / 2e-3 / HELD["fp8"])


@pytest.mark.parametrize(
    ("op", "dims", "shape", "flops"),
    [
        ("aten::mm", [[2, 3], [3, 5], [2, 5]], "2 x 3 x 5", 60),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], "7 x 2 x 3 x 5", 420),
        ("aten::_grouped_mm", [[20, 3], [4, 3, 5], [4]], "20 x 3 x 5", 600),
        ("aten::_grouped_mm", [[3, 20], [20, 5], [4]], "3 x 20 x 5", 600),
        ("aten::_grouped_mm", [[4, 2, 3], [4, 3, 5]], "4 x 2 x 3 x 5", 240),
        ("aten::mm", [], "", 0),
        ("aten::add", [[2, 3], [3, 5]], "", 0),
    ],
)
def test_operations_of_products(op: str, dims: list[list[int]], shape: str, flops: float) -> None:
    assert product_of(op, dims) == (shape, flops)


@pytest.mark.parametrize(
    ("name", "op", "group"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "", "matrix products"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", "", "attention"),
        ("a_kernel_of_no_known_name", "aten::mm", "matrix products"),
        ("void at::native::vectorized_elementwise_kernel<4, X>", "", "norms and elementwise"),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor>", "", "optimizer"),
        ("_accumulate", "", "gradient sums"),
        (
            "triton_poi_fused__scaled_dot_product_cudnn_attention_backward_permute_view_2",
            "",
            "norms and elementwise",
        ),
        ("_product", "", "matrix products"),
        ("_cast_both", "", "casts to FP8"),
        ("_state_gradients", "", "Mamba-2 scan"),
        ("_backward", "", "norms and elementwise"),
        ("Memset (Device)", "aten::mm", "copies"),
        ("a_kernel_of_no_known_name", "", "rest"),
    ],
)
def test_groups_of_kernels(name: str, op: str, group: str) -> None:
    assert group_of(name, op) == group


@pytest.mark.slow
def test_a_trace_of_a_cpu_is_read(tmp_path: Path) -> None:
    x, weight, bias = torch.ones(32, 16), torch.ones(64, 16), torch.ones(64)
    with torch.profiler.profile(record_shapes=True) as profiler:
        for number in (4, 5):
            with torch.profiler.record_function(f"step {number}"):
                y = torch.nn.functional.linear(x, weight, bias)
                torch.softmax(y @ weight, dim=-1)
    profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    table = kernel_table(read_trace(tmp_path / "trace.json.gz"))
    assert table.steps == 2
    products = {one.name: (one.shape, one.calls) for one in table.kernels if one.tflops}
    assert products == {"aten::addmm": ("32 x 16 x 64", 1.0), "aten::mm": ("32 x 64 x 16", 1.0)}
    assert row(table.kernels, "aten::_softmax").group == "norms and elementwise"
    assert table.idle_ms > 0
    assert json.loads(json.dumps(table.document()))["steps"] == 2


def test_the_text_names_groups_kernels_and_gaps() -> None:
    text = markdown(kernel_table(two_steps()), max_kernels=2)
    assert "A step takes 9.75 ms (mean of 2). No kernel ran for 2.25 ms of it (23.1 %)" in text
    assert "| matrix products | 2.0 | 3.000 | 30.8 % | 641 | 94 % |" in text
    assert "8192 x 4096 x 28672" in text
    assert "And 5 more, 5.00 ms." in text
    assert "| 2.000 | `Memcpy DtoH (Device -> Pinned)` | `_update` |" in text


def test_a_trace_without_kernels_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [step(1)]}).encode()))
    with pytest.raises(ValueError, match="no kernels"):
        kernel_table(read_trace(path))
