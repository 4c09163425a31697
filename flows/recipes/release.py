"""Jobs on a checkpoint: another layout, the gate of a release, a Hugging Face export, evaluation,
the card. No Prefect here."""

from __future__ import annotations

from dataclasses import dataclass

from flows.recipes.corpus import heldout_of
from flows.recipes.inputs import is_elsewhere
from flows.recipes.recipe import Recipe
from flows.recipes.stage_job import STEP_MANIFEST, StageJob, stage_job
from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.output import MANIFEST, is_housekeeping
from trainyard.artifacts.urls import basename, join, parent
from trainyard.errors import ArtifactError

CARD = "release"
"""Name of the card of a release, in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseJobs:
    """The jobs on a checkpoint; all but the second read the output of the first."""

    reshard: StageJob
    export: StageJob
    parity: StageJob
    """Of flow release alone, as the card: fails if the model is served otherwise than trained."""
    evaluate: StageJob
    benchmark: StageJob
    card: StageJob

    def all(self) -> list[StageJob]:
        """Every job of flow release."""
        return [
            *(self.reshard, self.parity, self.export),
            *(self.evaluate, self.benchmark, self.card),
        ]


def release_jobs(recipe: Recipe, checkpoint: str | None = None) -> ReleaseJobs:
    """The jobs for the checkpoint of the recipe's training, or for another one."""
    load = _load(recipe, checkpoint)
    root = recipe.root if load == recipe.checkpoint() else recipe.at("releases", _name(load))
    resharded = join(root, "resharded")
    reads = {"load": resharded}  # the trained model in its new layout
    export = {"load_dir": load, "save_dir": join(root, "export"), "saver": "hf"}
    measured = {**reads, "output_dir": join(root, "evaluation")}
    made = {name: join(root, name) for name in ("export", "evaluation", "benchmark", "parity")}
    card = {"checkpoint": resharded, **made, "output_prefix": join(root, CARD)}
    return ReleaseJobs(
        reshard=recipe.job("reshard", {"load_dir": load, "save_dir": resharded}),
        export=stage_job("reshard", export, f"{recipe.where} (export)", "export"),
        parity=recipe.job("parity", {**reads, "output_dir": made["parity"]}),
        evaluate=recipe.job("evaluate", {**measured, "valid_data": [heldout_of(recipe)]}),
        benchmark=recipe.job("benchmark", {**reads, "output_dir": made["benchmark"]}),
        card=recipe.job("report", card, "release-card"),
    )


def check_checkpoint(recipe: Recipe, checkpoint: str | None, backend: str) -> None:
    """Raise ArtifactError if there is no checkpoint, before any stage runs. A folder that only
    containers may see is not checked."""
    load = _load(recipe, checkpoint)
    if is_elsewhere(load, backend):
        return
    if not all(map(is_housekeeping, store.list_files(load))):
        return
    if not checkpoint:
        raise ArtifactError(
            f"{recipe.where}: its training has left no checkpoint in {load}; run flow pretrain-gpt "
            f"on it first, or name another checkpoint by --checkpoint"
        )
    raise ArtifactError(
        f"--checkpoint {load}: no checkpoint there; give the folder of a run, or of a step in it"
        f"{_steps_beside(load)}"
    )


def _load(recipe: Recipe, checkpoint: str | None) -> str:
    return (checkpoint or recipe.checkpoint()).rstrip("/")


def _steps_beside(load: str) -> str:
    """The steps beside a missing step, for an error message."""
    if not STEP_MANIFEST.fullmatch(join(basename(load), MANIFEST)):
        return ""
    found = [name for name in store.list_files(parent(load)) if STEP_MANIFEST.fullmatch(name)]
    return f": {', '.join(parent(name) for name in found[-5:])}" if found else ""


def _name(checkpoint: str) -> str:
    """A readable folder name for a checkpoint, unique to its address."""
    words = [basename(parent(checkpoint)), basename(checkpoint)]
    return "-".join([*filter(None, words), digest_bytes(checkpoint.encode())[:8]])
