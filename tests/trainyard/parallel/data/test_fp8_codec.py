"""Weights that are gathered in 8 bits: products multiply the values of those gathered whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainyard.fp8.blockwise import cast_blocks, decode
from trainyard.fp8.cast import FORWARD, cast_pair
from trainyard.fp8.recipe import Recipe
from trainyard.parallel.data import param_gather
from trainyard.parallel.data.data_parallel import DataParallel
from trainyard.parallel.data.fp8_codec import Fp8Weights
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.testing.pool import RankPool

WIDTHS = (256, 384, 128)
WEIGHTS = ("0.weight", "1.weight", "2.weight")
EXPERTS = (3, 256, 128)


class Stacked(nn.Module):
    """The matrices of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS))


def updated() -> list[Tensor]:
    """Parameters after an update, in bf16 and of very different sizes."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        sizes = torch.randint(-9, 9, shape, generator=generator).float().exp2()
        return (torch.randn(shape, generator=generator) * sizes).bfloat16()

    shapes = [shape for a, b in pairwise(WIDTHS) for shape in ((b, a), (b,))]
    found = [draw(*shape) for shape in (*shapes, EXPERTS)]
    found[-1] *= torch.tensor([1.0, 2.0**-20, 2.0**20]).bfloat16().view(-1, 1, 1)
    found[2][:, 128:256] = 0  # blocks of zeros
    return found


def gather(scaling: Recipe, overlap: bool, bucket_size: int | None) -> dict[str, Any]:
    """Parameters of which each rank has updated its own part, fetched by 8 bits and then whole."""
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)), Stacked())
    model = model.bfloat16()
    config = DataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=overlap, ddp_bucket_size=bucket_size
    )
    data = DataParallel(
        *(model.named_parameters(), dist.group.WORLD, config),
        grad_dtype=torch.float32,
        fp8=Fp8Weights(WEIGHTS, scaling),
    )
    assert data.gather is not None
    data.gather.install(model)
    for bucket in data.buckets:
        bucket.params.fill_(7.0)
    for parameter, value in zip(model.parameters(), updated(), strict=True):
        whole = parameter.detach()
        whole.copy_(value)
    own = [bucket.own_params.clone() for bucket in data.buckets]
    for bucket, piece in zip(data.buckets, own, strict=True):
        bucket.params.fill_(7.0)  # what other ranks updated is not here yet
        bucket.own_params.copy_(piece)
    sent: list[int] = []
    whole_gather = param_gather.all_gather_single

    def counted(out: Tensor, piece: Tensor, **options: Any) -> Any:
        sent.append(piece.numel() * piece.element_size())
        return whole_gather(out, piece, **options)

    param_gather.all_gather_single = counted
    try:
        data.gather.begin()
        data.gather.finish()
    finally:
        param_gather.all_gather_single = whole_gather
    rounded = [parameter.detach().clone() for parameter in model.parameters()]
    for bucket, piece in zip(data.buckets, own, strict=True):
        bucket.own_params.copy_(piece)
    data.gather.finish_exactly()
    return {
        "rounded": rounded,
        "exact": [parameter.detach().clone() for parameter in model.parameters()],
        "sent": sum(sent),
        "numbers": [
            sum(b.own_params.numel() for b in data.buckets if b.is_sent_in_8_bits is so)
            for so in (True, False)
        ],
    }


def values(weight: Tensor, scaling: Recipe) -> list[Tensor]:
    """What products multiply, or what says as much; a block may have half the scale, and twice the
    numbers."""
    if scaling == "tensorwise":
        return [part.float() for part in cast_pair(weight, FORWARD)]
    pair = cast_blocks(weight, FORWARD)
    return [decode(pair.rows, pair.row_scale), decode(pair.columns, pair.column_scale)]


@pytest.mark.distributed
@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("overlap", "size"), [(False, None), (True, 1000)])
def test_a_product_multiplies_the_values_of_weights_gathered_whole(
    scaling: Recipe, world_size: int, overlap: bool, size: int | None, ranks: RankPool
) -> None:
    for found in ranks.run(gather, world_size, scaling, overlap, size):
        both = zip(found["rounded"], updated(), strict=True)
        for number, (arrived, right) in enumerate(both):
            if right.ndim == 1:
                assert torch.equal(arrived, right)
                continue
            assert not torch.equal(arrived, right), number
            matrices = (weight.view(-1, *weight.shape[-2:]) for weight in (arrived, right))
            for matrix, whole in zip(*matrices, strict=True):
                pairs = zip(values(matrix, scaling), values(whole, scaling), strict=True)
                assert all(torch.equal(mine, theirs) for mine, theirs in pairs), number
        for exact, right in zip(found["exact"], updated(), strict=True):
            assert torch.equal(exact, right)
        in_8_bits, others = found["numbers"]
        assert found["sent"] == in_8_bits + 2 * others
