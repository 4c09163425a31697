"""A corpus of documents that grows: each source is collected once, each version has them all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.recipes.collection import Collection, plan_collection
from flows.recipes.corpus import corpus_files
from flows.recipes.corpus_versions import publish, read_pointer
from flows.recipes.pretrain import pretrain_jobs
from flows.recipes.recipe import Recipe, parse_recipe, read_recipe, stage_of
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest
from trainyard.artifacts.manifest import publish as publish_manifest
from trainyard.artifacts.output import Output
from trainyard.errors import ArtifactError, ConfigError

ROOT = Path(__file__).resolve().parents[3]
TABLES = '[clean]\nrules = ["nfc"]\n[dedup]\n[mix]\n'


def recipe(root: Path, tables: str = TABLES, name: str = "web") -> Recipe:
    text = f'corpus = ["{root}/in/*.jsonl"]\n{tables}'
    return parse_recipe(text, f"{name}.toml", f"{root}/yard")


def write(root: Path, name: str, text: str) -> None:
    (root / "in").mkdir(exist_ok=True)
    (root / "in" / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")


def carry_out(written: Recipe, work: Collection) -> None:
    """What the flow does, without stages: manifests, some documents, and the pointer."""
    for job in work.jobs:
        assert job.output is not None
        if "output_dir" in job.document:
            store.write_bytes(job.output.file_url("documents-00000.jsonl"), b'{"text": "a"}\n')
        publish_manifest(job.output.manifest_url, Manifest(stage=job.stage), None)
    publish(written, work.version, work.read)


def names(work: Collection) -> list[list[str]]:
    return [[job.name for job in step] for step in work.steps]


@pytest.fixture
def first(tmp_path: Path) -> Collection:
    """Two sources, published."""
    write(tmp_path, "a", "1 2 3")
    write(tmp_path, "b", "4 5 6")
    work = plan_collection(recipe(tmp_path))
    carry_out(recipe(tmp_path), work)
    return work


def test_the_stages_are_the_tables_of_the_recipe_in_order(first: Collection) -> None:
    assert names(first) == [["clean-a", "clean-b"], ["dedup"], ["mix"], ["datasheet"]]
    clean, (dedup,), (mix,), (sheet,) = first.steps
    parts = [job.document["output_dir"] for job in clean]
    assert dedup.document["input"] == [f"{part}/documents-*.jsonl" for part in parts]
    assert mix.document["input"] == [f"{dedup.document['output_dir']}/documents-*.jsonl"]
    assert mix.document["sources"] == ["web"]
    made = [job.document["output_dir"] for job in (dedup, mix)]
    assert sheet.document["folders"] == [*parts, *made]
    assert first.version.documents == tuple(sheet.document["documents"])
    assert sheet.output == Output.prefix(first.version.datasheet)


def test_only_a_new_source_is_cleaned_and_the_old_version_stays(
    tmp_path: Path, first: Collection
) -> None:
    again = plan_collection(recipe(tmp_path))
    assert (again.is_news, names(again)) == (False, [["datasheet"]])
    assert again.steps[0][0].document == first.steps[-1][0].document
    write(tmp_path, "c", "7 8 9")
    (tmp_path / "in/copy.jsonl").write_bytes((tmp_path / "in/a.jsonl").read_bytes())
    work = plan_collection(recipe(tmp_path))
    assert names(work) == [["clean-c"], ["dedup"], ["mix"], ["datasheet"]]
    assert len(work.steps[1][0].document["input"]) == 3  # copies count once
    assert (work.version.number, work.version.previous) == (2, first.version.version)
    assert not set(work.version.documents) & set(first.version.documents)


def test_other_options_make_a_new_version_and_those_of_all_reuse_the_parts(
    tmp_path: Path, first: Collection
) -> None:
    seeded = plan_collection(recipe(tmp_path, TABLES + "seed = 7\n"))
    assert names(seeded) == [["dedup"], ["mix"], ["datasheet"]]
    cleaned = plan_collection(recipe(tmp_path, TABLES.replace("nfc", "nfkc")))
    assert names(cleaned)[0] == ["clean-a", "clean-b"]
    shown = plan_collection(recipe(tmp_path, TABLES + '[datasheet]\nlicenses = ["CC0"]\n'))
    assert (shown.is_news, names(shown)) == (False, [["datasheet"]])


def test_another_evaluation_set_of_the_same_name_makes_a_new_version(tmp_path: Path) -> None:
    write(tmp_path, "a", "1 2 3")
    (tmp_path / "held.jsonl").write_text('{"text": "a"}\n')
    tables = f'[decontaminate]\ntasks = ["mine"]\ntask_data = ["{tmp_path}/held.jsonl"]\n'
    carry_out(recipe(tmp_path, tables), plan_collection(recipe(tmp_path, tables)))
    assert not plan_collection(recipe(tmp_path, tables)).is_news
    (tmp_path / "held.jsonl").write_text('{"text": "b"}\n')
    assert plan_collection(recipe(tmp_path, tables)).is_news


def test_a_recipe_that_names_the_pointer_reads_the_newest_documents(
    tmp_path: Path, first: Collection
) -> None:
    pointer = f"{tmp_path}/yard/web/current.json"
    text = f'corpus = ["{pointer}"]\nevaluation_data = "held.txt"\n'
    reads = parse_recipe(text + "[pretrain]\n", "gpt.toml", f"{tmp_path}/yard")
    (folder,) = {one.rpartition("/")[0] for one in corpus_files(reads)}
    assert folder == first.version.documents[0].rpartition("/")[0]
    jobs: Any = pretrain_jobs(replace(reads, tables=whole_training()))
    assert jobs.report.document["datasheets"] == [first.version.datasheet]
    with pytest.raises(ArtifactError, match="run the flow collect-corpus"):
        corpus_files(replace(reads, corpus=(f"{tmp_path}/none/current.json",)))
    with pytest.raises(ConfigError, match="points to documents, not to tokens"):
        pretrain_jobs(replace(reads, corpus=(), tokens=pointer, tables=whole_training()))


def whole_training() -> dict[str, dict[str, Any]]:
    tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": 300}
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 64}
    steps = {"micro_batch_size": 1, "train_iters": 1, "lr": 1e-3}
    task = {"evaluate": {"task": "WIKITEXT103"}, "benchmark": {"prompts": ["a"]}}
    return {"tokenize": tokenizer, "pretrain": {**model, **steps}, **task}


def test_finished_corpora_are_mixed_by_their_pointers(tmp_path: Path, first: Collection) -> None:
    pointer = f"{tmp_path}/yard/web/current.json"
    other = f"{tmp_path}/in/a.jsonl"
    text = f'[mix]\nsources = ["web", "a"]\ninput = ["{pointer}", "{other}"]\nweights = [3, 1]\n'
    written = parse_recipe(text, "both.toml", f"{tmp_path}/yard")
    work = plan_collection(written)
    assert names(work) == [["mix"], ["datasheet"]]
    assert work.steps[0][0].document["input"] == [*first.version.documents, other]
    carry_out(written, work)
    assert not plan_collection(written).is_news
    write(tmp_path, "c", "7 8 9")
    carry_out(recipe(tmp_path), plan_collection(recipe(tmp_path)))
    found = read_pointer(pointer)
    assert found is not None
    assert found[0].number == 2
    store.write_bytes(found[0].documents[0].replace("*", "00000"), b'{"text": "b"}\n')
    assert plan_collection(written).is_news


@pytest.mark.parametrize("name", ["wikipedia", "openwebtext", "corpus_quickstart"])
def test_the_recipes_of_the_repository_are_valid(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = read_recipe(str(ROOT / f"recipes/corpora/{name}.toml"))
    monkeypatch.chdir(tmp_path)
    named = [*written.corpus, *written.table("decontaminate").get("task_data", ())]
    files = (written.table("clean").get(name) for name in ("vocab_file", "merge_file"))
    named += filter(None, files)
    for place in named:
        path = Path(place.replace("*", "x"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    stages = [job.stage for job in plan_collection(written).jobs]
    tables = [name for name in written.tables if name != "datasheet"]
    assert stages == [stage_of(name) for name in (*tables, "datasheet")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('corpus = ["a"]\n', r"has none of \[fetch\], \[collect\], \[clean\]"),
        ("[clean]\n", "collect-corpus needs sources"),
        ('corpus = ["a"]\n[mix]\ninput = ["b"]\n', "mixes finished corpora, and corpus names"),
        ('[dedup]\n[mix]\ninput = ["b"]\n', "have nothing to read"),
        ('corpus = ["a"]\n[dedup]\ninput = ["x"]\n', "input is decided by the flow"),
        (
            'corpus = ["a"]\n[collect]\nsource = "json"\n[clean]\nrules = ["min_chars:limt=9"]\n',
            "min_chars has no 'limt'; did you mean 'limit'",
        ),
        ('corpus = ["a"]\n[fetch]\n[clean]\n', r'only \[collect\] with source = "warc" reads'),
    ],
)
def test_a_recipe_that_cannot_run_is_refused(text: str, message: str, tmp_path: Path) -> None:
    written = parse_recipe(text.replace('"a"', f'"{tmp_path}/in/*"'), "x.toml", str(tmp_path))
    write(tmp_path, "a", "1")
    with pytest.raises(ConfigError, match=message):
        plan_collection(written)


def test_what_several_sources_become_is_one_source_of_the_mixture(tmp_path: Path) -> None:
    write(tmp_path, "a", "1 2 3")
    write(tmp_path, "b", "4 5 6")
    written = recipe(tmp_path, '[clean]\nrules = ["nfc"]\n[mix]\n')
    work = plan_collection(written)
    _, (mix,), _ = work.steps
    assert mix.document["sources"] == ["web", "web"]
    assert mix.document["input"] == [
        f"{one.part}/documents-*.jsonl" for one in work.version.sources
    ]
    unmixed = recipe(tmp_path, '[clean]\nrules = ["nfc"]\n', "plain")
    carry_out(unmixed, plan_collection(unmixed))
    text = f'[mix]\nsources = ["a", "b"]\ninput = ["{tmp_path}/yard/plain/current.json", "x"]\n'
    text += "weights = [1, 2]\n"
    write(tmp_path, "x", "7 8 9")
    both = parse_recipe(text.replace('"x"', f'"{tmp_path}/in/x.jsonl"'), "m.toml", str(tmp_path))
    assert plan_collection(both).steps[0][0].document["sources"] == ["a", "a", "b"]


LISTS = """
[fetch]
url_preset = "openwebtext"
[collect]
source = "warc"
[clean]
rules = ["nfc"]
"""


def test_lists_of_urls_are_fetched_one_after_another_and_each_once(tmp_path: Path) -> None:
    write(tmp_path, "a", "1")
    write(tmp_path, "b", "2")
    written = recipe(tmp_path, LISTS)
    work = plan_collection(written)
    both = [["collect-a", "collect-b"], ["clean-a", "clean-b"], ["datasheet"]]
    assert names(work) == [["fetch-a"], ["fetch-b"], *both]
    (fetch,), _, (collect, _), (clean, _), (sheet,) = work.steps
    part = work.version.sources[0].part.removesuffix("/clean")
    assert (fetch.stage, fetch.document["source"]) == ("collect", "fetch")
    assert fetch.document["input"] == [f"{tmp_path}/in/a.jsonl"]
    assert fetch.document["output_dir"] == f"{part}/fetch"
    assert collect.document["input"] == [f"{part}/fetch/pages-*.warc.gz"]
    assert clean.document["input"] == [f"{part}/collect/documents-*.jsonl"]
    assert [one.rpartition("/")[2] for one in sheet.document["folders"]][::2] == [*written.tables]
    carry_out(written, work)
    write(tmp_path, "c", "3")
    new = [["fetch-c"], ["collect-c"], ["clean-c"], ["datasheet"]]
    assert names(plan_collection(written)) == new
    other = recipe(tmp_path, LISTS.replace("openwebtext", "none"))
    assert names(plan_collection(other))[0] == ["fetch-a"]
