"""Which layers each pipeline rank holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.errors import ConfigError
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.pipeline.partition import (
    Partition,
    StageLayers,
    arrange,
    partition,
    stages_in_order,
)

NAMES = {
    "pp": "pipeline_model_parallel_size",
    "per_stage": "num_layers_per_virtual_pipeline_stage",
    "virtual": "num_virtual_stages_per_pipeline_rank",
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "embedding": "account_for_embedding_in_pipeline_split",
    "loss": "account_for_loss_in_pipeline_split",
    "layout": "pipeline_model_parallel_layout",
}


def split(num_layers: int, **options: Any) -> Partition:
    return partition(ParallelConfig(**{NAMES[k]: v for k, v in options.items()}), num_layers)


def layers(parts: Partition) -> list[list[list[int]]]:
    """Layer numbers by rank and chunk."""
    return [[list(stage.layers) for stage in rank] for rank in parts]


def test_without_a_pipeline_one_stage_is_the_model() -> None:
    assert split(5) == ((StageLayers(range(5), True, True),),)


def test_layers_are_shared_evenly() -> None:
    assert layers(split(8, pp=4)) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]


@pytest.mark.parametrize("options", [{"per_stage": 1}, {"virtual": 4}])
def test_chunks_are_dealt_out_in_turn(options: dict[str, int]) -> None:
    # the example of Megatron-LM's documentation: 8 layers, 2 ranks, 4 chunks
    found = layers(split(8, pp=2, **options))
    assert found == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]


@pytest.mark.parametrize(("num_layers", "pp", "chunks"), [(24, 4, 3), (96, 8, 6), (16, 2, 2)])
def test_a_chunk_begins_where_the_formula_says(num_layers: int, pp: int, chunks: int) -> None:
    for p, rank in enumerate(split(num_layers, pp=pp, virtual=chunks)):
        for v, stage in enumerate(rank):
            begin = v * num_layers // chunks + p * num_layers // (pp * chunks)
            assert stage.layers == range(begin, begin + num_layers // (pp * chunks))


@pytest.mark.parametrize(
    ("num_layers", "options", "counts"),
    [
        (10, {"pp": 4, "first": 2, "last": 2}, [2, 3, 3, 2]),
        (10, {"pp": 4, "first": 1}, [1, 3, 3, 3]),
        (11, {"pp": 3, "last": 1}, [5, 5, 1]),
        (5, {"pp": 2, "first": 2, "last": 3}, [2, 3]),
        (6, {"pp": 4, "embedding": True, "loss": True}, [1, 2, 2, 1]),
        (7, {"pp": 4, "loss": True}, [2, 2, 2, 1]),
        (2, {"pp": 4, "embedding": True, "loss": True}, [0, 1, 1, 0]),
        (3, {"pp": 5, "layout": "E|t|tt||L"}, [0, 1, 2, 0, 0]),
    ],
)
def test_ranks_may_differ(num_layers: int, options: dict[str, Any], counts: list[int]) -> None:
    parts = split(num_layers, **options)
    assert [len(rank[0].layers) for rank in parts] == counts
    assert [rank[0].has_embedding for rank in parts] == [True] + [False] * (len(counts) - 1)
    assert [rank[0].has_output for rank in parts] == [False] * (len(counts) - 1) + [True]


def test_uneven_ranks_may_have_chunks() -> None:
    assert layers(split(10, pp=3, first=2, last=4, virtual=2)) == [
        [[0], [5]],
        [[1, 2], [6, 7]],
        [[3, 4], [8, 9]],
    ]


def test_embedding_and_loss_count_as_layers_of_their_chunks() -> None:
    found = layers(split(14, pp=2, virtual=4, embedding=True, loss=True))
    assert found == [[[0], [3, 4], [7, 8], [11, 12]], [[1, 2], [5, 6], [9, 10], [13]]]


def test_a_layout_deals_its_stages_out_in_turn() -> None:
    assert layers(split(6, pp=2, layout="Et|tt||tttL")) == [[[0], []], [[1, 2], [3, 4, 5]]]


@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_every_layer_is_somewhere_once_and_in_order(pp: int, chunks: int, data: Any) -> None:
    size = pp * chunks
    counts = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    stages = list(stages_in_order(arrange(counts, pp)))
    assert [n for stage in stages for n in stage.layers] == list(range(sum(counts)))
    assert [stage.has_embedding for stage in stages].index(True) == 0
    assert sum(stage.has_embedding for stage in stages) == 1
    assert [i for i, stage in enumerate(stages) if stage.has_output] == [size - 1]


@pytest.mark.parametrize(
    ("num_layers", "options", "message"),
    [
        (30, {"pp": 4}, r"--num-layers \(30\) must be divisible by --pipeline-model-parallel-size "
         r"\(4\); choose --pipeline-model-parallel-size 3 or 5; or divide unevenly"),
        (8, {"pp": 4, "loss": True}, r"--num-layers \(8 \+ 1 by --account-for-loss"),
        (8, {"pp": 2, "per_stage": 3}, r"4 layers of a pipeline rank must be divisible by "
         r"--num-layers-per-virtual-pipeline-stage \(3\); choose .* 2 or 4"),
        (8, {"pp": 2, "virtual": 3}, r"--num-virtual-stages-per-pipeline-rank \(3\)"),
        (8, {"virtual": 2}, "--num-virtual-stages-per-pipeline-rank needs --pipeline-model"),
        (8, {"first": 2}, "--decoder-first-pipeline-num-layers needs --pipeline-model"),
        (8, {"pp": 2, "virtual": 2, "per_stage": 2}, "say the same; give one"),
        (8, {"pp": 4, "first": 2, "per_stage": 2}, "give --num-virtual-stages-per-pipeline-rank"),
        (8, {"pp": 4, "first": 2, "loss": True}, "--account-for-loss.* evenly"),
        (8, {"pp": 4, "first": 3}, r"leave 5 layers, which 3 stages cannot share evenly; "
         "choose 2 or 5"),
        (8, {"pp": 4, "first": 3, "last": 2}, "choose together 4 or 6"),
        (8, {"pp": 2, "first": 3, "last": 3}, r"must add up to --num-layers \(8\)"),
        (8, {"pp": 4, "first": 9}, r"must add up to --num-layers \(8\)"),
        (8, {"pp": 4, "first": 0}, "--decoder-first-pipeline-num-layers must be at least 1"),
        (2, {"pp": 1, "layout": "Et|tL"}, "2 stages, and --pipeline-model-parallel-size is 1"),
        (4, {"pp": 2, "layout": "Et|t|ttL"}, "3 stages, which must be divisible by .* 1 or 3"),
        (4, {"pp": 2, "layout": "Ett|ttL", "virtual": 2}, "says all that .* could; give one"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(
    num_layers: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        split(num_layers, **options)
