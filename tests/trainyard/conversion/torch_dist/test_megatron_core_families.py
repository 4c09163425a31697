"""Megatron core builds every family, loads what we write of it strictly, and computes the same; we
compute the same from what it saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.conversion.megatron.converted_runs import ROWS, convert_run, model_in
from tests.trainyard.conversion.torch_dist.families import FAMILIES, impl_of
from tests.trainyard.conversion.torch_dist.frozen_keys import (
    listed,
    release_of,
    run_megatron,
    some_batch,
)
from tests.trainyard.conversion.torch_dist.test_families import golden
from trainyard.conversion.torch_dist.read import open_torch_dist
from trainyard.models.bert.config import BertConfig
from trainyard.models.bert.model import BertModel
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.model import MambaModel
from trainyard.models.retro.chunks import Neighbors
from trainyard.models.retro.config import RetroConfig
from trainyard.models.retro.model import RetroModel
from trainyard.models.t5.config import T5Config
from trainyard.models.t5.model import T5Model

pytestmark = pytest.mark.full

CLOSE = 1e-4
"""Largest difference of logits, in their standard deviations, which is 6 to 11."""
CLOSE_OF_SCANS = 2e-3
"""Of hybrids: it adds up their states in chunks here, token after token there."""

RELEASES = {
    kind: {release_of(kind)} | (set() if kind.startswith("retro") else {"0.16.1"})
    for kind in FAMILIES
}
"""Core 0.16 has no Retro."""

CASES = pytest.mark.parametrize(
    ("kind", "release"),
    [(kind, release) for kind in FAMILIES for release in sorted(RELEASES[kind])],
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of all kinds that a release has been through; it runs once."""

    @cache
    def of(release: str) -> Path:
        root: Path = tmp_path_factory.mktemp(release)
        run_megatron(release, [kind for kind in FAMILIES if release in RELEASES[kind]], root)
        return root

    return of


def ours(config: TransformerConfig, state: dict[str, Tensor]) -> Tensor:
    batch = some_batch()
    tokens, mask = batch["tokens"], batch["mask"]
    with torch.no_grad():
        if isinstance(config, BertConfig):
            types = batch["types"] if config.bert_binary_head else None
            found = filled(BertModel(config, ROWS), state)(tokens, mask, types)
            return found.words[mask.bool()]
        if isinstance(config, T5Config):
            return filled(T5Model(config, ROWS), state)(tokens, batch["decoder_tokens"], mask)
        if isinstance(config, MambaConfig):
            return filled(MambaModel(config, ROWS), state)(tokens)
        if isinstance(config, RetroConfig):
            rows = batch["neighbors"]
            neighbors = Neighbors(rows, torch.full(rows.shape[:3], rows.shape[3]))
            return filled(RetroModel(config, ROWS), state)(tokens, neighbors=neighbors)
        assert isinstance(config, GPTConfig)
        return filled(GPTModel(config, ROWS), state)(tokens)


def filled(model: torch.nn.Module, state: dict[str, Tensor]) -> Any:
    model.load_state_dict(state, strict=True)
    return model.eval()


def theirs(path: Path, config: TransformerConfig) -> Tensor:
    found: Tensor = torch.load(path)["logits"]
    return found[some_batch()["mask"].bool()] if isinstance(config, BertConfig) else found


def check_close(found: Tensor, wanted: Tensor, config: TransformerConfig) -> None:
    assert found.shape == wanted.shape
    limit = CLOSE_OF_SCANS if isinstance(config, MambaConfig) else CLOSE
    assert (found - wanted).abs().max() < limit * wanted.std()


@CASES
def test_megatron_core_loads_and_computes_what_we_write(
    kind: str, release: str, made: Callable[[str], Path]
) -> None:
    """Strictly: `megatron_family_program` fails if a key is missing or left over."""
    folder = made(release) / kind
    said, kept = listed(folder), golden()[kind]
    assert said["tensors"] == kept["tensors"]
    assert release != release_of(kind) or said == kept
    config, weights = FAMILIES[kind]()
    check_close(theirs(folder / "loaded.pt", config), ours(config, weights), config)
    with open_torch_dist(str(folder / "theirs")) as source:
        state = {name.removeprefix("model."): source.read(name) for name in source.specs}
        assert source.step == 100
        found = source.config
    check_close(theirs(folder / "saved.pt", config), ours(found, state), config)
    assert any(not torch.equal(state[name], tensor) for name, tensor in weights.items())


@CASES
def test_files_of_ranks_have_the_same_names_and_values(
    kind: str, release: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """The state dict of the model that it filled is the one that `--saver core` writes."""
    folder = made(release) / kind
    (tmp_path / "run").symlink_to(folder / "run")
    model, _ = model_in(convert_run(tmp_path, transformer_impl=impl_of(kind)))
    state = torch.load(folder / "loaded.pt")["state"]
    assert model.keys() == state.keys()
    assert [name for name, tensor in model.items() if not torch.equal(tensor, state[name])] == []
