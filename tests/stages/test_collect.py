"""The collect stage: the documentation of this Python, the same bytes every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.collect import run as collect_run
from stages.collect.config import CollectConfig, environment_fingerprint
from stages.collect.run import CollectedDocument, all_entries, distinct, distribute, hold_out, take
from tests.stages.directly import run_directly
from trainyard.errors import ConfigError

pytestmark = pytest.mark.slow


def collect(folder: Path, **options: Any) -> dict[str, Any]:
    given = {"output_dir": str(folder), "max_size_mb": 0.6, "num_shards": 3, **options}
    return run_directly(CollectConfig, collect_run.run, **given)


def rows(folder: Path) -> list[dict[str, str]]:
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.open()]
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("corpus")
    return folder, collect(folder)


# --- on this machine --------------------------------------------------------------------------


def test_corpus_has_shards_and_a_held_out_part(corpus: tuple[Path, dict[str, Any]]) -> None:
    folder, metrics = corpus
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["heldout.txt"] + [f"train-0000{i}.jsonl" for i in range(3)]
    documents = rows(folder)
    assert all(list(document) == ["text", "src", "id"] for document in documents)
    assert {document["src"] for document in documents} == {"pydoc", "python"}
    assert len({document["id"] for document in documents}) == len(documents) > 100
    assert metrics["documents"] == len(documents)
    assert metrics["bytes"] == sum(len(document["text"].encode()) for document in documents)
    assert 500_000 < metrics["bytes"] + metrics["heldout_bytes"] < 700_000


def test_no_shard_has_held_out_text(corpus: tuple[Path, dict[str, Any]]) -> None:
    heldout = (corpus[0] / "heldout.txt").read_text()
    assert 0 < len(heldout.encode()) <= collect_run.HELDOUT_BYTES + 1000
    assert not any(document["text"] in heldout for document in rows(corpus[0]))


def test_the_same_environment_gives_the_same_bytes(
    corpus: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    collect(tmp_path)
    for path in corpus[0].iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_the_environment_is_part_of_the_options() -> None:
    assert CollectConfig(output_dir="d").environment == environment_fingerprint()
    assert CollectConfig(output_dir="d", environment="given").environment == "given"


@pytest.mark.slow
def test_packages_are_found_except_trainyard() -> None:
    modules = collect_run.installed_modules()
    packages = {package for package, _ in modules.values()}
    assert "pytest" in packages
    assert "trainyard" not in packages
    assert all(not name.startswith(("/", "..")) for name in modules)


# --- its parts --------------------------------------------------------------------------------

LONG = "word " * 40


def test_order_of_sources_does_not_depend_on_their_folders(tmp_path: Path) -> None:
    def tree(root: Path) -> list[CollectedDocument]:
        (root / "lib/pydoc_data").mkdir(parents=True)
        (root / "lib/pydoc_data/topics.py").write_text(f"topics = {{'t': '{LONG}t'}}")
        (root / "lib/b.py").write_text(f'"""{LONG}b"""')
        modules = {}
        for name in ("pkg/x.py", "pkg/y.py"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(
                f'"""{LONG}{name}"""\ndef f():\n    """{LONG}f"""\ndef f(): """g"""\n'
            )
            modules[name] = ("Pkg", root / name)
        modules["pkg/code.py"] = ("Pkg", root / "code.py")
        (root / "code.py").write_text('"""Few."""\n' + "x = 1\n" * 99)
        return list(all_entries(root / "lib", lambda: modules))

    first = tree(tmp_path / "one")
    assert first == tree(tmp_path / "two" / "deeper")
    ids = [entry.id for entry in first]
    assert ids[:2] == ["pydoc/t", "python/b:"]
    assert set(ids[2:]) == {f"Pkg/pkg.{m}:{n}" for m in "xy" for n in ("", "f", "f#2")}


def entries(count: int) -> list[CollectedDocument]:
    return [CollectedDocument(f"id{i}", "src", f"{i:05d} {LONG}") for i in range(count)]


def test_texts_are_collected_once_and_up_to_a_size() -> None:
    twice = entries(5) + entries(5) + [CollectedDocument("short", "src", "short")]
    assert list(distinct(iter(twice))) == entries(5)
    size = len(entries(1)[0].text)
    assert len(list(take(iter(entries(9)), 3 * size))) == 3
    assert len(list(take(iter(entries(9)), 3 * size + 1))) == 4


def test_a_hundredth_is_held_out_up_to_the_bound() -> None:
    training, heldout = hold_out(entries(5000))
    assert 20 < len(heldout) < 90
    assert sorted(training + heldout, key=lambda e: e.id) == sorted(
        entries(5000), key=lambda e: e.id
    )
    large = [CollectedDocument(f"id{i}", "src", "w" * 10_000) for i in range(5000)]
    assert len(hold_out(large)[1]) == 15


def test_a_document_keeps_its_shard_when_others_are_added() -> None:
    few, many = distribute(entries(50), 4), distribute(entries(100), 4)
    assert all(set(a) <= set(b) for a, b in zip(few, many, strict=True))
    assert all(many)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_size_mb": 0.0}, "--max-size-mb must be positive"),
        ({"num_shards": 0}, "--num-shards must be from 1"),
        ({"environment": "another"}, "--environment is the fingerprint of another Python"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        collect(tmp_path, **options)
