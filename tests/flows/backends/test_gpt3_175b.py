"""recipes/gpt3_175b.toml on 1,024 GPUs, from the recipe to the submission, letter by letter."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from flows.backends.slurm.script import render_slurm
from flows.recipes.pretrain import PretrainJobs, pretrain_jobs
from flows.recipes.recipe import parse_recipe
from flows.recipes.stage_job import build_config
from flows.runner import stage_spec
from flows.yard.profile import Profile
from flows.yard.read_profile import parse_profile, read_document
from stages.plan.fit import check_fit
from tests.flows.backends.goldens import FOLDER, check_golden, check_golden_script
from tests.flows.processes import ROOT
from trainyard.errors import ConfigError

RECIPE = ROOT / "recipes/gpt3_175b.toml"
KEY = "7c1f0d9a2b3e4f56-1"
NODES = 128
SITE: dict[str, Any] = {
    "partition": "h100",
    "account": "llm",
    "qos": "high",
    "constraint": "nvlink&ib",
    "exclusive": True,
    "containers": "pyxis",
    "extra": ["--switches=4@10:00"],
}
MOUNTS = [
    {"source": "/shared/corpora", "target": "/shared/corpora"},
    {"source": "/shared/yard", "target": "/shared/yard", "read_only": False},
]


@dataclass(frozen=True)
class Submission:
    """The script for Slurm, and the document of the stage."""

    script: str
    config: str


@pytest.fixture(autouse=True)
def always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("YARD", "YARD_SHARED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(stage_spec, "VERSION", "1.0")  # the next one makes no other script
    monkeypatch.setattr(stage_spec, "build_revision", lambda: "")


def profile_of(nodes: int = NODES) -> Profile:
    """deploy/yards/slurm.toml as a site fills it in."""
    document = copy.deepcopy(read_document("slurm"))
    document |= {"image": "/shared/images/{stage}.sqsh", "mounts": MOUNTS}
    document["slurm"] |= SITE
    document["resources"]["pretrain"]["nodes"] = nodes
    return parse_profile(document, "mysite")


def jobs_of(profile: Profile, text: str = "") -> PretrainJobs:
    """As flow pretrain_gpt makes them."""
    recipe = parse_recipe(text or RECIPE.read_text(), str(RECIPE), profile.yard_root())
    return pretrain_jobs(recipe, profile.training_resources())


def submission(nodes: int = NODES, text: str = "") -> Submission:
    """The training's, as the stage task makes it."""
    profile = profile_of(nodes)
    site = profile.stage_environment("/shared/yard/gpt3_175b")
    job = jobs_of(profile, text).pretrain
    folder = Path(site.run_folder, job.name, KEY)
    spec = stage_spec.stage_spec(job, site, folder, KEY)
    document = tomli_w.dumps(stage_spec.stage_document(job, site))
    return Submission(render_slurm(spec, site.options_of(job.stage)), document)


def test_the_script_and_the_stages_document_match_their_golden_files() -> None:
    made = submission()
    check_golden_script("slurm-gpt3-175b-1024-gpus.sbatch", made.script)
    check_golden("slurm-gpt3-175b-1024-gpus.config.toml", made.config)


@pytest.mark.parametrize(
    ("written", "instead", "line"),
    [
        ("save_interval = 500", "save_interval = 250", "save_interval = 250"),
        ("[pretrain]", "[pretrain]\nlr = 7e-5", "lr = 7e-05"),  # over the preset's
        ("pile_text_document", "other", 'data_path = [\n    "/shared/corpora/other",\n]'),
    ],
)
def test_another_recipe_gives_another_document(written: str, instead: str, line: str) -> None:
    text = RECIPE.read_text()
    assert written in text
    config = submission(text=text.replace(written, instead)).config
    golden = (FOLDER / "slurm-gpt3-175b-1024-gpus.config.toml").read_text()
    assert line in config
    assert line not in golden


def test_another_number_of_nodes_gives_another_script() -> None:
    half = submission(nodes=NODES // 2).script
    golden = (FOLDER / "slurm-gpt3-175b-1024-gpus.sbatch").read_text()
    assert half == golden.replace(f"nodes={NODES}", "nodes=64").replace("ntasks=128", "ntasks=64")
    assert half != golden


def test_the_plan_is_of_this_very_run_and_fits_its_gpus() -> None:
    document = jobs_of(profile_of()).plan.document
    assert (document["world_size"], document["gpu_memory_gib"]) == (1024, 80)
    assert document["pipeline_model_parallel_size"] == 16
    check_fit(build_config("plan", document, "plan"))


def test_nodes_that_the_layout_does_not_divide_are_refused_before_anything() -> None:
    with pytest.raises(ConfigError, match=r"960 ranks do not fit .*start 896 or 1024 ranks"):
        jobs_of(profile_of(nodes=120))
