"""Every family in every format and precision: what `reshard` writes is the model bit for bit, or
refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.records import recorded
from tests.stages.reshard_matrix import (
    FAMILIES,
    FORMATS,
    PRECISIONS,
    REFUSED,
    case_of,
    options_of,
    sample_of,
    written,
)
from tests.stages.test_reshard import reshard
from tests.trainyard.conversion.megatron.converted_runs import save_weights
from tests.trainyard.training.layouts.matrix import FAMILIES as TRAINED
from tests.trainyard.training.layouts.matrix import PAGE
from trainyard.conversion.detect import loader_for
from trainyard.conversion.loaders import open_source
from trainyard.errors import ConfigError

pytestmark = pytest.mark.slow

CASES = [(family, name) for family in FAMILIES for name in FORMATS]


@pytest.mark.recorded
@pytest.mark.parametrize(("family", "name"), [case for case in CASES if case not in REFUSED])
def test_what_is_written_reads_back_bit_for_bit(family: str, name: str, tmp_path: Path) -> None:
    config, weights = sample_of(family, name)
    for precision, dtype in PRECISIONS.items():
        ours = {
            key: tensor if key.endswith("expert_bias") else tensor.to(dtype)
            for key, tensor in weights.items()
        }
        folder, made = tmp_path / precision, tmp_path / f"{precision} made"
        save_weights(folder, config, ours)
        reshard(folder, made, **options_of(family, name, config))
        with open_source(str(made), loader_for(str(made))) as source:
            assert source.config.model_type == config.model_type
            assert source.specs.keys() == {f"model.{key}" for key in ours}
            for key, tensor in ours.items():
                found = source.read(f"model.{key}")
                assert found.dtype == tensor.dtype, key
                assert torch.equal(found, tensor), key


@pytest.mark.recorded
@pytest.mark.parametrize(("family", "name"), sorted(REFUSED))
def test_what_a_format_does_not_have_is_refused(family: str, name: str, tmp_path: Path) -> None:
    config, weights = sample_of(family, name)
    save_weights(tmp_path / "run", config, weights)
    with pytest.raises(ConfigError, match=r"--[a-z]|Retro|legacy"):
        reshard(tmp_path / "run", tmp_path / "made", **options_of(family, name, config))
    assert not (tmp_path / "made").exists() or not any((tmp_path / "made").iterdir())


def test_the_page_has_this_table_for_all_families() -> None:
    page = PAGE.read_text()
    assert page == written(page, recorded()), "python -m tests.stages.reshard_matrix --write"
    assert FAMILIES.keys() == TRAINED.keys()


def test_every_case_was_recorded() -> None:
    for test, case in (case_of(*case) for case in CASES):
        assert case in recorded()[test]
