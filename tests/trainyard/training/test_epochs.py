"""--epochs: passes over the training split, as samples or steps of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import RUN
from trainyard.config import from_dict
from trainyard.datasets.build import build_datasets
from trainyard.datasets.config import DataConfig
from trainyard.datasets.epochs import samples_of_epoch
from trainyard.datasets.sample_format import SampleFormat
from trainyard.errors import ConfigError
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.resolve import without_epochs

WEIGHTED = {"data_path": ["1", "a", "2", "b"], "dataset_size": None}
LENGTHS = [7, 30, 12, 55, 3, 41, 22, 9]


def given(tmp_path: Path, **changed: Any) -> PretrainConfig:
    """Ten samples a pass."""
    made_up = {"mock_data": True, "dataset_size": 10, "save": str(tmp_path / "run")}
    rest = {"train_iters": None, "global_batch_size": 4, "epochs": 3}
    return from_dict(PretrainConfig, {**RUN, **made_up, **rest, **changed})


@pytest.mark.parametrize("data_path", [["a"], ["a", "b"], None])
def test_an_epoch_is_what_the_data_of_one_pass_has(
    data_path: list[str] | None, tmp_path: Path
) -> None:
    for number, name in enumerate("ab"):
        write_pair(tmp_path / name, LENGTHS[number:], number)
    paths = tuple(str(tmp_path / name) for name in data_path or ())
    data = DataConfig(
        data_path=paths,
        mock_data=not paths,
        dataset_size=None if paths else 11,
        split="80,20,0",
    )
    form = SampleFormat(8, seed=1, vocab_size=300, eod=0)
    found = samples_of_epoch(data, 8)
    built = build_datasets(data, form, (found, 0, 0)).train
    assert built is not None
    assert len(built) == found
    assert paths or found == 11


def test_epochs_become_samples(tmp_path: Path) -> None:
    found = without_epochs(given(tmp_path, lr_warmup_iters=2, lr_decay_iters=6), dp=1)
    assert (found.training.train_samples, found.training.epochs) == (30, None)
    optimizer = found.optimizer
    assert (optimizer.lr_warmup_samples, optimizer.lr_warmup_iters) == (8, 0)
    assert (optimizer.lr_decay_samples, optimizer.lr_decay_iters) == (24, None)
    assert without_epochs(found, dp=1) is found


def test_the_shorter_of_two_lengths_counts(tmp_path: Path) -> None:
    def steps(train_iters: int, **changed: Any) -> int | None:
        config = given(tmp_path, train_iters=train_iters, **changed)
        return without_epochs(config, dp=2).training.train_iters

    assert (steps(5), steps(100)) == (5, 7)
    assert steps(100, global_batch_size=None, micro_batch_size=1) == 15, "a micro-batch a rank"
    found = without_epochs(given(tmp_path, train_samples=12), dp=1)
    assert found.training.train_samples == 12


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({**WEIGHTED, "mock_data": False}, "a blend by weight takes its sources at different"),
        (
            {"lr_warmup_iters": 2, "rampup_batch_size": [2, 2, 8]},
            "a batch size that changes: steps differ; give --lr-warmup-samples",
        ),
        ({"epochs": 0}, "--epochs must be at least 1"),
        ({"epochs": None}, "give --train-iters or --train-samples, one of them, or --epochs"),
    ],
)
def test_what_has_no_epochs_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        without_epochs(given(tmp_path, **changed), dp=1)
