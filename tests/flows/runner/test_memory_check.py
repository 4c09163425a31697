"""A training that is run alone is planned on what its yard gives it, as one of a recipe is."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from flows.recipes.stage_job import StageJob, stage_job
from flows.runner.memory_check import (
    plan_before,
    unchecked_layout,
    unknown_gpu_memory,
)
from flows.yard.profile import Profile, TrainingResources
from flows.yard.read_profile import YARDS, parse_profile
from trainyard.errors import ConfigError

TRAINING: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 32,
    "position_embedding_type": "rope",
    "micro_batch_size": 4,
    "train_iters": 6,
    "lr": 1e-3,
    "data_path": ["tokens"],
    "save": "run",
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 255,
}
LEARNT = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "t", "vocab_size": None}
GPUS = TrainingResources(world_size=8, gpu_memory_gib=80.0)


def training(**changes: Any) -> StageJob:
    return stage_job("pretrain", {**TRAINING, **changes}, "a.toml")


def test_the_plan_is_of_the_same_model_on_what_the_yard_has() -> None:
    plan = plan_before(training(lr=2e-3), GPUS, "a.toml")
    assert plan is not None
    assert (plan.stage, plan.output) == ("plan", None)
    own = {"num_layers": 2, "micro_batch_size": 4, "vocab_size": 255}
    given = {"world_size": 8, "gpu_memory_gib": 80.0}
    assert plan.document.items() >= {**own, **given}.items()
    assert "lr" not in plan.document


def test_ranks_of_one_machine_are_those_that_the_training_starts() -> None:
    plan = plan_before(training(nproc_per_node=2), TrainingResources(gpu_memory_gib=80.0), "a.toml")
    assert plan is not None
    assert plan.document["world_size"] == 2


@pytest.mark.parametrize(
    ("job", "means"),
    [
        (training(), TrainingResources()),
        (training(), TrainingResources(world_size=8)),
        (training(**LEARNT), GPUS),
        (training(ckpt_convert_format="torch", ckpt_convert_save="c", load="x"), GPUS),
        (StageJob(stage="merge", document={}, output=None), GPUS),
    ],
)
def test_no_plan_without_resources(job: StageJob, means: TrainingResources) -> None:
    assert plan_before(job, means, "a.toml") is None


@pytest.mark.parametrize("means", [GPUS, TrainingResources(world_size=8)])
def test_degrees_that_the_ranks_cannot_have_are_refused_at_once(means: TrainingResources) -> None:
    wrong = training(num_layers=3, pipeline_model_parallel_size=3)
    with pytest.raises(ConfigError, match=r"a.toml, on the yard's resources.*8 ranks in all"):
        plan_before(wrong, means, "a.toml")


# --- a yard with GPUs that does not say how large they are ----------------------------------------

GPU = {"resources": {"pretrain": {"gpus_per_node": 1}}}
MEMORY = {"gpu_memory_gib": 80}
CONTAINER = {"block": "container", "image": "r.io/{stage}:{version}"}


def yard(**document: Any) -> Profile:
    return parse_profile(document, "site")


@pytest.mark.parametrize("profile", [yard(), yard(**GPU, **MEMORY, **CONTAINER)])
def test_a_yard_without_gpus_or_with_known_memory_gives_no_warning(profile: Profile) -> None:
    assert unknown_gpu_memory(profile) is None
    assert unchecked_layout(training(), profile, "a.toml") is None


def test_a_training_that_cannot_be_planned_gives_a_warning() -> None:
    warning = unchecked_layout(training(**LEARNT), yard(**GPU, **MEMORY, **CONTAINER), "a.toml")
    assert warning is not None
    assert warning.startswith("a.toml: the layout is not checked")
    assert "vocab_size" in warning
    assert unchecked_layout(training(**LEARNT), yard(), "a.toml") is None


def test_gpus_of_unknown_memory_give_a_warning() -> None:
    profile = yard(**GPU, **CONTAINER)
    warning = unknown_gpu_memory(profile)
    assert warning is not None
    assert warning.startswith("yard site: a training gets GPUs")
    assert "Write gpu_memory_gib" in warning
    assert unchecked_layout(training(), profile, "a.toml") == warning
    merge = StageJob(stage="merge", document={}, output=None)
    assert unchecked_layout(merge, profile, "a.toml") is None


def test_a_plan_that_states_the_memory_gives_no_warning() -> None:
    profile, job = yard(**GPU, **CONTAINER), training()
    plan = plan_before(job, GPUS, "a.toml")
    assert plan is not None
    assert unknown_gpu_memory(profile, plan) is None
    assert unknown_gpu_memory(profile, replace(plan, document={"world_size": 8})) is not None


@pytest.mark.parametrize("name", sorted(file.stem for file in YARDS.glob("*.toml")))
def test_every_yard_compares_with_its_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As somebody has it who takes away the `#` before all that it offers for GPUs."""
    monkeypatch.setenv("YARD_HOME", "/srv/yard")
    text = (YARDS / f"{name}.toml").read_text()
    offered = re.search(r"^# With GPUs.*\n((?:# .*\n)+)", text, re.MULTILINE)
    if offered is not None:
        text = text.replace(offered[1], re.sub("^# ", "", offered[1], flags=re.MULTILINE))
    profile = parse_profile(tomllib.loads(text), name)
    assert unknown_gpu_memory(profile) is None
    has_gpus = profile.resources_of("pretrain").gpus_per_node > 0
    assert has_gpus == (name != "local")
    assert (profile.training_resources().gpu_memory_gib is not None) == has_gpus
