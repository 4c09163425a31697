"""The order of actions on each rank."""

from __future__ import annotations

import pytest

from trainyard.errors import ConfigError
from trainyard.parallel.pipeline.schedule import (
    Action,
    Message,
    build_pipeline_schedule,
    choose_group_size,
    fits_group_size,
    input_of,
    interleaved_order,
    num_warmup,
    output_of,
)
from trainyard.parallel.pipeline.simulate import peak_in_flight


def words(actions: tuple[Action, ...]) -> str:
    return " ".join(f"{a.kind}{a.microbatch}" for a in actions)


def test_one_process_goes_forward_and_back_with_each_microbatch() -> None:
    (actions,) = build_pipeline_schedule(1, 1, 3)
    assert words(actions) == "F0 B0 F1 B1 F2 B2"


def test_1f1b_of_the_paper() -> None:
    # arXiv:2104.04473, figure 4: 4 ranks, 8 micro-batches
    assert [words(actions) for actions in build_pipeline_schedule(4, 1, 8)] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_few_microbatches_leave_no_steady_state() -> None:
    assert words(build_pipeline_schedule(4, 1, 2)[0]) == "F0 F1 B0 B1"


def test_the_table_of_groups_is_the_one_upstream_documents() -> None:
    # 2 ranks, groups of 3, 5 micro-batches, 2 chunks
    order = interleaved_order(chunks=2, num_microbatches=5, group_size=3)
    assert [m for m, _ in order] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [c for _, c in order] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_interleaved_1f1b_of_the_paper() -> None:
    # arXiv:2104.04473, figure 4: 4 ranks, 2 chunks, 8 micro-batches; what the last rank does
    last = build_pipeline_schedule(4, 2, 8)[3]
    assert [str(action) for action in last[:12]] == [
        "F0.0", "F1.0", "F2.0", "F3.0", "F0.1", "B0.1", "F1.1", "B1.1", "F2.1", "B2.1", "F3.1",
        "B3.1",
    ]  # fmt: skip
    first = build_pipeline_schedule(4, 2, 8)[0]
    assert [a.kind for a in first].index("B") == num_warmup(4, 0, 2, 4) + 1 == 11
    assert [str(action) for action in first[11:15]] == ["B0.1", "F7.0", "B1.1", "F4.1"]


def test_forward_only_is_the_forward_half() -> None:
    for actions in build_pipeline_schedule(3, 2, 6, forward_only=True):
        forwards = [action for action in build_pipeline_schedule(3, 2, 6)[0] if action.kind == "F"]
        assert list(actions) == forwards


@pytest.mark.few_cases(12)
@pytest.mark.parametrize("pp", range(1, 9))
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 32])
def test_work_is_conserved_and_the_activations_held_are_those_of_the_formula(
    pp: int, count: int
) -> None:
    for chunks in (1, 2, 3) if pp > 1 else (1,):
        group = 0 if chunks == 1 else choose_group_size(pp, count)
        for rank, actions in enumerate(build_pipeline_schedule(pp, chunks, count)):
            everything = {(m, c) for m in range(count) for c in range(chunks)}
            for kind in "FB":
                done = [(a.microbatch, a.chunk) for a in actions if a.kind == kind]
                assert len(done) == len(everything)
                assert set(done) == everything
            begun = set()
            for action in actions:
                if action.kind == "F":
                    begun.add(action[1:])
                assert action[1:] in begun
            warmup = num_warmup(pp, rank, chunks, group)
            assert peak_in_flight(actions) == min(warmup + 1, chunks * count)


# --- groups -----------------------------------------------------------------------------------


def test_groups_are_as_small_as_the_pipeline_allows() -> None:
    assert choose_group_size(4, 8) == 4
    assert choose_group_size(4, 9) == 5  # 5 and 4; groups of 4 would leave one of 1
    assert choose_group_size(4, 7) == 7
    assert choose_group_size(4, 3) == 3  # all that there are


def test_a_group_size_that_was_asked_for_is_taken_if_it_fits() -> None:
    assert [n for n in range(1, 13) if fits_group_size(4, 12, n)] == [4, 6, 7, 8, 12]
    assert choose_group_size(4, 12, 7) == 7
    with pytest.raises(
        ConfigError, match=r"group-size-per-virtual-pipeline-stage 5: .* choose 4 or 6"
    ):
        choose_group_size(4, 12, 5)
    with pytest.raises(ConfigError, match="choose 8 or 12"):
        choose_group_size(4, 12, 99)


# --- messages ---------------------------------------------------------------------------------


def test_activations_go_down_the_stages_and_gradients_up() -> None:
    middle = Action("F", 3, 1)
    assert input_of(middle, rank=0, pp=4, chunks=2) == Message("F", 3, 4, source=3, target=0)
    assert output_of(middle, rank=0, pp=4, chunks=2) == Message("F", 3, 5, source=0, target=1)
    back = Action("B", 3, 1)
    assert input_of(back, rank=0, pp=4, chunks=2) == Message("B", 3, 4, source=1, target=0)
    assert output_of(back, rank=0, pp=4, chunks=2) == Message("B", 3, 3, source=0, target=3)


def test_the_ends_of_the_model_talk_to_nobody() -> None:
    assert input_of(Action("F", 0, 0), rank=0, pp=4, chunks=2) is None
    assert output_of(Action("B", 0, 0), rank=0, pp=4, chunks=2) is None
    assert output_of(Action("F", 0, 1), rank=3, pp=4, chunks=2) is None
    assert input_of(Action("B", 0, 1), rank=3, pp=4, chunks=2) is None
    alone = Action("F", 0, 0)
    assert input_of(alone, 0, 1, 1) is None
    assert output_of(alone, 0, 1, 1) is None


def test_a_message_is_named_for_whoever_reads_an_error() -> None:
    message = output_of(Action("B", 7, 0), rank=2, pp=4, chunks=1)
    assert str(message) == "gradient of micro-batch 7 from pipeline rank 2 to 1"
