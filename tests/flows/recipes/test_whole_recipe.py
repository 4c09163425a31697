"""A recipe is refused at once for what its stages would refuse later, missing files included."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flows.cli import flow_commands
from flows.cli.flow_commands import flow_main
from flows.recipes.inputs import check_inputs
from flows.recipes.pretrain import pretrain_jobs
from flows.recipes.recipe import Recipe, parse_recipe
from flows.yard.profile import TrainingResources
from tests.flows.recipes.test_recipe import TINY, without
from trainyard.artifacts import store
from trainyard.artifacts.manifest import FileRecord, Manifest, publish
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError

FILES = ("one.jsonl", "held.txt", "tokenizer.json")
OWN = """corpus = ["{folder}/one.jsonl"]
evaluation_data = "{folder}/held.txt"
[tokenize]
tokenizer_type = "HuggingFaceTokenizer"
tokenizer_model = "{folder}/tokenizer.json"
[plan]
vocab_size = 500
"""


def own_corpus(folder: Path) -> str:
    """A recipe of the files in a folder, which it makes."""
    for name in FILES:
        (folder / name).write_text("{}")
    rest = without("collect").partition("[pretrain]")
    return OWN.format(folder=folder) + rest[1] + rest[2]


def check(text: str, yard: str, backend: str = "process") -> None:
    recipe = parse_recipe(text, "tiny.toml", yard)
    check_inputs(recipe, pretrain_jobs(recipe).all(), backend)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "key"),
    [("held.txt", "evaluation_data"), ("tokenizer.json", r"\[tokenize\] tokenizer_model")],
)
def test_a_missing_file_is_named_with_its_key(tmp_path: Path, file: str, key: str) -> None:
    text = own_corpus(tmp_path)
    check(text, str(tmp_path / "yard"))
    (tmp_path / file).unlink()
    with pytest.raises(ArtifactError, match=rf"^tiny.toml: {key} /.*/{file}: no file matches"):
        check(text, str(tmp_path / "yard"))


def test_a_missing_checkpoint_to_continue_from_is_refused(tmp_path: Path) -> None:
    text = TINY.replace("[pretrain]", '[pretrain]\nload = "before"')
    wanted = rf"\[pretrain\] load before: .*the path starts at {Path.cwd()}"
    with pytest.raises(ArtifactError, match=wanted):
        check(text, str(tmp_path))


def test_what_the_stages_make_need_not_exist(store_url: str) -> None:
    check(TINY, store_url)
    check(TINY.replace("[pretrain]", f'[pretrain]\nsave = "{store_url}/elsewhere/"'), store_url)


def test_a_folder_that_only_containers_see_is_not_asked_for(tmp_path: Path) -> None:
    text = own_corpus(tmp_path).replace(f"{tmp_path}/held.txt", "/volume/of/pods/held.txt")
    check(text, str(tmp_path / "yard"), "kubernetes")
    with pytest.raises(ArtifactError, match=r"held\.txt"):
        check(text, str(tmp_path / "yard"), "slurm")


@pytest.mark.slow
def test_a_store_out_of_reach_is_the_infrastructures_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(InfrastructureError, match="the store cannot be reached"):
        check(TINY, "s3://bucket/yard")


def test_the_command_starts_nothing_for_a_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flow_commands, "run_program", lambda *_, **given: pytest.fail("it began"))
    recipe = tmp_path / "mine.toml"
    recipe.write_text(own_corpus(tmp_path))
    (tmp_path / "held.txt").unlink()
    root = str(tmp_path / "yard")
    assert flow_main("pretrain_gpt", [str(recipe), "--root", root]) == ArtifactError.exit_status
    assert f"{recipe}: evaluation_data {tmp_path}/held.txt: no file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_deployment_is_refused_before_its_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import training
    from flows.pretrain_gpt import pretrain_gpt

    monkeypatch.setattr(training, "StageRunner", lambda *_, **given: pytest.fail("it began"))
    recipe = tmp_path / "mine.toml"
    recipe.write_text(own_corpus(tmp_path))
    (tmp_path / "held.txt").unlink()
    state = asyncio.run(pretrain_gpt.fn(str(recipe), yard=str(tmp_path / "yard")))
    assert state.message.startswith(f"{recipe}: evaluation_data {tmp_path}/held.txt: no file")


# --- options --------------------------------------------------------------------------------------


def recipe_with(**tables: dict[str, object]) -> Recipe:
    return parse_recipe(TINY, "tiny.toml", "/y").with_options(tables)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"pretrain": {"lr_warmup_iters": 5}}, r"\[pretrain\]: --lr-warmup-iters"),
        ({"pretrain": {"global_batch_size": 5}}, r"\[pretrain\]: .*--global-batch-size"),
        ({"evaluate": {"overlapping_eval": 33}}, r"\[evaluate\]: --overlapping-eval 33 is longer"),
        ({"evaluate": {"seq_length": 64}}, r"\[evaluate\]: --seq-length 64 is longer"),
        ({"benchmark": {"num_tokens_to_generate": 32}}, r"\[benchmark\]: a prompt and --num-tok"),
        ({"pretrain": {"swiglu": True}}, r"\[pretrain\]: the flow exports .* no Hugging Face arch"),
        ({"plan": {"gpu_memory_gib": -1}}, r"\[plan\]: --gpu-memory-gib must be positive"),
        ({"plan": {"vocab_size": "big"}}, r"\[plan\]: vocab_size must be a whole"),
    ],
)
def test_what_a_stage_would_refuse_is_refused_at_once(
    tables: dict[str, dict[str, object]], message: str
) -> None:
    pretrain_jobs(recipe_with(), TrainingResources())
    with pytest.raises(ConfigError, match=rf"^tiny.toml {message}"):
        pretrain_jobs(recipe_with(**tables), TrainingResources())


def test_an_error_of_the_plan_names_the_table_with_the_option() -> None:
    """The plan alone checks what a GPU's experts are, so [pretrain] passes its own checks."""
    eight = TrainingResources(world_size=8)
    with pytest.raises(ConfigError, match=r"^tiny.toml \[pretrain\]: .*--global-batch-size"):
        pretrain_jobs(recipe_with(), eight)
    planned = {"pretrain": {"global_batch_size": 16}, "plan": {"global_batch_size": 5}}
    with pytest.raises(ConfigError, match=r"^tiny.toml \[plan\]: --global-batch-size"):
        pretrain_jobs(recipe_with(**planned), eight)


# --- existing tokens ------------------------------------------------------------------------------


def of_tokens(prefix: str) -> Recipe:
    kind = '[tokenize]\ntokenizer_type = "HuggingFaceTokenizer"\ntokenizer_model = "t"\n'
    above = f'tokens = "{prefix}"\nevaluation_data = "held.txt"\n{kind}'
    return parse_recipe(above + "[pretrain]" + TINY.partition("[pretrain]")[2], "tiny.toml", "/y")


def test_the_vocabulary_of_existing_tokens_is_in_their_manifest(store_url: str) -> None:
    prefix = f"{store_url}/corpus_text_document"
    with pytest.raises(ArtifactError, match="corpus_text_document: no file matches"):
        pretrain_jobs(of_tokens(prefix))
    records = []
    for ending in (".bin", ".idx"):
        store.write_bytes(prefix + ending, b"1234")
        records.append(FileRecord(f"_text_document{ending}", 4, "d"))
    with pytest.raises(ConfigError, match=r"\[plan\]: vocab_size is needed"):
        pretrain_jobs(of_tokens(prefix))
    manifest = Manifest(stage="tokenize", files=tuple(records), metrics={"vocab_size": 777})
    publish(f"{store_url}/corpus.manifest.json", manifest, None)
    assert pretrain_jobs(of_tokens(prefix)).plan.document["vocab_size"] == 777


def test_the_tokenizer_of_existing_tokens_is_checked_in_its_table() -> None:
    wrong = of_tokens("x").with_options({"tokenize": {"tokenizer_type": "Huge"}})
    with pytest.raises(ConfigError, match=r"\[tokenize\]: tokenizer_type is 'Huge'"):
        pretrain_jobs(wrong)
