"""What is run before a stage that somebody runs alone: of a training, its plan. No Prefect here."""

from __future__ import annotations

from flows.job import StageJob, stage_job
from flows.pretrain_jobs import Means, to_be_planned

UNKNOWN = (
    "the layout is not compared with the memory of a GPU, as vocab_size is not among the options: "
    "the number of the tokenizer's tokens"
)
"""What a person is told of a training that cannot be planned."""


def plan_before(job: StageJob, means: Means, where: str) -> StageJob | None:
    """The plan of a training on what the yard gives it, which refuses in words what does not fit.

    None for other stages, where the yard does not say what memory a GPU has, and where the plan
    cannot be made (`is_unknown`). Raises ConfigError for degrees that so many ranks cannot have."""
    if not _trains(job) or not means.to_plan() or job.document.get("vocab_size") is None:
        return None
    where = f"{where}, on what the yard gives a training"
    plan = stage_job("plan", to_be_planned(job.document, means), where)
    return None if means.gpu_memory_gib is None else plan


def is_unknown(job: StageJob, means: Means) -> bool:
    """True for a training that would be planned, if it said how many tokens there are."""
    asked = _trains(job) and means.gpu_memory_gib is not None
    return asked and job.document.get("vocab_size") is None


def _trains(job: StageJob) -> bool:
    return job.stage == "pretrain" and job.document.get("ckpt_convert_format") is None
