"""Versions of a corpus that grows: new files are found by contents, old parts are reused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.recipes.corpus import corpus_jobs
from flows.recipes.corpus_versions import mark_announced, publish, read_pointer
from flows.recipes.recipe import Recipe, parse_recipe
from flows.recipes.refresh import Refresh, plan_refresh
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest
from trainyard.artifacts.manifest import publish as publish_manifest
from trainyard.artifacts.output import Output
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError

TOKENIZE = '[tokenize]\ntokenizer_type = "NullTokenizer"\nvocab_size = 300\n'


def recipe(root: str, more: str = "", tokenize: str = TOKENIZE) -> Recipe:
    text = f'corpus = ["{root}/in/*.jsonl"]\n{more}{tokenize}'
    return parse_recipe(text, "web.toml", f"{root}/yard")


def write(root: str, name: str, text: str) -> None:
    store.write_bytes(f"{root}/in/{name}.jsonl", json.dumps({"text": text}).encode())


def carry_out(written: Recipe, work: Refresh) -> str:
    """What the flow does, without stages: parts with a manifest, and the pointer."""
    for job in work.tokenize:
        output = Output.prefix(job.document["output_prefix"])
        publish_manifest(output.manifest_url, Manifest(stage="tokenize"), None)
    return publish(written, work.version, work.read)


@pytest.fixture(params=["file", pytest.param("s3", marks=[pytest.mark.slow, pytest.mark.s3])])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    return tmp_path.as_uri()


@pytest.fixture
def first(root: str) -> Refresh:
    """Two sources, published."""
    write(root, "a", "1 2 3")
    write(root, "b", "4 5 6")
    work = plan_refresh(recipe(root))
    carry_out(recipe(root), work)
    return work


def tokenized(work: Refresh) -> list[str]:
    return [job.document["input"][0].rpartition("/")[2] for job in work.tokenize]


def test_the_first_version_has_every_source(root: str, first: Refresh) -> None:
    assert first.is_news
    assert tokenized(first) == ["a.jsonl", "b.jsonl"]
    found = read_pointer(f"{root}/yard/web/current.json")
    assert found is not None
    current = found[0]
    assert current == first.version
    assert current.version.startswith("0001-")
    assert (len(current.added), current.removed, current.previous) == (2, (), None)
    beside = store.read_json(f"{root}/yard/web/versions/{current.version}/version.json")
    assert beside["tokens"] == current.tokens


def test_without_new_sources_there_is_nothing_to_do(root: str, first: Refresh) -> None:
    again = plan_refresh(recipe(root))
    assert (again.is_news, again.all(), again.version) == (False, [], first.version)


def test_only_what_is_new_or_changed_is_tokenized(root: str, first: Refresh) -> None:
    write(root, "b", "4 5 6 7")
    write(root, "c", "8")
    work = plan_refresh(recipe(root))
    assert tokenized(work) == ["b.jsonl", "c.jsonl"]
    assert work.version.version.startswith("0002-")
    assert work.version.previous == first.version.version
    assert [url.rpartition("/")[2] for url in work.version.added] == ["b.jsonl", "c.jsonl"]
    (merge,) = work.merge
    parts = [part.rpartition("_text")[0] for part in merge.document["input"]]
    assert parts == [source.part for source in work.version.sources]
    assert merge.document["output_prefix"] != first.version.tokens["text"]


def test_a_removed_source_makes_a_new_version_and_tokenizes_nothing(
    root: str, first: Refresh
) -> None:
    store.delete(f"{root}/in/a.jsonl")
    work = plan_refresh(recipe(root))
    assert work.is_news
    assert (tokenized(work), len(work.merge)) == ([], 1)
    assert [url.rpartition("/")[2] for url in work.version.removed] == ["a.jsonl"]


def test_a_source_that_returns_is_not_tokenized_again(root: str, first: Refresh) -> None:
    text = store.read_bytes(f"{root}/in/a.jsonl")
    store.delete(f"{root}/in/a.jsonl")
    carry_out(recipe(root), plan_refresh(recipe(root)))
    store.write_bytes(f"{root}/in/a.jsonl", text)
    third = plan_refresh(recipe(root))
    assert tokenized(third) == []
    assert third.version.number == 3
    assert third.version.sources == first.version.sources


def test_a_copy_under_another_name_makes_no_new_version(root: str, first: Refresh) -> None:
    store.write_bytes(f"{root}/in/z.jsonl", store.read_bytes(f"{root}/in/a.jsonl"))
    assert not plan_refresh(recipe(root)).is_news


def test_other_options_make_other_parts_and_leave_the_old(root: str, first: Refresh) -> None:
    work = plan_refresh(recipe(root, tokenize=TOKENIZE + "append_eod = true\n"))
    assert tokenized(work) == ["a.jsonl", "b.jsonl"]
    old = {source.part for source in first.version.sources}
    assert not old & {source.part for source in work.version.sources}


def test_a_change_of_speed_options_makes_no_new_version(root: str, first: Refresh) -> None:
    assert not plan_refresh(recipe(root, tokenize=TOKENIZE + "workers = 1\n")).is_news


def test_a_version_copies_nothing_unless_a_pair_is_wanted(root: str, first: Refresh) -> None:
    assert [job.document["virtual"] for job in first.merge] == [True]
    write(root, "c", "7 8 9")
    work = plan_refresh(recipe(root, tokenize=TOKENIZE + "[merge]\nvirtual = false\n"))
    assert [job.document["virtual"] for job in work.merge] == [False]
    assert tokenized(work) == ["c.jsonl"]  # the other parts stay as they are


def test_two_keys_are_two_pairs(root: str) -> None:
    write(root, "a", "1")
    work = plan_refresh(recipe(root, tokenize=TOKENIZE + 'json_keys = ["text", "title"]\n'))
    assert [job.name for job in work.merge] == ["merge-text", "merge-title"]
    assert {prefix.rpartition("/")[2] for prefix in work.version.tokens.values()} == {
        "corpus_text_document",
        "corpus_title_document",
    }


def test_keys_that_differ_in_case_are_two_jobs(root: str) -> None:
    write(root, "a", "1")
    work = plan_refresh(recipe(root, tokenize=TOKENIZE + 'json_keys = ["text", "Text"]\n'))
    assert len({job.name.lower() for job in work.merge}) == 2


def test_one_of_two_concurrent_publications_fails(root: str, first: Refresh) -> None:
    write(root, "c", "8")
    one = plan_refresh(recipe(root))
    write(root, "d", "9")
    other = plan_refresh(recipe(root))
    carry_out(recipe(root), one)
    with pytest.raises(InfrastructureError, match="another run published first"):
        publish(recipe(root), other.version, other.read)


def test_an_event_that_was_not_sent_is_remembered(root: str, first: Refresh) -> None:
    again = plan_refresh(recipe(root))
    assert not again.version.announced
    assert again.read is not None
    mark_announced(recipe(root), again.version, again.read)
    assert plan_refresh(recipe(root)).version.announced
    assert not plan_refresh(recipe(root)).is_news


def test_a_training_takes_the_version_that_the_pointer_leads_to(root: str, first: Refresh) -> None:
    text = f'tokens = "{root}/yard/web/current.json"\nevaluation_data = "held.txt"\n{TOKENIZE}'
    jobs = corpus_jobs(parse_recipe(text, "train.toml", f"{root}/yard"))
    assert jobs.tokens == first.version.tokens["text"]
    assert jobs.all() == []


# --- refusals -----------------------------------------------------------------------------------


def test_a_tokenizer_that_is_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a fixed tokenizer.*\[tokenize\]"):
        plan_refresh(recipe(str(tmp_path), tokenize=""))


def test_a_recipe_without_sources_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs sources"):
        plan_refresh(parse_recipe(TOKENIZE, "web.toml", "yard"))


def test_a_missing_source_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no file matches"):
        plan_refresh(recipe(str(tmp_path)))


@pytest.mark.parametrize("text", ["{", "[]", '{"format_version": 1}'])
def test_a_broken_pointer_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "current.json").write_text(text)
    with pytest.raises(ArtifactError, match="not a pointer"):
        read_pointer(str(tmp_path / "current.json"))


def test_a_newer_pointer_asks_for_an_upgrade(tmp_path: Path) -> None:
    (tmp_path / "current.json").write_text('{"format_version": 99}')
    with pytest.raises(ArtifactError, match="upgrade trainyard"):
        read_pointer(str(tmp_path / "current.json"))


def test_tokens_exclude_a_corpus(tmp_path: Path) -> None:
    text = f'tokens = "x"\nevaluation_data = "h"\ncorpus = ["y"]\n{TOKENIZE}'
    with pytest.raises(ConfigError, match="leave out corpus"):
        corpus_jobs(parse_recipe(text, "train.toml", str(tmp_path)))
    with pytest.raises(ConfigError, match=r"\[tokenize\] must name the tokenizer"):
        corpus_jobs(parse_recipe('tokens = "x"\nevaluation_data = "h"\n', "t.toml", "yard"))
    with pytest.raises(ConfigError, match="add evaluation_data"):
        corpus_jobs(parse_recipe(f'tokens = "x"\n{TOKENIZE}', "t.toml", "yard"))
