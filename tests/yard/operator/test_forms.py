"""What a run gets that a person requests by the form of a deployment, in a browser.

It is what the command line gives: with no field changed, and with one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from flows import training
from flows.cli import flow_commands
from flows.gc import command as gc_command
from flows.server.home import PASSWORD, URL
from tests.security.attacks import Target
from tests.security.servers import ui_server
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.yard.operator.browser import GENERATIONS, Form, browser_page
from tests.yard.operator.deployed import Api, register
from tests.yard.yard import ROOT, Yard, write_corpus
from trainyard.models.gpt.config import GPTConfig

pytestmark = [pytest.mark.yard, pytest.mark.timeout(240)]

Page = Any
QUICKSTART = "recipes/quickstart.toml"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The server of `make ui`, for which yard `local` is registered."""
    folder = tmp_path_factory.mktemp("forms")
    with (folder / "server.log").open("w") as log, ui_server(folder / "yard", log) as server:
        client = {"PREFECT_HOME": str(folder / "client"), PASSWORD: server.password}
        register(Yard(folder, {URL: f"{server.url}/api", **client}), "local")
        yield server


@pytest.fixture(scope="module")
def page(server: Target) -> Iterator[Page]:
    with browser_page(server) as page:
        yield page


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A yard of this test with a trained quick start, and the sources as working directory."""
    monkeypatch.setenv("YARD", str(tmp_path / "yard"))
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    model = GPTConfig(num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=32)
    save_gpt(str(tmp_path / "yard" / "quickstart" / "checkpoint"), random_gpt(model))
    return tmp_path


# --- what a flow makes of its parameters ----------------------------------------------------------


class ResolvedError(Exception):
    """The jobs of a flow, instead of their runs."""


class NoRunner:
    """A runner that stops at what it is told to expect."""

    def __init__(self, *given: object, **more: object) -> None:
        pass

    async def __aenter__(self) -> NoRunner:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def expect(self, jobs: Sequence[Any]) -> None:
        raise ResolvedError([(job.name, job.stage, job.document) for job in jobs])


def resolved(module: str, parameters: dict[str, Any]) -> Any:
    """The options of all stages of a flow with these parameters."""
    flow = import_module(f"flows.{module}")
    run = getattr(flow, module).fn
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as thread:
        for runs in (flow, training):
            patch.setattr(runs, "StageRunner", NoRunner, raising=False)
        patch.setattr(flow, "sweep", no_sweep, raising=False)
        # In a thread: the browser's driver has the event loop of this one.
        done = thread.submit(lambda: asyncio.run(run(**parameters)))
        with pytest.raises(ResolvedError) as found:
            done.result()
    return found.value.args


def no_sweep(*asked: object) -> None:
    raise ResolvedError(*asked)


def by_command_line(module: str, *arguments: str) -> Any:
    """What a flow makes of its command line."""
    if module == "collect_garbage":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gc_command, "sweep", no_sweep)
            with pytest.raises(ResolvedError) as found:
                gc_command.main(["--profile", "local", *arguments])
        return found.value.args
    given: dict[str, Any] = {}

    def run_program(load: object, home: object, verbose: object, **parameters: Any) -> Any:
        given.update(parameters)
        return 1, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow_commands, "run_program", run_program)
        assert flow_commands.flow_main(module, [*arguments, "--profile", "local"]) == 1
    return resolved(module, given)


def opened(page: Page, server: Target, generation: str, flow: str) -> Form:
    api = Api(f"{server.url}/api", server.password)
    return Form(page, server, generation, api.ask(f"deployments/name/{flow}/local")["id"])


def requested(form: Form, server: Target, module: str) -> Any:
    """What a flow makes of a form that is submitted."""
    run = Api(f"{server.url}/api", server.password).ask(f"flow_runs/{form.submit()}")
    return resolved(module, run["parameters"])


def default_of(module: str) -> Any:
    """The recipe that a flow runs unless another is given."""
    flow = getattr(import_module(f"flows.{module}"), module)
    return flow.parameters.properties["recipe"]["default"]


def edited(folder: Path, old: str, new: str, recipe: str = QUICKSTART) -> str:
    """A recipe, the quick start's unless given, with one line changed."""
    text = Path(recipe).read_text()
    assert text.count(old) == 1
    path = folder / Path(recipe).name
    path.write_text(text.replace(old, new))
    return str(path)


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_switch_left_alone_stays_as_the_recipe_says(
    page: Page, server: Target, root: Path, generation: str
) -> None:
    """append_eod of the quick start is true."""
    untouched = opened(page, server, generation, "prepare-corpus")
    wanted = by_command_line("prepare_corpus", QUICKSTART)
    assert requested(untouched, server, "prepare_corpus") == wanted
    form = opened(page, server, generation, "prepare-corpus")
    form.choose("append_eod", "false")
    changed = edited(root, "append_eod = true", "append_eod = false")
    assert requested(form, server, "prepare_corpus") == by_command_line("prepare_corpus", changed)


@pytest.mark.full
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize(
    ("module", "field", "text", "old", "new"),
    [
        ("pretrain_gpt", "train_iters", "70", "train_iters = 200", "train_iters = 70"),
        ("pretrain_gpt", "lr", "0.002", "\nlr = 4e-3", "\nlr = 2e-3"),
        (
            *("pretrain_gpt", "overrides", "# less\npretrain.clip_grad = 0.5"),
            *("\nclip_grad = 1.0", "\nclip_grad = 0.5"),
        ),
        (
            *("pretrain_gpt", "overrides", "pretrain.lr_decay_style = linear"),
            *('lr_decay_style = "cosine"', 'lr_decay_style = "linear"'),
        ),
        ("release", "num_shards", "3", "num_shards = 2 ", "num_shards = 3 "),
        ("pretrain_bert", "train_iters", "70", "train_iters = 300", "train_iters = 70"),
        ("pretrain_t5", "train_iters", "70", "train_iters = 200", "train_iters = 70"),
        ("pretrain_retro", "train_iters", "70", "train_iters = 150", "train_iters = 70"),
        ("finetune_gpt", "train_iters", "70", "train_iters = 100", "train_iters = 70"),
        (
            *("build_retro", "overrides", "faiss_query.retro_query_num_neighbors_query = 40"),
            *("neighbors_query = 50", "neighbors_query = 40"),
        ),
        ("release", "num_tokens_to_generate", "7", "to_generate = 48", "to_generate = 7"),
    ],
)
def test_a_filled_field_overrides_the_recipe_and_nothing_else(
    page: Page,
    server: Target,
    root: Path,
    generation: str,
    module: str,
    field: str,
    text: str,
    old: str,
    new: str,
) -> None:
    flow = module.replace("_", "-")
    recipe = str(default_of(module))
    untouched = requested(opened(page, server, generation, flow), server, module)
    assert untouched == by_command_line(module, recipe)
    form = opened(page, server, generation, flow)
    form.fill(field, text)
    changed = edited(root, old, new, recipe)
    assert requested(form, server, module) == by_command_line(module, changed)


@pytest.mark.full
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize(
    ("module", "table", "field", "text", "added"),
    [
        (
            *("corpus_refresh", '[tokenize]\ntokenizer_type = "ByteLevelTokenizer"\n'),
            *("workers", "2", "workers = 2\n"),
        ),
        (
            *("collect_corpus", "[dedup]\n", "overrides", "dedup.jaccard_threshold = 0.7"),
            "jaccard_threshold = 0.7\n",
        ),
    ],
)
def test_a_recipe_of_ones_own_is_typed_by_its_path(
    page: Page,
    server: Target,
    root: Path,
    generation: str,
    module: str,
    table: str,
    field: str,
    text: str,
    added: str,
) -> None:
    write_corpus(root / "a.jsonl", 5, seed=1)
    recipe, flow = root / "web.toml", module.replace("_", "-")
    written = f'corpus = ["{root}/a.jsonl"]\n{table}'
    recipe.write_text(written)
    form = opened(page, server, generation, flow)
    form.write_free("recipe", str(recipe))
    wanted = by_command_line(module, str(recipe))
    assert requested(form, server, module) == wanted
    form = opened(page, server, generation, flow)
    form.write_free("recipe", str(recipe))
    form.fill(field, text)
    recipe.write_text(written + added)
    changed = by_command_line(module, str(recipe))
    assert changed != wanted
    recipe.write_text(written)
    assert requested(form, server, module) == changed


@pytest.mark.full
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_stage_is_chosen_and_its_options_are_lines(
    page: Page, server: Target, root: Path, generation: str
) -> None:
    config = root / "tokenize.toml"
    text = 'input = ["a.jsonl"]\noutput_prefix = "b"\ntokenizer_type = "ByteLevelTokenizer"\n'
    config.write_text(text)
    for options in ("", "append_eod = true\nworkers = 2\n"):
        form = opened(page, server, generation, "run-stage")
        form.choose("stage", "tokenize")
        form.fill("config", str(config))
        if options:
            form.fill("options", options)
        found = requested(form, server, "run_stage")
        config.write_text(text + options)
        assert found == by_command_line("run_stage", "tokenize", "--config", str(config))
        config.write_text(text)


@pytest.mark.full
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_sweep_by_the_form_removes_nothing_unless_asked(
    page: Page, server: Target, generation: str
) -> None:
    untouched = opened(page, server, generation, "collect-garbage")
    found = requested(untouched, server, "collect_garbage")
    assert found == by_command_line("collect_garbage")
    form = opened(page, server, generation, "collect-garbage")
    form.fill("keep_runs", "3")
    found = requested(form, server, "collect_garbage")
    assert found == by_command_line("collect_garbage", "--keep-runs", "3")
