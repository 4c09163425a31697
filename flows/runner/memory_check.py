"""Checks a training against the memory of a yard's GPUs: its plan, and warnings. No Prefect."""

from __future__ import annotations

from flows.recipes.pretrain import to_be_planned
from flows.recipes.stage_job import StageJob, stage_job
from flows.yard.profile import Profile, TrainingResources


def plan_before(job: StageJob, resources: TrainingResources, where: str) -> StageJob | None:
    """The job that plans a training on the yard's resources, and fails if its layout does not fit.

    None for other stages, for a yard without gpu_memory_gib, and without a vocab_size. Raises
    ConfigError for parallel degrees that do not divide the number of ranks."""
    if not _trains(job) or not resources.to_plan() or job.document.get("vocab_size") is None:
        return None
    where = f"{where}, on the yard's resources for a training"
    plan = stage_job("plan", to_be_planned(job.document, resources), where)
    return None if resources.gpu_memory_gib is None else plan


def unknown_gpu_memory(profile: Profile, plan: StageJob | None = None) -> str | None:
    """The warning for a yard with GPUs for training but no gpu_memory_gib, which cannot refuse a
    layout before training. None if there is nothing to warn about.

    plan: that of a recipe, which may state the memory itself."""
    gpus = profile.resources_of("pretrain").gpus_per_node
    is_known = plan is not None and plan.document.get("gpu_memory_gib") is not None
    if not gpus or profile.gpu_memory_gib is not None or is_known:
        return None
    return (
        f"yard {profile.name}: a training gets GPUs of unknown memory, so a layout that does not "
        f"fit is not refused before it runs. Write gpu_memory_gib, such as 80, above all tables of "
        f"the profile, and register it again"
    )


def unchecked_layout(job: StageJob, profile: Profile, where: str) -> str | None:
    """The warning for a training that runs alone and cannot be planned; None for other stages."""
    if not _trains(job):
        return None
    if profile.gpu_memory_gib is not None and job.document.get("vocab_size") is None:
        return (
            f"{where}: the layout is not checked against the memory of a GPU, because the options "
            f"have no vocab_size, the number of the tokenizer's tokens"
        )
    return unknown_gpu_memory(profile)


def _trains(job: StageJob) -> bool:
    return job.stage == "pretrain" and job.document.get("ckpt_convert_format") is None
