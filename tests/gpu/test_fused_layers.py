"""The chain of kernels of a step of one token against torch, and the step against the eager one.

python -m pytest -m gpu tests/gpu/test_fused_layers.py"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from tests.trainyard.inference.small_models import LLAMA, SIZES
from trainyard.attention.one_query import one_query_attention
from trainyard.fp8.weights import E4M3, quantize
from trainyard.inference.decoders import CachedDecoder
from trainyard.inference.fused_layers import can_fuse
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.models.quantized import quantize_layers
from trainyard.models.rope import apply_rotary
from trainyard.testing.tolerances import relative_error

if TYPE_CHECKING:
    from trainyard.kernels.decode_product import Cast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, CAST = 1e-2, 6e-2
STEP, CAST_STEP = 3e-2, 0.12
"""Of logits after 4 layers. The two steps cast in other parts of a row, which rounds otherwise."""
VOCAB = 256


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 64])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("shape", [(256, 512), (256, 4224)])
def test_products_with_norm_swiglu_and_residual(
    rows: int, kind: str, shape: tuple[int, int]
) -> None:
    from trainyard.kernels.decode_product import Meeting, Rows, decode_product
    from trainyard.kernels.row_norm import cast_rows, row_norm

    generator = torch.Generator("cuda").manual_seed(rows)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda").bfloat16()

    weight, gain, next_gain = draw(*shape), draw(shape[1]), draw(shape[0])
    x, stream = draw(rows, shape[1]), draw(rows, shape[0])
    options: dict[str, Any] = {"dependent": True, "meeting": Meeting(rows, 512, x.device)}
    normed = functional.rms_norm(x.float(), (shape[1],), gain.float(), 1e-5)
    if kind == "fp8":
        values, options["scale"], _ = quantize(weight, "fp8")
        exact = values.float() * options["scale"].unsqueeze(1)
        cast = empty_cast(rows, shape[1], gain)
        cast_rows(x, cast, dependent=True)
        assert relative_error(widened(cast, 1e-5), normed) < CAST
        given = [cast.rows(1e-5)]
        plain = empty_cast(rows, shape[1], torch.ones_like(gain))
        cast_rows(x, plain, dependent=True)
        onto, near = plain.rows()._replace(squares=None), widened(plain)
    else:
        values, exact = weight, weight.float()
        apart = torch.full_like(x, torch.nan)
        row_norm(x, gain, apart, eps=1e-5, dependent=True)
        given = [Rows(apart), Rows(x, gain=gain, eps=1e-5)]
        onto, near = Rows(x), x.float()
    error = BF16 if kind == "bf16" else CAST
    gate, up = functional.linear(normed, exact).chunk(2, dim=-1)
    for one in given:
        inner = torch.full((rows, shape[0] // 2), torch.nan, device="cuda").bfloat16()
        decode_product(one, values, inner, gated=True, **options)
        assert relative_error(inner.float(), functional.silu(gate) * up) < error
        if kind == "fp8":
            to = empty_cast(rows, shape[0] // 2)
            decode_product(one, values, None, gated=True, cast=to, **options)
            assert relative_error(widened(to), inner.float()) < CAST
    expected = stream.float() + functional.linear(near, exact)
    normed = functional.rms_norm(expected, (shape[0],), next_gain.float(), 1e-5)
    for _ in range(3):  # the counters are left as they were
        out = stream.clone()
        decode_product(onto, values, out, residual=out, **options)
        assert relative_error(out.float(), expected) < BF16
        if kind == "fp8":
            to, out = empty_cast(rows, shape[0], next_gain), stream.clone()
            decode_product(onto, values, out, residual=out, cast=to, **options)
            assert relative_error(out.float(), expected) < BF16
            assert relative_error(widened(to, 1e-5), normed) < CAST


def empty_cast(rows: int, width: int, gain: torch.Tensor | None = None) -> Cast:
    """Full of what nobody may read."""
    from trainyard.kernels.decode_product import CAST_CHANNELS, Cast

    values = torch.full((rows, width), torch.nan, device="cuda").to(E4M3)
    scale = torch.full((width // CAST_CHANNELS, rows), torch.nan, device="cuda")
    return Cast(values, scale, gain, None if gain is None else scale.clone())


def widened(cast: Cast, eps: float = 0.0) -> torch.Tensor:
    """(r, c) fp32; eps: of the norm, if it is to be applied."""
    from trainyard.kernels.decode_product import CAST_CHANNELS

    found = cast.values.float() * cast.scale.t().repeat_interleave(CAST_CHANNELS, dim=1)
    if not eps:
        return found
    assert cast.squares is not None
    return found * torch.rsqrt(cast.squares.sum(0) / found.shape[1] + eps).unsqueeze(1)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("rows", "room"), [(1, 1152), (8, 1152), (64, 200), (3, 37)])
def test_attention_rotates_writes_and_attends(rows: int, room: int, kept: torch.dtype) -> None:
    from trainyard.kernels.decode_attention import DecodeAttention

    generator = torch.Generator("cuda").manual_seed(rows)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda").bfloat16()

    heads, groups, width = 32, 8, 128
    keys, values = (draw(rows, groups, room, width).to(kept) for _ in range(2))
    angles = draw(rows, width // 2).float().repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    qkv = draw(rows, (heads + 2 * groups) * width)
    lengths = torch.randint(0, room, (rows,), generator=generator, device="cuda")
    lengths[0] = room - 1
    q, k, v = qkv.view(1, rows, groups, 6, width).split([4, 1, 1], dim=3)
    q, k = q.reshape(1, rows, heads, width), k.squeeze(3)
    turn = (cos[None, :, None], sin[None, :, None])
    q, k = apply_rotary(q, *turn)[0].unsqueeze(2), apply_rotary(k, *turn)[0]
    expected_keys, expected_values = keys.clone(), values.clone()
    places = torch.arange(rows, device="cuda")
    expected_keys[places, :, lengths] = k.to(kept)
    expected_values[places, :, lengths] = v[0, :, :, 0].to(kept)
    allowed = (torch.arange(room, device="cuda") <= lengths[:, None])[:, None, None]
    exact = one_query_attention(
        q.float(), expected_keys.float(), expected_values.float(), allowed, 0.09
    )
    attend = DecodeAttention(rows, heads, keys)
    out = torch.full((rows, heads * width), torch.nan, device="cuda").bfloat16()
    cast, scale = out.to(E4M3), torch.full((groups, rows), torch.nan, device="cuda")
    for _ in range(3):  # the counters are left as they were
        attend(qkv, (cos, sin), keys, values, lengths, out, scale=0.09, dependent=True)
        assert relative_error(out.float().view(exact.shape), exact) < BF16
        attend(qkv, (cos, sin), keys, values, lengths, cast, scale=0.09, out_scale=scale)
        near = cast.float().view(rows, groups, -1) * scale.t().unsqueeze(2)
        assert relative_error(near.view(exact.shape), exact) < CAST
    near = (expected_keys.float() - keys.float()).abs()
    assert bool((near <= 0.13 * expected_keys.float().abs() + 0.01).all()), "a last bit at most"
    assert torch.equal(expected_values.float(), values.float())


@pytest.mark.parametrize("kept", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_fused_step_has_the_logits_of_the_eager_one(
    rows: int, kind: str, kept: torch.dtype
) -> None:
    options: dict[str, Any] = SIZES | LLAMA | {"hidden_size": 128, "kv_channels": 32}
    options |= {"ffn_hidden_size": 256, "init_method_std": 0.05}
    model: Any = GPTModel(GPTConfig(**options), VOCAB)
    init_parameters(model, 3)
    model = model.eval().requires_grad_(False).to("cuda", torch.bfloat16)
    if kind == "fp8":
        quantize_layers(model, "fp8")
    assert can_fuse(model, rows)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, VOCAB, (3 + i,), generator=generator).tolist() for i in range(rows)]
    fused, eager = (
        CachedDecoder(model, rows, 60, compiled=c, kv_dtype=kept) for c in (True, False)
    )
    with torch.inference_mode():
        logits = eager.start(prompts).logits
        fused.start(prompts)
        for _ in range(12):
            tokens = logits.argmax(dim=1)
            logits, found = eager.step(tokens), fused.step(tokens)
            is_exact = kind == "bf16" and kept == torch.bfloat16
            error = relative_error(found.float(), logits.float())
            assert error < (STEP if is_exact else CAST_STEP)
