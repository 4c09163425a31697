"""A recipe becomes the jobs of a flow, every one validated before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.recipes.corpus import part_names
from flows.recipes.masked import masked_jobs
from flows.recipes.pretrain import PretrainJobs, pretrain_jobs
from flows.recipes.recipe import parse_recipe, read_recipe, yard_root
from flows.recipes.refresh import plan_refresh
from flows.recipes.release import release_jobs
from flows.recipes.stage_job import StageJob, in_shares, read_job
from flows.stage_configs import CONFIGS
from flows.yard.profile import TrainingResources
from tests.flows.processes import ROOT
from trainyard.errors import ArtifactError, ConfigError

TINY = """
[collect]
num_shards = 3
[train_tokenizer]
vocab_size = 500
[tokenize]
append_eod = true
[plan]
[pretrain]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 32
micro_batch_size = 2
global_batch_size = 4
train_iters = 5
lr = 1e-3
[reshard]
num_shards = 2
[evaluate]
task = "WIKITEXT103"
[benchmark]
prompts = ["The"]
"""


def jobs(text: str = TINY, yard: str = "/y") -> PretrainJobs:
    return pretrain_jobs(parse_recipe(text, "recipes/tiny.toml", yard))


def without(table: str) -> str:
    """The tiny recipe without one of its tables."""
    head, _, rest = TINY.partition(f"[{table}]")
    return head + "[" + rest.partition("[")[2] if "[" in rest else head


# --- what follows from a recipe -----------------------------------------------------------------


def test_every_recipe_in_the_repository_is_valid() -> None:
    recipes = sorted((ROOT / "recipes").glob("*.toml"))
    assert recipes
    for path in recipes:
        recipe = read_recipe(str(path))
        family = path.name.partition("_")[0]
        if family in ("bert", "t5"):
            assert masked_jobs(recipe, family).all()
        elif family not in ("detoxify", "finetune", "retro"):  # tests of their own have these
            assert pretrain_jobs(recipe).all()


def test_jobs_come_in_the_order_in_which_they_run() -> None:
    names = [job.name for job in jobs().all()]
    shards = [f"tokenize-train-0000{n}" for n in range(3)]
    before = ["plan", "collect", "train_tokenizer", *shards, "merge", "pretrain"]
    assert names == [*before, "export", "reshard", "evaluate", "benchmark", "report"]


def test_each_output_is_somebodys_input() -> None:
    every = jobs()
    written = {str(job.output.url) for job in every.all() if job.output}
    assert every.merge.document["input"] == ["/y/tiny/tokens/parts"]
    assert every.pretrain.document["data_path"] == [every.merge.output and every.merge.output.url]
    assert every.pretrain.document["tokenizer_model"] in written
    assert every.reshard.document["load_dir"] in written
    assert every.evaluate.document["load"] in written
    assert every.benchmark.document["load"] in written
    for name in ("checkpoint", "tokens", "plan", "export", "evaluation", "benchmark"):
        assert every.report.document[name] in written
    assert len(written) == len(every.all()), "two jobs write to the same place"


def test_the_root_is_yard_and_the_recipes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("YARD", raising=False)
    assert yard_root() == "yard"
    monkeypatch.setenv("YARD", "s3://bucket/yard/")
    assert yard_root() == "s3://bucket/yard"
    recipe = parse_recipe(TINY, "a/b/tiny.toml")
    assert recipe.root == "s3://bucket/yard/tiny"
    assert pretrain_jobs(recipe).merge.document["input"] == ["s3://bucket/yard/tiny/tokens/parts"]
    assert parse_recipe(TINY, "tiny.toml", "given").root == "given/tiny"


def test_the_plan_is_of_the_model_that_is_trained() -> None:
    plan = jobs().plan.document
    assert (plan["hidden_size"], plan["vocab_size"], plan["global_batch_size"]) == (32, 500, 4)
    assert "train_iters" not in plan


def test_a_table_that_needs_nothing_may_be_left_out() -> None:
    assert jobs(without("plan")).plan == jobs().plan
    assert jobs(without("reshard")).reshard.document["save_dir"] == "/y/tiny/resharded"


# --- one's own corpus and tokenizer -------------------------------------------------------------


def own(folder: Path, *names: str, evaluation: str = 'evaluation_data = "held.txt"') -> str:
    for name in names:
        (folder / name).write_text('{"text": "one"}\n')
    return f'corpus = ["{folder}/*.jsonl"]\n{evaluation}\n{without("collect")}'


def test_a_corpus_of_ones_own_is_tokenized_file_by_file(tmp_path: Path) -> None:
    every = jobs(own(tmp_path, "b.jsonl", "a.jsonl"))
    assert every.collect is None
    assert [job.name for job in every.tokenize] == ["tokenize-a", "tokenize-b"]
    assert every.tokenize[0].document["input"] == [f"{tmp_path}/a.jsonl"]
    assert every.evaluate.document["valid_data"] == ["held.txt"]
    assert every.report.document["corpus"] is None


def test_one_more_file_leaves_the_others_parts_alone(tmp_path: Path) -> None:
    before = jobs(own(tmp_path, "b.jsonl", "c.jsonl")).tokenize
    after = jobs(own(tmp_path, "a.jsonl")).tokenize
    assert set(map(str, before)) < set(map(str, after))


def test_files_of_one_name_keep_apart() -> None:
    names = part_names(["x/a.jsonl", "y/a.jsonl", "y/b b.json.gz", "s3://k/.txt"])
    assert len(set(names)) == 4
    assert names[2:] == ["b-b", "part"]
    assert all(name.startswith("a-") for name in names[:2])


@pytest.mark.parametrize(
    "files",
    [
        ["x/EN.jsonl", "x/en.jsonl"],  # names of jobs are in lower case
        ["x/EN.jsonl", "y/en.txt", "y/En.json.gz"],
        ["x/a b.jsonl", "x/a_b.jsonl", "x/A-b.jsonl"],
        ["x/\u00e9.jsonl", "x/\u00e8.jsonl"],
        ["x/a.jsonl", "x/a-shares.jsonl"],
        ["x/A.jsonl", "x/a-Shares.jsonl", "y/a-shares.jsonl"],
    ],
)
def test_no_two_files_share_a_job_or_tokens(tmp_path: Path, files: list[str]) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(json.dumps({"text": file}))
    corpus = json.dumps([str(tmp_path / file) for file in files])
    text = f'corpus = {corpus}\nevaluation_data = "held.txt"\n{without("collect")}'
    made = jobs(text).tokenize
    assert len({str(job.document["output_prefix"]).lower() for job in made}) == len(files)
    assert len({name for job in made for name in names_of(job)}) == 2 * len(files)

    tokenizer = '[tokenize]\ntokenizer_type = "NullTokenizer"\nvocab_size = 300\n'
    grown = parse_recipe(f"corpus = {corpus}\n{tokenizer}", "web.toml", str(tmp_path))
    refreshed = plan_refresh(grown).tokenize
    assert len({name for job in refreshed for name in names_of(job)}) == 2 * len(files)


def names_of(job: StageJob) -> tuple[str, str]:
    """Of a job, and of the one that makes its shares."""
    return job.name, in_shares(job, 2).name


def test_a_name_that_looks_like_one_with_a_digest_stays_unique() -> None:
    files = ["x/a.jsonl", "y/a.jsonl"]
    files.append(f"z/{part_names(files)[0]}.jsonl")
    assert len(set(part_names(files))) == 3


def test_a_missing_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no file matches"):
        jobs(own(tmp_path))


def test_a_corpus_of_ones_own_needs_a_text_to_evaluate_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add evaluation_data"):
        jobs(own(tmp_path, "a.jsonl", evaluation=""))


def test_a_corpus_of_ones_own_and_collect_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no \[collect\]"):
        jobs(own(tmp_path, "a.jsonl") + "[collect]\n")


def test_a_tokenizer_of_ones_own_is_not_trained() -> None:
    kind = 'tokenizer_type = "GPT2BPETokenizer"\nvocab_file = "v.json"\nmerge_file = "m.txt"'
    text = without("train_tokenizer").replace("append_eod = true", f"append_eod = true\n{kind}")
    with pytest.raises(ConfigError, match="vocab_size is needed"):
        jobs(text)
    every = jobs(text.replace("[plan]", "[plan]\nvocab_size = 50257"))
    assert every.train_tokenizer is None
    assert every.tokenize[0].document["vocab_file"] == "v.json"
    assert every.pretrain.document["merge_file"] == "m.txt"
    with pytest.raises(ConfigError, match="there is none to train"):
        jobs(text + "[train_tokenizer]\n")


def test_a_recipe_says_what_a_change_of_code_does_to_a_finished_training() -> None:
    every = jobs(TINY.replace("lr = 1e-3", 'lr = 1e-3\non_code_change = "redo"'))
    assert every.pretrain.document["on_code_change"] == "redo"
    with pytest.raises(ConfigError, match=r"'keep', 'redo'"):
        jobs(TINY.replace("lr = 1e-3", 'lr = 1e-3\non_code_change = "never"'))


# --- a preset -----------------------------------------------------------------------------------


PRESET = 'preset = "models/small.toml"\n'


def shelf(folder: Path, text: str, recipe: str = PRESET + TINY) -> PretrainJobs:
    """The jobs of a recipe whose preset is this text."""
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "small.toml").write_text(text)
    return pretrain_jobs(parse_recipe(recipe, str(folder / "tiny.toml"), "/y"))


def test_a_preset_lies_beside_the_recipe_and_under_what_is_written(tmp_path: Path) -> None:
    every = shelf(tmp_path, "num_layers = 24\nclip_grad = 0.5\n")
    assert every.pretrain.document["clip_grad"] == 0.5
    assert every.pretrain.document["num_layers"] == every.plan.document["num_layers"] == 2
    without_layers = (PRESET + TINY).replace("num_layers = 2\n", "")
    every = shelf(tmp_path, "num_layers = 24\n", without_layers)
    assert every.pretrain.document["num_layers"] == every.plan.document["num_layers"] == 24


def test_a_preset_may_lie_anywhere(tmp_path: Path) -> None:
    (tmp_path / "far.toml").write_text("clip_grad = 0.25\n")
    for where in (tmp_path / "far.toml", f"file://{tmp_path}/far.toml"):
        assert jobs(f'preset = "{where}"\n{TINY}').pretrain.document["clip_grad"] == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_layer = 3", "preset models/small.toml has 'num_layer', which is not an option of pr"),
        ("[pretrain]\nnum_layers = 3", "has 'pretrain', .*without a table above them"),
        ("num_layers = ", "small.toml is not well-formed TOML"),
        ("num_layers = true", r"\[pretrain\]: num_layers must be"),
    ],
)
def test_a_file_that_is_no_preset_is_refused(tmp_path: Path, text: str, message: str) -> None:
    recipe = (PRESET + TINY).replace("num_layers = 2\n", "")
    with pytest.raises(ConfigError, match=message):
        shelf(tmp_path, text, recipe)


def test_a_missing_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiny\.toml: preset models/small\.toml cannot be read"):
        jobs(PRESET + TINY)


def test_a_preset_in_place_of_a_recipe_gives_an_error_with_the_fix() -> None:
    path = str(ROOT / "recipes/models/gpt3-175b.toml")
    with pytest.raises(
        ConfigError, match=r"'num_layers' is an option of pretrain.*preset = .models/gpt"
    ):
        read_recipe(path)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pretain]", r"tiny.toml: unknown table 'pretain'; did you mean 'pretrain'\?"),
        ('corups = "x"', r"unknown key 'corups'; did you mean 'corpus'\?"),
        ("[evaluation]", "unknown table 'evaluation'; did you mean 'evaluate'"),
        ("[weather]", "unknown table 'weather'; known: corpus, evaluation_data"),
        ('corpus = "x.jsonl"', "corpus must be a list, got"),
        ("corpus = [3]", "corpus must be a string, got 3"),
        ("evaluation_data = true", "evaluation_data must be a string"),
        ("pretrain = 3", r"pretrain must be a table, \[pretrain\], got 3"),
        ("[pretrain", "not well-formed TOML"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jobs(text)


@pytest.mark.parametrize(
    ("written", "instead", "message"),
    [
        ("num_layers", "num_layer", r"\[pretrain\]: unknown key 'num_layer'; did you mean 'num_l"),
        ("append_eod", "apend_eod", r"\[tokenize\]: unknown key 'apend_eod'"),
        ("vocab_size = 500", "vocab_size = 5", r"\[train_tokenizer\]: --vocab-size must be at"),
        ("hidden_size = 32", 'hidden_size = "32"', r"\[pretrain\]: hidden_size must be a whole"),
        ("hidden_size = 32", "hidden_size = 31", "--hidden-size .31. must be divisible by"),
        ("num_shards = 2", "num_shards = 0", r"\[reshard\]: --num-shards must be at least 1"),
        ('task = "WIKITEXT103"', "", r"\[evaluate\]: task is required"),
        ('prompts = ["The"]', "", r"\[benchmark\]: .*--prompts"),
    ],
)
def test_every_stage_is_validated_before_any_work(written: str, instead: str, message: str) -> None:
    assert written in TINY
    with pytest.raises(ConfigError, match=message):
        jobs(TINY.replace(written, instead, 1))


def test_places_are_not_for_recipes() -> None:
    with pytest.raises(ConfigError, match=r"\[reshard\]: save_dir is decided by the flow"):
        jobs(TINY.replace("[reshard]", '[reshard]\nsave_dir = "elsewhere"'))


def test_a_missing_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recipe .*none.toml cannot be read"):
        read_recipe(str(tmp_path / "none.toml"))


def test_missing_path_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_recipe("none.toml")
    assert str(caught.value) == (
        f"recipe none.toml cannot be read: there is no such file or object; the path starts at "
        f"{tmp_path}"
    )


# --- one stage ----------------------------------------------------------------------------------


def test_every_stage_of_the_repository_can_be_started() -> None:
    stages = {path.parent.name for path in (ROOT / "stages").glob("*/config.py")}
    assert stages == set(CONFIGS)


def test_a_job_from_a_document(tmp_path: Path) -> None:
    document = tmp_path / "merge.toml"
    document.write_text('input = ["parts"]\noutput_prefix = "all/tokens"\n')
    job = read_job("merge", str(document))
    assert (job.name, job.output and job.output.url) == ("merge", "all/tokens")
    with pytest.raises(ConfigError, match="there is no stage 'merg'; did you mean 'merge'"):
        read_job("merg", str(document))
    document.write_text('inputs = "parts"\n')
    with pytest.raises(ConfigError, match="unknown key 'inputs'; did you mean 'input'"):
        read_job("merge", str(document))


# --- what the yard gives a training ---------------------------------------------------------------


def test_the_plan_is_of_the_gpus_that_the_yard_gives() -> None:
    recipe = parse_recipe(TINY, "recipes/tiny.toml", "/y")
    means = TrainingResources(world_size=2, gpu_memory_gib=80.0)
    planned = pretrain_jobs(recipe, means).plan.document
    assert (planned["world_size"], planned["gpu_memory_gib"]) == (2, 80.0)
    assert "world_size" not in pretrain_jobs(recipe, TrainingResources()).plan.document
    cut = recipe.with_options({"pretrain": {"tensor_model_parallel_size": 2}})
    with pytest.raises(ConfigError, match="3 ranks do not fit the layout"):
        pretrain_jobs(cut, TrainingResources(world_size=3))


def test_the_plan_counts_ranks_that_the_training_starts_itself() -> None:
    recipe = parse_recipe(TINY, "recipes/tiny.toml", "/y")
    two = recipe.with_options({"pretrain": {"nproc_per_node": 2}})
    assert pretrain_jobs(two).plan.document["world_size"] == 2


def test_options_of_a_form_go_over_the_recipe() -> None:
    recipe = parse_recipe(TINY, "recipes/tiny.toml", "/y").with_options({"pretrain": {"lr": 0.5}})
    written = parse_recipe(TINY, "recipes/tiny.toml", "/y").table("pretrain")
    assert recipe.table("pretrain") == {**written, "lr": 0.5}
    with pytest.raises(ConfigError, match="unknown key 'lrr'"):
        pretrain_jobs(recipe.with_options({"pretrain": {"lrr": 1}}))


def test_a_release_of_another_checkpoint_has_its_own_folder() -> None:
    recipe = parse_recipe(TINY, "recipes/tiny.toml", "/y")
    own, other = release_jobs(recipe), release_jobs(recipe, "s3://b/run/step-00000010")
    shared = [job for job in own.all() if job not in (own.parity, own.card)]
    assert shared == [getattr(jobs(), job.name) for job in shared]
    assert own.card.document["parity"] == own.parity.document["output_dir"] == "/y/tiny/parity"
    folder = str(other.reshard.document["save_dir"]).removesuffix("/resharded")
    assert folder.startswith("/y/tiny/releases/run-step-00000010-")
    assert other.evaluate.document["load"] == f"{folder}/resharded"
    assert release_jobs(recipe, "/y/tiny/checkpoint/").all() == own.all()
