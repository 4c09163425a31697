"""What is run before a stage that somebody runs alone: of a training, its plan. No Prefect here."""

from __future__ import annotations

from flows.recipes.pretrain import to_be_planned
from flows.recipes.stage_job import StageJob, stage_job
from flows.yard.profile import Profile, TrainingResources

UNKNOWN = (
    "the layout is not compared with the memory of a GPU, as vocab_size is not among the options: "
    "the number of the tokenizer's tokens"
)
"""What a person is told of a training that cannot be planned."""


def plan_before(job: StageJob, means: TrainingResources, where: str) -> StageJob | None:
    """The plan of a training on what the yard gives it, which refuses in words what does not fit.

    None for other stages, where the yard does not say what memory a GPU has, and where the plan
    cannot be made (`is_unknown`). Raises ConfigError for degrees that so many ranks cannot have."""
    if not _trains(job) or not means.to_plan() or job.document.get("vocab_size") is None:
        return None
    where = f"{where}, on what the yard gives a training"
    plan = stage_job("plan", to_be_planned(job.document, means), where)
    return None if means.gpu_memory_gib is None else plan


def is_unknown(job: StageJob, means: TrainingResources) -> bool:
    """True for a training that would be planned, if it said how many tokens there are."""
    asked = _trains(job) and means.gpu_memory_gib is not None
    return asked and job.document.get("vocab_size") is None


def unknown_gpu_memory(profile: Profile, plan: StageJob | None = None) -> str | None:
    """What a person is told of a yard that gives trainings GPUs and does not say how large these
    are: there no layout is refused before it is trained. None where nothing is amiss.

    plan: that of a recipe, which may say the memory itself."""
    gpus = profile.resources_of("pretrain").gpus_per_node
    is_told = plan is not None and plan.document.get("gpu_memory_gib") is not None
    if not gpus or profile.gpu_memory_gib is not None or is_told:
        return None
    return (
        f"yard {profile.name}: a training gets GPUs, and nobody says what memory one has: a layout "
        f"that does not fit is not refused beforehand. Write gpu_memory_gib, such as 80, above all "
        f"tables of the profile, and register it again"
    )


def unknown_gpu_memory_of_stage(job: StageJob, profile: Profile) -> str | None:
    """The same, of a stage that somebody runs alone: None for all but a training."""
    return unknown_gpu_memory(profile) if _trains(job) else None


def _trains(job: StageJob) -> bool:
    return job.stage == "pretrain" and job.document.get("ckpt_convert_format") is None
