"""One recipe makes the same bytes on every backend, a model trained by two ranks included.

The backends: processes, containers, two nodes of Slurm, the stand-in for Kubernetes, and
`docker compose run --rm` on an object store."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from flows.recipes.stage_job import StageJob
from tests.yard.compose.engine import Compose, compose, engine
from tests.yard.everywhere import Wanted, by_block, by_compose, start_store, write_profile
from tests.yard.yard import ROOT, write_corpus
from trainyard.artifacts import store

pytestmark = [pytest.mark.yard, pytest.mark.timeout(600)]

QUICKSTART = ROOT / "recipes" / "quickstart.toml"

RECIPE: dict[str, Any] = {
    "tokenize": {"tokenizer_type": "ByteLevelTokenizer", "append_eod": True},
    "plan": {"vocab_size": 300},
    "pretrain": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "seq_length": 32,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 20,
        "save_interval": 10,
        "eval_interval": 10,
        "eval_iters": 1,
        "lr": 1e-2,
        "split": "90,10,0",
        "num_threads": 1,
        "nproc_per_node": 2,
    },
    "evaluate": {"task": "WIKITEXT103"},
    "benchmark": {"prompts": ["The"]},
}
PLACES = ("container", "slurm", "kubernetes", "compose")
TWO_NODES = ("slurm", "kubernetes")
IMAGES = ("plan", "tokenize", "merge")
MORE_IMAGES = ("train-tokenizer", "pretrain", "reshard", "evaluate")
TIMED = ("benchmark", "report")
"""Stages whose output contains durations."""

Made = tuple[dict[str, str], bytes]
"""Digests of what stages made, and the ledger of the training."""


def before_training(job: StageJob) -> bool:
    return job.stage in ("plan", "tokenize", "merge")


def with_training(job: StageJob) -> bool:
    return before_training(job) or job.name == "pretrain"


def not_timed(job: StageJob) -> bool:
    return job.stage not in TIMED


# --- places ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """The yard of docker-compose.yml with the images of the stages that need no torch."""
    with engine() as variables, compose(tmp_path_factory.mktemp("images"), variables) as yard:
        yard.build(*IMAGES, "store")
        yield yard


@pytest.fixture(scope="module")
def on_store(images: Compose) -> Iterator[Compose]:
    """The same with its store running, and the variables that lead there."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in start_store(images).items():
            patch.setenv(name, value)
        yield images


def write_recipe(folder: Path, corpus: str, document: dict[str, Any]) -> Path:
    """Recipe `tiny` on the documents of a folder or a bucket."""
    sources = {"corpus": [f"{corpus}/*.jsonl"], "evaluation_data": f"{corpus}/heldout.txt"}
    path = folder / "tiny.toml"
    path.write_text(tomli_w.dumps({**sources, **document}))
    return path


def make(
    place: str,
    folder: Path,
    corpus: Path,
    document: dict[str, Any],
    wanted: Wanted,
    request: pytest.FixtureRequest,
) -> Made:
    """Run stages of a recipe in a place; skips where the place cannot be brought up."""
    if place == "compose":
        yard: Compose = request.getfixturevalue("on_store")
        source, root = f"s3://yard/{folder.name}/in", f"s3://yard/{folder.name}"
        for file in corpus.iterdir():
            store.write_bytes(f"{source}/{file.name}", file.read_bytes())
        made = by_compose(write_recipe(folder, source, document), yard, root, wanted)
    else:
        root = str(folder / "yard")
        if place == "container":
            request.getfixturevalue("images")
            shutil.copytree(corpus, folder / "in")
            corpus = folder / "in"
        elif place == "slurm":
            request.getfixturevalue("cluster")
        fake = request.getfixturevalue("stand_in") if place == "kubernetes" else None
        recipe = write_recipe(folder, str(corpus), document)
        made = by_block(recipe, write_profile(place, folder, fake), root, wanted)
    book = f"{root}/tiny/checkpoint/ledger.jsonl"
    return made, store.read_bytes(book) if "pretrain" in made else b""


# --- tokens, and twenty steps on two ranks --------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for number in range(2):
        write_corpus(folder / f"part-{number}.jsonl", 100, seed=number)
    (folder / "heldout.txt").write_text("the words of a train shunt their yard before dawn\n" * 9)
    return folder


@pytest.fixture(scope="module")
def here(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, request: pytest.FixtureRequest
) -> Made:
    """What processes of this machine make."""
    folder = tmp_path_factory.mktemp("here")
    made, book = make("process", folder, corpus, RECIPE, with_training, request)
    assert set(made) == {"plan", "tokenize-part-0", "tokenize-part-1", "merge", "pretrain"}
    assert len(book.splitlines()) == RECIPE["pretrain"]["train_iters"]
    return made, book


@pytest.mark.parametrize("place", PLACES)
def test_tokens_are_the_same_everywhere_and_steps_on_two_nodes(
    place: str, here: Made, corpus: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    trains = place in TWO_NODES
    wanted = with_training if trains else before_training
    made, book = make(place, tmp_path, corpus, RECIPE, wanted, request)
    assert made == {name: digest for name, digest in here[0].items() if name in made}
    assert set(made) >= {"plan", "tokenize-part-0", "tokenize-part-1", "merge"}
    if trains:
        assert book == here[1]


@pytest.mark.full
@pytest.mark.parametrize("place", ["container", "compose"])
def test_steps_in_the_image_of_the_training_are_the_same(
    place: str, here: Made, corpus: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("images").build("pretrain")
    assert make(place, tmp_path, corpus, RECIPE, with_training, request) == here


# --- the quick start ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A third of the quick start's documents, collected once: an image has other packages to
    read."""
    folder = tmp_path_factory.mktemp("collected")
    options = tomllib.loads(QUICKSTART.read_text())["collect"]
    size, shards = str(options["max_size_mb"] / 3), str(options["num_shards"])
    wanted = ("--max-size-mb", size, "--num-shards", shards, "--output-dir", str(folder / "in"))
    subprocess.run([sys.executable, "-m", "stages.collect", *wanted], cwd=ROOT, check=True)
    for manifest in (folder / "in").glob("*manifest.json"):
        manifest.unlink()  # by which the documents would be known in one place and not in another
    return folder / "in"


@pytest.fixture(scope="module")
def quickstart() -> dict[str, Any]:
    """The recipe with fewer steps, and two ranks of one thread in the place of one of two."""
    document = tomllib.loads(QUICKSTART.read_text())
    del document["collect"]
    document["pretrain"] |= {"nproc_per_node": 2, "num_threads": 1, "micro_batch_size": 8}
    document["pretrain"] |= {"train_iters": 40, "eval_interval": 20, "save_interval": 20}
    return document


@pytest.fixture(scope="module")
def quickstart_here(
    tmp_path_factory: pytest.TempPathFactory,
    collected: Path,
    quickstart: dict[str, Any],
    request: pytest.FixtureRequest,
) -> Made:
    folder = tmp_path_factory.mktemp("quickstart")
    return make("process", folder, collected, quickstart, not_timed, request)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", PLACES)
def test_the_quick_start_is_the_same_everywhere(
    place: str,
    quickstart_here: Made,
    collected: Path,
    quickstart: dict[str, Any],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if place in ("container", "compose"):
        request.getfixturevalue("images").build(*MORE_IMAGES)
    assert make(place, tmp_path, collected, quickstart, not_timed, request) == quickstart_here
