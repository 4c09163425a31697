"""The shape of the house: who imports whom, what stays light, what each stage's extra installs."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
import time
import tomllib
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter.application.use_cases import read_user_options
from importlinter.configuration import configure
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.independence import IndependenceContract
from importlinter.contracts.layers import LayersContract
from importlinter.contracts.protected import ProtectedContract
from importlinter.domain.contract import Contract

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("flows", "stages", "trainyard")
STAGES = sorted(path.parent.name for path in ROOT.glob("stages/*/__main__.py"))
CONFIGS = sorted(f"stages.{path.parent.name}.config" for path in ROOT.glob("stages/*/config.py"))

MAX_LINES = 400
HELP_SECONDS = 2.0
"""Of processor time; far above what it takes, since a busy machine counts more of it."""

HEAVY = ["torch", "faiss", "prefect", "tokenizers", "numpy", "transformers", "fsspec", "yaml"]

DISTRIBUTIONS = {
    "faiss": "faiss-cpu",
    "prometheus_client": "prometheus-client",
    "tomli_w": "tomli-w",
    "yaml": "pyyaml",
}
"""Where a module and what installs it have different names."""

KERNELS = {
    "amp_C",  # of apex
    "apex",
    "flash_attn",
    "flash_attn_interface",
    "transformer_engine",
    "transformer_engine_torch",
    "triton",
}
"""Used where they are found and required nowhere, as they are built for the machine they run on:
no version of them could be pinned for all. What each speeds up: docs/training.md."""

UNPINNED_EXTRAS = ("lm-eval", "te", "flash")
"""Extras that `make install` and the images leave out: lm-eval brings dozens of packages of its
own, and the kernels are built for a kind of GPU."""

SHARED_EXTRAS = ("datasets", "documents", "tokenizers", "faiss", "faiss-gpu")
"""Extras that those of stages are made of."""

ELSEWHERE = [
    ("stages.runtime.ranks", "trainyard.parallel.rendezvous"),  # only as one of several ranks
    ("trainyard.artifacts.backends.s3_client", "botocore"),  # the extra `s3`
]
"""Imports inside functions that a stage reaches only with another extra installed."""


# --- import contracts -------------------------------------------------------------------------


PLANTED = {
    "three floors: flows > stages > trainyard": [
        ("trainyard.artifacts.store", "stages.runtime.cli"),
        ("trainyard.artifacts.store", "flows.recipes.recipe"),
        ("stages.runtime.cli", "flows.recipes.recipe"),
    ],
    "the floors of the library": [
        ("trainyard.artifacts.digest", "trainyard.corpus.indexed"),
        ("trainyard.corpus.indexed", "trainyard.tokenizers.base"),
        ("trainyard.models.config", "trainyard.checkpoint.load"),
        ("trainyard.optim.config", "trainyard.models.config"),
        ("trainyard.errors", "trainyard.logging"),
    ],
    "the floors of the flows": [
        ("flows.recipes.recipe", "flows.pages.run_pages"),
        ("flows.yard.profile", "flows.recipes.stage_job"),
        ("flows.backends.slurm.job", "flows.runner.retry"),
    ],
    "no circles": [
        ("trainyard.training.loop.loop", "trainyard.training.trainer"),
        ("trainyard.parallel.dims", "trainyard.parallel.groups"),
        ("flows.backends.outcome", "flows.backends.slurm.job"),
    ],
    "no stage imports another": [
        ("stages.tokenize.run", "stages.merge.run"),
        ("stages.tokenize.run", "stages.merge"),
    ],
    "what all stages run on knows no stage": [("stages.runtime.cli", "stages.tokenize.run")],
    "only flows imports the orchestrator": [
        ("trainyard.training.loop.loop", "prefect"),
        ("stages.tokenize.run", "prefect"),
    ],
    "flows see the options of stages, never their work": [
        ("flows.recipes.recipe", "stages.tokenize.run"),
        ("flows.recipes.recipe", "stages.runtime.cli"),
    ],
    "flows use no floor of the library above artifacts": [
        ("flows.recipes.recipe", "trainyard.models.config"),
    ],
    "training and checkpoints know a model family by the table alone": [
        ("trainyard.checkpoint.model", "trainyard.models.gpt.model"),
        ("trainyard.training.trainer", "trainyard.models.gpt.config"),
    ],
    "no torch below datasets, in data stages or in flows": [
        ("trainyard.corpus.indexed", "torch"),
        ("stages.tokenize.run", "trainyard.models.gpt.model"),
        ("flows.recipes.recipe", "torch"),
    ],
    "torch enters datasets in the loader alone": [("trainyard.datasets.gpt", "torch")],
    "the loader is for training alone": [
        ("trainyard.datasets.gpt", "trainyard.datasets.loader"),
    ],
    "retrieval does without torch": [("trainyard.retrieval.chunks", "torch")],
    "faiss enters retrieval in the index alone": [("trainyard.retrieval.chunks", "faiss")],
    "training does without faiss": [("trainyard.training.loop.loop", "faiss")],
    "the base of the library is the standard library": [("trainyard.config", "numpy")],
    "the options of a stage are light": [
        ("stages.tokenize.config", "numpy"),
        ("stages.pretrain.config", "trainyard.models.gpt.model"),
    ],
    "what only tests install is imported by tests alone": [
        ("trainyard.checkpoint.save", "transformers"),
    ],
}
"""For each contract, imports that it is there to catch: the importing module, the imported one."""


def test_every_contract_has_an_import_planted_against_it() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [entry["name"] for entry in document["tool"]["importlinter"]["contracts"]]
    assert list(PLANTED) == names


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("contract", PLANTED)
def test_a_contract_holds_and_a_wrong_import_breaks_it(contract: str) -> None:
    rule = contracts()[contract]
    # A contract may change what it looks at.
    assert rule.check(deepcopy(whole_graph()), verbose=False).kept
    for importer, imported in PLANTED[contract]:
        graph = deepcopy(whole_graph())
        if imported not in graph.modules:  # a library that nothing imports
            graph.add_module(imported, is_squashed=True)
        graph.add_import(importer=importer, imported=imported)
        assert not rule.check(graph, verbose=False).kept, (importer, imported)


@pytest.mark.parametrize(("importer", "imported"), ELSEWHERE)
def test_imports_inside_functions_are_looked_at(importer: str, imported: str) -> None:
    top = ast.parse((ROOT / (importer.replace(".", "/") + ".py")).read_text()).body
    assert imported not in {one.module for one in top if isinstance(one, ast.ImportFrom)}
    imported = imported if imported in whole_graph().modules else imported.partition(".")[0]
    assert whole_graph().direct_import_exists(importer=importer, imported=imported)


KINDS = {
    "acyclic_siblings": AcyclicSiblingsContract,
    "forbidden": ForbiddenContract,
    "independence": IndependenceContract,
    "layers": LayersContract,
    "protected": ProtectedContract,
}


@cache
def contracts() -> dict[str, Contract]:
    configure()
    options = read_user_options(str(ROOT / "pyproject.toml"))
    return {
        entry["name"]: KINDS[entry["type"]](entry["name"], options.session_options, entry)
        for entry in options.contracts_options
    }


@cache
def whole_graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_files_hold_a_docstring_and_nothing_else(package: str) -> None:
    """The two packages of programs also check the Python that runs them."""
    checks = [ROOT / "flows/__init__.py", ROOT / "stages/__init__.py"]
    for path in ROOT.joinpath(package).rglob("__init__.py"):
        if path in checks:
            assert path.read_text().endswith("import check_program\n\ncheck_program()\n")
            continue
        body = ast.parse(path.read_text()).body
        assert len(body) == 1, path
        assert isinstance(body[0], ast.Expr), path
        assert isinstance(body[0].value, ast.Constant), path


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_modules_is_a_package(package: str) -> None:
    folders = {path.parent for path in ROOT.joinpath(package).rglob("*.py")}
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


# --- what --help costs ------------------------------------------------------------------------


@pytest.mark.slow
def test_importing_the_options_of_all_stages_brings_in_nothing_heavy() -> None:
    script = f"import sys, {', '.join(CONFIGS)}; print(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_help_is_quick(stage: str) -> None:
    before, began = processor_seconds(), time.perf_counter()
    command = [sys.executable, "-m", f"stages.{stage}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    spent, seconds = processor_seconds() - before, time.perf_counter() - began
    print(f"stages.{stage} --help: {seconds:.2f} s, of which processor {spent:.2f} s")
    assert done.returncode == 0, done.stderr
    assert f"stages.{stage}" in done.stdout
    assert spent < HELP_SECONDS


def processor_seconds() -> float:
    """What finished children of this process took of a processor; waiting for one is not in it."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# --- what is installed ------------------------------------------------------------------------


@cache
def project() -> dict[str, Any]:
    document: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return document


def names(requirements: list[str]) -> set[str]:
    """What is required, an extra of our own standing for what it holds."""
    found = set()
    for text in requirements:
        name, _, rest = re.sub(r"[^\w[\],-].*", "", text).partition("[")
        if name == "trainyard":
            extras = project()["optional-dependencies"]
            found |= names(
                [inner for extra in rest.rstrip("]").split(",") for inner in extras[extra]]
            )
        else:
            found.add(name.lower().replace("_", "-"))
    return found


STARTS = {
    "retro_preprocess": ("retro-db", "retro-embed", "faiss-train", "faiss-add", "faiss-query"),
}
"""The stages that a stage starts, by their extras."""


@cache
def import_graph() -> grimp.ImportGraph:
    graph = grimp.build_graph("stages", "trainyard", include_external_packages=True, cache_dir=None)
    for importer, imported in ELSEWHERE:
        graph.remove_import(importer=importer, imported=imported)
    return graph


@pytest.mark.parametrize("stage", STAGES)
def test_the_extra_of_a_stage_is_what_its_code_imports(stage: str) -> None:
    reached = import_graph().find_upstream_modules(f"stages.{stage}", as_package=True)
    roots = {name.partition(".")[0] for name in reached} - sys.stdlib_module_names - set(PACKAGES)
    roots -= KERNELS
    used = {DISTRIBUTIONS.get(root, root) for root in roots}
    for other in STARTS.get(stage, ()):  # as programs, in the same environment
        used |= names(project()["optional-dependencies"][other])
    extra = names(project()["optional-dependencies"][stage.replace("_", "-")])
    silent = {"numpy"} if "torch" in used else set()  # torch complains at every start without it
    assert (used | silent) - names(project()["dependencies"]) == extra


def test_the_extra_all_holds_every_stage() -> None:
    extras = project()["optional-dependencies"]
    held = set(re.findall(r"[a-z0-9-]+", " ".join(extras["all"]))) - {"trainyard"}
    assert held == set(extras) - {"all", "dev", *SHARED_EXTRAS, *UNPINNED_EXTRAS}
    assert held >= {stage.replace("_", "-") for stage in STAGES}


def test_every_requirement_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    extras = project()["optional-dependencies"].items()
    pinned = [text for name, extra in extras if name not in UNPINNED_EXTRAS for text in extra]
    required = names([*project()["dependencies"], *pinned])
    assert required <= names(pins)


# --- how sources look -------------------------------------------------------------------------


def sources() -> list[Path]:
    folders = [ROOT / name for name in (*PACKAGES, "tests")]
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def test_sources_are_ascii() -> None:
    texts = [*sources(), *ROOT.glob("recipes/*.toml"), *ROOT.glob("*.toml"), ROOT / "Makefile"]
    assert [str(path) for path in texts if not path.read_bytes().isascii()] == []


def test_no_source_outgrows_a_room() -> None:
    long = {str(p): n for p in sources() if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert long == {}
