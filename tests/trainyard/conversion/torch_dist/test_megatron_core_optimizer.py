"""Optimizers of Megatron core 0.16.1 load the states that we write of mixtures and latents, and we
read what they save, bit for bit, on one rank and on two that share the experts; those of a Retro in
0.15.3, the last release with one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trainyard.conversion.megatron import megatron_package
from tests.trainyard.conversion.megatron.converted_runs import ROWS, save_trained
from tests.trainyard.conversion.torch_dist.families import FAMILIES, impl_of
from tests.trainyard.conversion.torch_dist.frozen_keys import PROGRAM
from trainyard.artifacts import store
from trainyard.checkpoint.load import open_checkpoint
from trainyard.conversion.megatron.experts import SINGLE
from trainyard.conversion.megatron.names import our_name
from trainyard.conversion.torch_dist.read import open_torch_dist
from trainyard.conversion.torch_dist.write import write_torch_dist
from trainyard.models.config import ModelType, TransformerConfig
from trainyard.models.gpt.checkpoint_names import EXPERT_BIAS

pytestmark = pytest.mark.full

OPTIMIZERS = PROGRAM.with_name("megatron_optimizer_program.py")
KINDS = ("param", "exp_avg", "exp_avg_sq")
MIXTURES = ("experts", "experts-grouped", "experts-local", "experts-in-some-layers")
PLAIN, WHOLE, BUFFERS = "plain", "fully_reshardable", "dp_reshardable"
BY_NAME, ALL = (PLAIN, WHOLE), (PLAIN, WHOLE, BUFFERS)
CASES = [
    *((1, kind, how) for kind in (*MIXTURES, "gpt-oss", "latent", "bert") for how in ALL),
    *((1, kind, how) for kind in ("prediction", "deepseek", "retro") for how in BY_NAME),
    *((2, kind, how) for kind in MIXTURES for how in ALL),
    *((2, "deepseek", how) for how in BY_NAME),
]
"""Expert-parallel ranks, model, kind of optimizer. On a CPU Megatron makes the biases of gpt-oss's
experts none of an expert, so that is left out with two ranks."""

RELEASES = {"retro": "0.15.3"}


def release_of(kind: str) -> str:
    """The release that builds the model."""
    return RELEASES.get(kind, "0.16.1")


Numbers = dict[str, Tensor]


@cache
def trained(kind: str) -> tuple[TransformerConfig, Numbers]:
    """Weights in bf16 and states of a small model, by our full names."""
    config, weights = FAMILIES[kind]()
    generator = torch.Generator().manual_seed(11)
    found: Numbers = {}
    for name, tensor in weights.items():
        if name.endswith(EXPERT_BIAS):
            found[f"model.{name}"] = tensor
            continue
        for state in KINDS:
            found[f"optimizer.{state}.{name}"] = torch.randn(tensor.shape, generator=generator)
        found[f"model.{name}"] = found[f"optimizer.param.{name}"].bfloat16()
    return config, found


def write(folder: Path, kind: str, how: str, ranks: int) -> None:
    config, numbers = trained(kind)
    weights = {n.removeprefix("model."): t for n, t in numbers.items() if n.startswith("model.")}
    states = {
        state: {
            name: numbers[f"optimizer.{state}.{name}"]
            for name in weights
            if not name.endswith(EXPERT_BIAS)
        }
        for state in KINDS
    }
    run = {"use_distributed_optimizer": how != PLAIN, "expert_model_parallel_size": ranks}
    save_trained(folder / "run", weights, states, config, rows=ROWS, tokens=ROWS, **run)
    with open_checkpoint(str(folder / "run")) as checkpoint:
        write_torch_dist(
            checkpoint,
            lambda name: store.open_output(str(folder / "made" / name), name),
            transformer_impl=impl_of(kind),
        )
    how_document = {"distributed": how != PLAIN, "sharding_type": how}
    (folder / "how.json").write_text(json.dumps(how_document))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """The folder of all cases with so many ranks of a release, which runs once."""

    @cache
    def of(ranks: int, release: str) -> Path:
        root: Path = tmp_path_factory.mktemp(f"ranks{ranks}-{release}")
        for number, kind, how in CASES:
            if (number, release_of(kind)) == (ranks, release):
                (root / f"{kind},{how}").mkdir()
                write(root / f"{kind},{how}", kind, how, ranks)
        words = [[str(ranks), str(root)]] * ranks
        megatron_package.run_ranks(release, OPTIMIZERS, words, root / "log.txt", 500)
        return root

    return of


def by_our_names(folder: Path, what: str, ranks: int, kind: str) -> Numbers:
    """What Megatron's ranks have in their models and optimizers, whole, by our full names."""
    config, numbers = trained(kind)
    found = {
        name: torch.full(tensor.shape, torch.nan)
        for name, tensor in numbers.items()
        if not name.endswith(EXPERT_BIAS)
    }
    for rank in range(ranks):
        said = torch.load(folder / f"{what}.{rank}.pt")
        assert said["steps"] == {98}
        for theirs, (part, states) in said["states"].items():
            weight = said["weights"][theirs]
            parts = {"model.": ((0, weight.numel()), weight.flatten().float())}
            parts |= {f"optimizer.{state}.": (part, tensor) for state, tensor in states.items()}
            for prefix, ((begin, end), tensor) in parts.items():
                name, expert = place(theirs, prefix, config.model_type, found, rank, ranks)
                whole = found[name] if expert is None else found[name][expert]
                whole.view(-1)[begin:end] = tensor
    return found


def place(
    theirs: str, prefix: str, family: ModelType, found: Numbers, rank: int, ranks: int
) -> tuple[str, int | None]:
    """Our full name of a parameter of Megatron's on a rank, and which expert it is of."""
    name = our_name(theirs, tied=False, family=family)
    assert name is not None
    match = SINGLE.fullmatch(name)
    if match is None:
        return f"{prefix}{name}", None
    stacked = f"{prefix}{match[1]}{match[3]}"
    return stacked, rank * len(found[stacked]) // ranks + int(match[2])


@pytest.mark.parametrize(("ranks", "kind", "how"), CASES)
def test_its_optimizer_loads_what_we_write_and_we_read_what_it_saves(
    ranks: int, kind: str, how: str, made: Callable[[int, str], Path]
) -> None:
    folder = made(ranks, release_of(kind)) / f"{kind},{how}"
    _, numbers = trained(kind)
    loaded = by_our_names(folder, "loaded", ranks, kind)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, numbers[name].float()), name
    saved = by_our_names(folder, "saved", ranks, kind)
    with open_torch_dist(str(folder / "theirs")) as source:
        assert source.num_updates == 98
        assert source.specs.keys() == numbers.keys()
        for name, tensor in saved.items():
            assert torch.equal(source.read(name).float(), tensor), name
