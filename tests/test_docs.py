"""What the pages say is so: links lead somewhere, commands are accepted, printed programs run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from flows.recipes.recipe import parse_recipe, stage_of
from flows.stage_configs import CONFIGS
from stages.plan.corpus_config import CorpusPlanConfig
from stages.plan.retro_config import RetroPlanConfig
from stages.pretrain.classify_config import ClassifyConfig
from stages.runtime.cli import known_flags as known_options
from stages.runtime.common_options import CommonOptions, MegatronOptions
from trainyard.config import leaves, other_names
from trainyard.megatron_cli.command import understand
from trainyard.megatron_cli.implied import implied
from trainyard.megatron_cli.options import split_options
from trainyard.megatron_cli.program_lookup import find_program
from trainyard.megatron_cli.spellings import vocabulary
from trainyard.training.options.samples import RunSamplesConfig

ROOT = Path(__file__).resolve().parents[1]
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
MODULE = re.compile(r"-m ((?:stages|flows)\.\w+)")
STAGE = re.compile(r"-m stages\.(\w+)(.*)")

ELSEWHERE = ("http://", "https://")
OF_A_MACHINE = ("/home/", "/root/", "/tmp/", "/work/", "/Users/")
HOSTS = ("pypi.", "pythonhosted.", "download.pytorch.", "artifactory", "nexus")


# --- reading pages ----------------------------------------------------------------------------


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def fenced(name: str, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(text_of(name)) if kind == language]


@cache
def code_lines(name: str) -> list[str]:
    """Lines of all code blocks of a page; a line that ends in a backslash is one with the next."""
    blocks = [code for _, code in FENCE.findall(text_of(name))]
    blocks += INDENTED.findall(FENCE.sub("", text_of(name)))
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def anchor(heading: str) -> str:
    """The fragment by which a heading is linked to."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return kept.strip().replace(" ", "-")


def anchors(name: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(name)), re.MULTILINE)
    return {anchor(heading) for heading in headings}


# --- what every page owes ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    for found in LINK.findall(text_of(name)):
        link = "".join(found)
        if link.startswith(ELSEWHERE):
            continue
        path, _, fragment = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), f"{name}: {link}"
        if fragment:
            page = str(target.resolve().relative_to(ROOT))
            assert fragment in anchors(page), f"{name}: {link}"


@pytest.mark.parametrize("name", NAMES)
def test_pages_are_ascii_and_know_no_machine(name: str) -> None:
    text = text_of(name)
    assert text.isascii()
    words = [word for word in (*OF_A_MACHINE, *HOSTS) if word in text.replace("/tmp/new", "")]
    assert words == []


@pytest.mark.parametrize("name", NAMES)
def test_tests_that_a_page_names_exist(name: str) -> None:
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text_of(name)):
        assert f"\ndef {test}(" in (ROOT / path).read_text(), f"{name}: {path}::{test}"


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_and_folders_that_the_map_names_exist(name: str) -> None:
    starts = [ROOT / at for at in ("", "trainyard", "trainyard/training")]
    paths = re.findall(r"`([\w]+/[\w/.]*(?:\.py|/))`", text_of(name))
    assert len(paths) > 20
    assert [path for path in paths if not any((start / path).exists() for start in starts)] == []


def test_every_page_is_in_the_index() -> None:
    index = text_of("docs/README.md")
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [page for page in pages if f"({page})" not in index] == []


@pytest.mark.parametrize("name", NAMES)
def test_targets_of_make_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    spoken = re.findall(r"`make ([a-z][\w-]*)", text_of(name))
    typed = [w for line in code_lines(name) for w in re.findall(r"^ *make ([a-z][\w-]*)", line)]
    assert {*spoken, *typed} <= targets


def test_the_readme_names_every_stage() -> None:
    table = re.findall(r"^\| `(\w+)` \|", text_of("README.md"), re.MULTILINE)
    assert sorted(table) == sorted(CONFIGS)


# --- commands ---------------------------------------------------------------------------------


WITHOUT_STAGE = ("compare", "ensemble", "instructions", "lm_eval")
"""Commands with options of their own."""
OTHER_COMMANDS = {"classify": ClassifyConfig}
"""Second command lines of stages, with options that the stage has not."""


def config_of(stage: str) -> type:
    return OTHER_COMMANDS.get(stage) or CONFIGS[stage_of(stage)]


@cache
def commands() -> list[tuple[str, str, str]]:
    """(page, stage, arguments) of every command that starts a stage."""
    found = []
    for name in NAMES:
        for line in code_lines(name):
            for stage, rest in STAGE.findall(line):
                if stage == "megatron" and (words := arguments(rest)) and words[0].endswith(".py"):
                    stage, rest = of_program(words)
                if stage not in ("NAME", "megatron", *WITHOUT_STAGE):
                    found.append((name, stage, rest))
    return found


def of_program(words: list[str]) -> tuple[str, str]:
    """The stage of a program of Megatron-LM, and its command line in our spelling."""
    program = find_program(words[0])
    given, _ = implied(program, words[1:], {})
    known = known_options(program.stage, config_of(program.stage), MegatronOptions)
    return program.stage, shlex.join(understand(given, known, {}).arguments)


def arguments(rest: str) -> list[str]:
    """The words of a command, up to what the shell makes of it, without prose set apart behind."""
    typed = re.split(r" {3,}(?=[a-zA-Z])", rest.strip(), maxsplit=1)[0]
    return shlex.split(re.split(r" [>|#&]", typed, maxsplit=1)[0], comments=True)


@cache
def known_flags(config: type) -> set[str]:
    names = [*(name for name, _, _ in leaves(config)), *other_names(config)]
    names += [field.name for field in fields(CommonOptions)]
    flags = {"--" + name.replace("_", "-") for name in names}
    return flags | {"--no-" + flag[2:] for flag in flags} | {"--help"}


def is_known(stage: str, flag: str, given: set[str]) -> bool:
    """Whether a stage takes it; pretrain takes Megatron-LM's too, plan with --retro or --corpus its
    own."""
    plans = {"--retro": RetroPlanConfig, "--corpus": CorpusPlanConfig} if stage == "plan" else {}
    config = next((plan for word, plan in plans.items() if word in given), config_of(stage))
    if flag in known_flags(config):
        return True
    name = flag.removeprefix("--").replace("_", "-")
    more = tuple(field.name.replace("_", "-") for field in fields(MegatronOptions))
    kind = vocabulary(config_of(stage), more).meaning(name).kind
    is_training = stage_of(stage) == "pretrain" or stage in OTHER_COMMANDS
    return is_training and kind in ("ours", "rule", "accepted")


@pytest.mark.parametrize("name", NAMES)
def test_commands_run_as_they_stand(name: str) -> None:
    """After `make install`, with nothing activated."""
    bare = re.compile(r" *(\w+=\S+ )*(python|prefect|torchrun) ")
    assert [line for line in code_lines(name) if bare.match(line)] == []


def test_commands_in_recipes_and_profiles_run_as_they_stand() -> None:
    files = [*ROOT.glob("recipes/**/*.toml"), *ROOT.glob("deploy/yards/*.toml")]
    lines = [line for path in files for line in path.read_text().splitlines()]
    bare = re.compile(r"(^|[^/\w])python -m")
    assert [line for line in lines if bare.search(line) and "docker compose run" not in line] == []


def test_modules_that_are_started_exist() -> None:
    modules = {module for name in NAMES for module in MODULE.findall(text_of(name))}
    modules -= {"stages.NAME"}
    files = {module: ROOT / module.replace(".", "/") for module in modules}
    wrong = [m for m, p in files.items() if not (p / "__main__.py").exists()]
    assert [module for module in wrong if not files[module].with_suffix(".py").exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_flags_of_commands_are_flags_of_their_stages(name: str) -> None:
    for page, stage, rest in commands():
        if page == name:
            given = {word for word in arguments(rest) if word.startswith("--")}
            given = {flag.partition("=")[0] for flag in given}
            unknown = [flag for flag in given if not is_known(stage, flag, given)]
            assert unknown == [], f"{name}: {stage}"


WHOLE = [
    pytest.param(stage, rest, id=f"{name}-{stage}")
    for name, stage, rest in commands()
    if stage != "finetune"
    and "--use-checkpoint-args" not in rest  # reads its checkpoint
    and not re.match(r" \w+:\d", rest)  # the client of a server
    and not {"--config", "--help", "--dry-run", "..."} & set(arguments(rest))
    and not any(word.isupper() for word in arguments(rest) if not word.startswith("WIKI"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "rest"), WHOLE)
def test_whole_commands_are_accepted(stage: str, rest: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"stages.{stage}", *arguments(rest), "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_neighbours_of_the_page_are_those_of_its_training() -> None:
    """The same options decide the samples in all commands from the embeddings to the training."""
    names = {name.replace("_", "-") for name, _, _ in leaves(RunSamplesConfig)}
    found = []
    for page, stage, rest in commands():
        if page == "docs/retro.md" and " --train-samples " in rest:
            given = split_options(arguments(rest))[1]
            found.append((stage, {one.name: one.values for one in given if one.name in names}))
    stages = [stage for stage, _ in found]
    assert stages == ["retro_embed", "retro_embed", "faiss_query", "faiss_query", "pretrain"]
    assert all(samples == found[0][1] for _, samples in found)
    needed = {"data-path", "split", "seed", "seq-length", "eval-interval", "eval-iters"}
    assert needed <= found[0][1].keys()


def test_enough_commands_are_found() -> None:
    found = {stage for _, stage, _ in commands()}
    assert found >= {"tokenize", "merge", "plan", "pretrain", "reshard", "evaluate", "benchmark"}
    assert len(WHOLE) >= 8


@pytest.mark.parametrize("name", NAMES)
def test_printed_tables_of_recipes_are_recipes(name: str) -> None:
    for text in fenced(name, "toml"):
        for stage, table in parse_recipe(text, "printed.toml").tables.items():
            assert set(table) <= {key for key, _, _ in leaves(CONFIGS[stage_of(stage)])}, stage


# --- the training loop ------------------------------------------------------------------------


@pytest.mark.slow
def test_the_training_loop_trains(tmp_path: Path) -> None:
    program = (ROOT / "docs/examples/training_loop.py").read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", program, re.MULTILINE))
    assert imported == {"pydoc_data", "trainyard"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/examples/training_loop.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step +\d+ +loss (\S+)", done.stdout, re.M)]
    assert losses[0] > 5.5
    assert losses[-1] < 3.0
    assert "The value of " in done.stdout
    assert (tmp_path / "run" / "iter_0000200" / "manifest.json").exists()
