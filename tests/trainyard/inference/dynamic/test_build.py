"""The size of a cache, and which models and options do not do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.trainyard.inference.dynamic.engines import build_engine
from tests.trainyard.inference.small_models import build
from trainyard.config import from_dict
from trainyard.errors import ConfigError
from trainyard.inference.dynamic.batch import StepBatch, batch_of, state_groups
from trainyard.inference.dynamic.build import check_family, engine_of
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.inference.dynamic.graphs import graph_sizes
from trainyard.inference.dynamic.scheduler import Sequence, Work
from trainyard.inference.dynamic.sizes import block_bytes, cache_sizes, slot_bytes
from trainyard.models.families import FAMILIES
from trainyard.parallel.dims import ParallelDims
from trainyard.parallel.groups import ALONE, ProcessGroups


def test_a_cache_holds_the_longest_requests_unless_its_size_is_given() -> None:
    model: Any = build("gpt")  # 48 positions
    config = DynamicConfig(
        inference_dynamic_batching_block_size=16, inference_dynamic_batching_max_requests=5
    )
    assert engine_of(model, config).stats().blocks_total == 15  # type: ignore[union-attr]
    limited = engine_of(model, config, max_seq_length=20)
    assert (limited.stats().blocks_total, limited.max_tokens) == (10, 20)  # type: ignore[union-attr]
    assert build_engine(model, num_blocks=7).stats().blocks_total == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 65}, "--num-speculative-tokens"),
        ({"inference_dynamic_batching_block_size": 0}, "-block-size"),
        ({"inference_dynamic_batching_buffer_guaranteed_fraction": 1.0}, "fraction must be in"),
        ({"inference_dynamic_batching_max_tokens": 8}, "8 is less than .*max-requests 256"),
        ({"inference_dynamic_batching_buffer_size_gb": 0.0}, "buffer-size-gb"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DynamicConfig(**options)


def test_a_buffer_without_a_block_or_beyond_the_machine_is_refused() -> None:
    model: Any = build("gpt")
    with pytest.raises(ConfigError, match="holds no block of 256 tokens"):
        engine_of(model, DynamicConfig(inference_dynamic_batching_buffer_size_gb=1e-6))
    with pytest.raises(ConfigError, match=r"-buffer-size-gb 1000000.0 is .*lower it"):
        engine_of(model, DynamicConfig(inference_dynamic_batching_buffer_size_gb=1e6))


def test_a_block_beyond_the_machine_is_refused() -> None:
    model: Any = build("gpt")
    with pytest.raises(ConfigError, match=rf"in blocks of {2**50}, takes .*-batching-block-size$"):
        engine_of(model, DynamicConfig(inference_dynamic_batching_block_size=2**50))


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_families_that_do_not_continue_a_text_are_refused(kind: str) -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8}
    with pytest.raises(ConfigError, match=f"from left to right, which a {kind} does not"):
        check_family(FAMILIES[kind].config(**sizes))


def test_slots_of_states_leave_room_for_blocks() -> None:
    model: Any = build("hybrid")
    block, slot = (f(model.config, ALONE, *n, 4) for f, n in ((block_bytes, [4]), (slot_bytes, [])))

    def sizes(count: float) -> tuple[int, int]:
        options = {
            "inference_dynamic_batching_buffer_size_gb": count / 2**30,
            "inference_dynamic_batching_block_size": 4,
            "inference_dynamic_batching_max_requests": 5,
        }
        return cache_sizes(model, from_dict(DynamicConfig, options), ALONE, 48)

    def bytes_of(blocks: float, slots: float) -> float:
        """With what is for padding."""
        return (blocks + 1) * block + (slots + 1) * slot

    assert sizes(bytes_of(70, 5)) == (70, 5)
    assert sizes(bytes_of(30, 5)) == (30, 5), "6 blocks, half of 48 tokens, for each"
    num_blocks, num_slots = sizes(bytes_of(20, 5))
    assert num_slots < 5
    assert num_blocks >= 6 * num_slots
    assert num_blocks * block + num_slots * slot <= 20 * block + 5 * slot
    assert sizes(bytes_of(1, 1)) == (1, 1)
    with pytest.raises(ConfigError, match="holds no block of 4 tokens beside the states of a"):
        sizes(bytes_of(0, 1))


def test_a_model_without_attention_has_as_many_blocks_as_its_requests_want() -> None:
    model: Any = build("mamba")
    config = DynamicConfig(
        inference_dynamic_batching_block_size=16, inference_dynamic_batching_max_requests=5
    )
    assert cache_sizes(model, config, ALONE, 48) == (15, 5)


def test_guesses_for_a_model_with_states_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--num-speculative-tokens 2: .* state of a mamba; give"):
        build_engine(build("hybrid"), num_speculative_tokens=2)  # type: ignore[arg-type]


def test_tokens_of_a_step_are_grouped_by_their_number() -> None:
    lengths = [1, 5, 1, 2, 7]
    texts = [Sequence(n, 0, list(range(10 * n, 10 * n + k))) for n, k in enumerate(lengths)]
    works = []
    for slot, text in enumerate(texts):
        text.slot, text.blocks = 10 + slot, [0, 0]
        works.append(Work(text, 0, len(text.tokens)))
    batch = batch_of(works, [range(0)] * 5, 0)
    groups = state_groups(batch, torch.device("cpu"))
    assert [group.slots.tolist() for group in groups] == [[10, 12], [13], [11, 14]]
    for group in groups:
        assert group.ragged is not None
        for slot, count, places in zip(group.slots.tolist(), *group.ragged[:2], strict=True):
            own = batch.tokens[places.numpy()].tolist()
            assert own[: int(count)] == texts[slot - 10].tokens
            assert own[-1] == texts[slot - 10].tokens[-1], "padding is of the same text"
        kept = group.ragged.places.flatten()[group.ragged.rows]
        assert torch.equal(kept, group.ragged.written)
        assert len(kept) == sum(group.ragged.counts)


def test_copies_of_a_model_are_refused() -> None:
    groups = ProcessGroups(ParallelDims(tp=2, dp=2), 0)
    with pytest.raises(ConfigError, match=r"on 2 ranks .* and 4 were started; start 2"):
        engine_of(build("gpt"), DynamicConfig(), groups)  # type: ignore[arg-type]


def test_a_step_reaches_other_ranks_as_it_is() -> None:
    one = Sequence(0, 0, list(range(10, 19)), blocks=[4, 2, 7], slot=3)
    other = Sequence(1, 0, [5, 6], num_computed=1, blocks=[3], slot=0)
    batch = batch_of([Work(one, 3, 5), Work(other, 1, 1, (8, 9))], [range(3, 8), range(0)], 2)
    again = StepBatch.decoded(batch.encoded())
    for name in ("counts", "firsts", "tables", "tokens", "logit_rows", "score_rows"):
        np.testing.assert_array_equal(getattr(again, name), getattr(batch, name))
    np.testing.assert_array_equal(again.score_targets, [14, 15, 16, 17, 18])
    np.testing.assert_array_equal(again.slots, [3, 0])
    assert again.top_n == 2
    positions, blocks, places = again.places(4)
    assert positions.tolist() == [3, 4, 5, 6, 7, 1, 2, 3]
    assert blocks.tolist() == [4, 2, 2, 2, 2, 3, 3, 3]
    assert places.tolist() == [3, 0, 1, 2, 3, 1, 2, 3]
    assert again.logit_rows.tolist() == [5, 6, 7], "the first is a part of a prompt"


@pytest.mark.parametrize(("kind", "what"), [("mixtral", "4 experts"), ("deepseek", "and multi-l")])
def test_graphs_of_a_step_that_waits_are_refused(kind: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"num-cuda-graphs 4: a step with .*{what}.*; give 0"):
        build_engine(build(kind), inference_dynamic_batching_num_cuda_graphs=4)  # type: ignore


def test_graphs_are_spread_up_to_the_most_requests() -> None:
    assert graph_sizes(16, 256) == list(range(16, 257, 16))
    assert graph_sizes(3, 20) == [8, 16, 20]
    assert graph_sizes(16, 5) == [5]
