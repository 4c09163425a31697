"""A released checkpoint: the export and its measurements, compared with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.yard.faults.faults import steps, training
from tests.yard.operator.deployed import ENDED, Api, comes, register, working
from tests.yard.yard import Ended, Yard
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.checkpoint.model import load_model

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(400)]

LLAMA = """
normalization = "RMSNorm"
swiglu = true
disable_bias_linear = true
untie_embeddings_and_output_weights = true
"""

RECIPE = """
evaluation_data = "{folder}/held.txt"

[reshard]
num_shards = 2

[evaluate]
task = "WIKITEXT103"

[benchmark]
prompts = ["10 13 16", "20"]
num_tokens_to_generate = 4
"""

TEXT = [(5 + 3 * place) % 250 for place in range(33)]
"""Held out: as many targets as a window of the model has, so that one window scores them all."""

TOKENS = 255
STEPS = [2, 4, 6]
STAGES = ("reshard", "parity", "export", "evaluate", "benchmark", "release-card")
OF_CHECKPOINT = {"resharded": "reshard", "export": "reshard"}
MADE = {**OF_CHECKPOINT, "parity": "parity", "evaluation": "evaluate", "benchmark": "benchmark"}
"""Folders of a release, and the stage that publishes each."""

SAME = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def yard(
    tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str], module_cache: str
) -> Yard:
    """A yard in which recipe `tiny` has trained, and saved three steps."""
    folder = tmp_path_factory.mktemp("release")
    home = {"TRAINYARD_CACHE": module_cache, "PREFECT_HOME": str(folder / "home")}
    yard = Yard(folder, {**prefect_api, **home})
    (folder / "held.txt").write_text(" ".join(map(str, TEXT)))
    yard.recipe(RECIPE.format(folder=folder))
    document = Path(training(folder, str(yard.tiny / "checkpoint"), STEPS[-1], save_interval=2))
    document.write_text(document.read_text() + LLAMA)
    trained = yard.run("-m", "flows.run_stage", "pretrain", "--config", str(document))
    assert trained.status == 0, trained.err
    assert steps(yard.tiny / "checkpoint") == STEPS
    return yard


def release(yard: Yard, *more: str) -> Ended:
    return yard.run("-m", "flows.release", str(yard.folder / "tiny.toml"), *more)


@pytest.fixture(scope="module")
def released(yard: Yard) -> Ended:
    """What the recipe's own checkpoint came to."""
    return release(yard)


def step_url(yard: Yard, step: int) -> str:
    return f"{yard.tiny}/checkpoint/iter_{step:07d}"


def manifest(folder: Path | str) -> Manifest:
    found = read_manifest(f"{folder}/manifest.json")
    assert found is not None, f"{folder} is not published"
    return found[0]


def stamps(folder: Path) -> dict[str, int]:
    """When each output file was written; claims and logs of attempts do not count."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): path.stat().st_mtime_ns for path in files if ".runs" not in path.parts}


def check_published(folder: Path, checkpoint: str) -> None:
    """Every artifact exists, made by its stage from the named input."""
    found = {name: manifest(folder / name) for name in MADE}
    assert {name: one.stage for name, one in found.items()} == MADE
    for name in OF_CHECKPOINT:
        read = found[name].inputs["checkpoint"]
        assert read.urls == (checkpoint,)
        assert read.digest == manifest(checkpoint).output_digest
    for name in ("parity", "evaluation", "benchmark"):
        assert found[name].inputs["load"].digest == found["resharded"].output_digest
    assert "Training beside serving" in (folder / "release.html").read_text()


def exported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exported folder as `transformers` loads it, which must lack nothing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@torch.no_grad()
def logits(model: Any, tokens: list[int]) -> Tensor:
    """Of tokens, not of the rows that pad the vocabulary; those after each token of a text."""
    found = model(torch.tensor([tokens]))
    return getattr(found, "logits", found)[0, :, :TOKENS]


def check_measured(folder: Path, model: Any, step: int) -> None:
    """Another implementation of the model has the same loss and continues with the same tokens."""
    document = json.loads((folder / "evaluation" / "results.json").read_text())
    (results,) = document["sets"]
    loss = functional.cross_entropy(logits(model, TEXT[:-1]), torch.tensor(TEXT[1:]))
    assert results["avg_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert (document["step"], results["num_tokens"]) == (step, len(TEXT))
    assert manifest(folder / "evaluation").metrics["ppl"] == results["ppl"] > 1

    generations, timings = (
        json.loads((folder / "benchmark" / f"{name}.json").read_text())
        for name in ("generations", "timings")
    )
    assert generations["step"] == timings["step"] == step
    requests = generations["requests"]
    assert [one["prompt"] for one in requests] == ["10 13 16", "20"]
    for one in requests:
        text = list(one["prompt_tokens"])
        for _ in range(4):
            text.append(int(logits(model, text)[-1].argmax()))
        assert one["prompt_tokens"] + one["generated_tokens"] == text
    assert (timings["tokens_per_second"] > 0, len(timings["requests"])) == (True, 2)


# --- the recipe's own checkpoint ------------------------------------------------------------------


def test_a_release_publishes_what_it_says(yard: Yard, released: Ended) -> None:
    assert released.status == 0, released.err
    assert released.states() == dict.fromkeys(STAGES, "done")
    assert released.out == f"{yard.tiny}/export\n"
    check_published(yard.tiny, f"{yard.tiny}/checkpoint")
    verified = yard.run("-m", "stages.verify", str(yard.tiny))
    assert verified.status == 0, verified.out + verified.err


@pytest.mark.usefixtures("released")
def test_export_is_the_trained_model(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exported(yard.tiny / "export", monkeypatch)
    trained = load_model(step_url(yard, STEPS[-1])).model
    torch.testing.assert_close(logits(model, TEXT), logits(trained, TEXT), **SAME)
    check_measured(yard.tiny, model, STEPS[-1])


@pytest.mark.usefixtures("released")
def test_a_release_made_again_is_reused_and_nothing_is_written(yard: Yard) -> None:
    before = stamps(yard.tiny)
    again = release(yard)
    assert again.status == 0, again.err
    assert again.states() == dict.fromkeys(STAGES, "reused")
    assert stamps(yard.tiny) == before


# --- another one ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("released")
def test_a_named_step_is_released_apart(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stamps(yard.tiny)
    older = release(yard, "--checkpoint", step_url(yard, 4))
    assert older.status == 0, older.err
    assert older.states() == dict.fromkeys(STAGES, "done")
    export = Path(older.out.strip())
    assert export.parent.name.startswith("checkpoint-iter_0000004-")
    assert export.parent.parent == yard.tiny / "releases"
    check_published(export.parent, step_url(yard, 4))
    assert before.items() <= stamps(yard.tiny).items()

    model = exported(export, monkeypatch)
    ours, last = (logits(load_model(step_url(yard, step)).model, TEXT) for step in (4, 6))
    torch.testing.assert_close(logits(model, TEXT), ours, **SAME)
    assert not torch.allclose(ours, last, **SAME)
    check_measured(export.parent, model, 4)


def test_a_deployed_release_succeeds_or_fails_with_a_message(
    yard: Yard, prefect_api: dict[str, str]
) -> None:
    server, recipe = Api(prefect_api["PREFECT_API_URL"]), str(yard.folder / "tiny.toml")
    register(yard, "local")
    with working(yard, "local") as worker:
        given = {"recipe": recipe, "checkpoint": step_url(yard, 2)}
        good = server.begin("release/local", **given, num_tokens_to_generate=2)
        bad = server.begin("release/local", recipe=recipe, checkpoint=step_url(yard, 3))
        assert comes(240, lambda: {server.state(run) for run in (good, bad)} <= set(ENDED))
    assert server.state(good) == "COMPLETED", worker.output
    assert {task["name"] for task in server.of_run("task_runs", good)} == set(STAGES)
    (folder,) = (yard.tiny / "releases").glob("checkpoint-iter_0000002-*")
    check_published(folder, step_url(yard, 2))
    generations = json.loads((folder / "benchmark" / "generations.json").read_text())
    assert [len(one["generated_tokens"]) for one in generations["requests"]] == [2, 2]

    state = server.ask(f"flow_runs/{bad}")["state"]
    assert state["type"] == "FAILED"
    assert state["message"].startswith(f"--checkpoint {step_url(yard, 3)}: no checkpoint there")
    assert server.of_run("task_runs", bad) == []


def test_a_model_that_is_served_otherwise_than_trained_is_not_released(yard: Yard) -> None:
    recipe = yard.folder / "strict.toml"
    strict = "\n[parity]\ntolerance = 1e-12\n"
    recipe.write_text((yard.folder / "tiny.toml").read_text() + strict)
    ended = yard.run("-m", "flows.release", str(recipe), "--checkpoint", step_url(yard, 2))
    assert (ended.status, ended.states()["parity"]) == (1, "failed")
    assert "differ by more than --tolerance 1e-12 nats" in ended.err
    assert not list((yard.folder / "yard" / "strict").rglob("export"))


# --- refusals -------------------------------------------------------------------------------------


def test_a_missing_step_is_refused_with_the_existing_steps(yard: Yard) -> None:
    before = stamps(yard.folder)
    ended = release(yard, "--checkpoint", step_url(yard, 5))
    assert (ended.status, ended.states(), ended.out) == (1, {}, "")
    assert f"--checkpoint {step_url(yard, 5)}: no checkpoint there" in ended.err
    assert "iter_0000002, iter_0000004, iter_0000006" in ended.err
    assert "Traceback" not in ended.err
    assert stamps(yard.folder) == before


def test_a_recipe_without_a_training_gives_an_error(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    recipe = yard.recipe(RECIPE.format(folder=tmp_path))
    ended = release(yard)
    assert (ended.status, ended.states(), ended.out) == (2, {}, "")
    assert f"{recipe}: its training has left no checkpoint in {yard.tiny}/checkpoint" in ended.err
    assert not (tmp_path / "yard").exists()
