"""Sentences are those of NLTK's own tokenizer; no text takes more than time in proportion."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.corpus.sentences import SentenceSplitter, model_folder, model_inputs
from trainyard.errors import ArtifactError, ConfigError

pytestmark = pytest.mark.slow

OF_NLTK_3_8_1 = {
    "books_en": ("4d0511f114c3134e572acd764da6cd21", "e64d6d92885429899205074d6d7bede6"),
    "code": ("6f147a69570641ab0fc1bb9feb14693a", "77f42ae8757165eb14889eef9c0dcfbc"),
    "corpus_en": ("e7f06fa53efdf604ede9a099bb1c2af0", "ad000fdbd463f0ab8485e0dc341b3d0e"),
    "multilingual_mix": ("848f2e3acdd271c1c814792218de2f19", "993e6033630f748e249b0474a6a42f93"),
    "wiki_zh": ("449c377014b1c01fe1ab1772d9df16e2", "f2c27722f2e24b0ff58eaf161f18e471"),
}
"""Of every fifth document's sentences, without and with the newlines kept."""
CORPORA = tuple(OF_NLTK_3_8_1)


@pytest.fixture
def nltk_data(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of NLTK's models, named by NLTK_DATA as a user names it."""
    folder = shared / "data" / "nltk_data"
    monkeypatch.setenv("NLTK_DATA", str(folder))
    monkeypatch.setattr("nltk.data.path", [str(folder)])  # read once, when nltk is imported
    return folder


def nltk_punkt(nltk_data: Path, keep_newlines: bool = False) -> Any:
    """NLTK's own tokenizer; with the pattern that Megatron gives it to keep newlines."""
    from nltk.tokenize.punkt import PunktLanguageVars, PunktSentenceTokenizer, PunktTokenizer

    if not keep_newlines:
        return PunktTokenizer("english")

    class Keeping(PunktLanguageVars):
        # Any word material, one of .?!, then the white space, which so belongs to the sentence.
        _period_context_fmt = (
            r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"
        )

    return PunktSentenceTokenizer(PunktTokenizer("english")._params, lang_vars=Keeping())


def corpus(shared: Path, name: str, step: int) -> list[str]:
    lines = (shared / "data" / "corpora" / f"{name}.jsonl").read_bytes().splitlines()
    return [orjson.loads(line)["text"] for line in lines[::step]]


# --- equality with NLTK -----------------------------------------------------------------------


@pytest.mark.parametrize("keep_newlines", [False, True])
@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("step", [401, 5])
def test_sentences_are_those_of_nltk(
    step: int, name: str, keep_newlines: bool, shared: Path, nltk_data: Path
) -> None:
    theirs = nltk_punkt(nltk_data, keep_newlines)
    ours = SentenceSplitter("english", keep_newlines)
    for text in corpus(shared, name, step):
        assert ours.split(text) == theirs.tokenize(text)


@pytest.mark.parametrize("keep_newlines", [False, True])
@pytest.mark.parametrize("name", CORPORA)
def test_digests_of_nltk_381(name: str, keep_newlines: bool, shared: Path, nltk_data: Path) -> None:
    """For any installed version: digests of what NLTK 3.8.1 made, with the pickle that Megatron's
    tool loads and its pattern for --keep-newlines."""
    ours = SentenceSplitter("english", keep_newlines)
    digest = hashlib.md5()
    for text in corpus(shared, name, 5):
        digest.update(json.dumps(ours.split(text)).encode())
    assert digest.hexdigest() == OF_NLTK_3_8_1[name][keep_newlines]


@pytest.mark.parametrize("keep_newlines", [False, True])
def test_any_text_is_split_as_by_nltk(keep_newlines: bool, shared: Path, nltk_data: Path) -> None:
    theirs = nltk_punkt(nltk_data, keep_newlines)
    ours = SentenceSplitter("english", keep_newlines)
    words = [
        *".?!abAM1\"'(),-\u201d\u4e2d",
        "Mr",
        "e.g",
        "The",
        "...",
        " ",
        "  ",
        "\n",
        " \n\t",
        "\u00a0",
    ]

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.sampled_from(words), max_size=14).map("".join))
    def check(text: str) -> None:
        assert ours.split(text) == theirs.tokenize(text)

    check()


def test_a_model_trained_here_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTrainer, save_punkt_params

    text = (
        "Dr. Muster wohnt bzw. arbeitet in Bern. Am 3. Mai kam z.B. Frau Dr. Beispiel. "
        "Sie sah ihn bzw. seinen Hund. Er ging. Der Hund bzw. die Katze blieb. "
    ) * 20
    trainer = PunktTrainer(text)
    trainer.finalize_training()
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])  # where NLTK lets itself write
    folder = tmp_path / "tokenizers" / "punkt_tab" / "german"
    folder.mkdir(parents=True, mode=0o700)
    save_punkt_params(trainer.get_params(), dir=str(folder))
    monkeypatch.setenv("NLTK_DATA", f"/nowhere:{tmp_path}")
    splitter = SentenceSplitter("german")
    assert model_inputs("german") == (str(folder),)
    theirs = PunktSentenceTokenizer(trainer.get_params())
    assert splitter.split(text) == theirs.tokenize(text)
    assert splitter.split("Er kam bzw. ging. Sie blieb.") == ["Er kam bzw. ging.", "Sie blieb."]


@pytest.mark.parametrize("keep_newlines", [False, True])
def test_without_a_language_there_are_only_rules(
    keep_newlines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    monkeypatch.setenv("NLTK_DATA", "/nowhere")
    splitter = SentenceSplitter("none", keep_newlines)
    text = "Dr. Low came. He sat.\nWhy? Nobody asked!"
    reference = PunktSentenceTokenizer().tokenize(text)
    assert [sentence.rstrip() for sentence in splitter.split(text)] == reference
    assert len(reference) == 5
    assert model_inputs("none") == ()


# --- what is kept -----------------------------------------------------------------------------


def test_newlines_are_kept_at_the_end_of_a_sentence(nltk_data: Path) -> None:
    text = "One is here.\n\nTwo is here!  Is three? Four.\n"
    plain = ["One is here.", "Two is here!", "Is three?", "Four."]
    assert SentenceSplitter().split(text) == plain
    kept = SentenceSplitter(keep_newlines=True).split(text)
    assert kept == ["One is here.\n\n", "Two is here!  ", "Is three? ", "Four."]
    assert "".join(kept) == text.rstrip()


def test_a_long_text_is_not_cut_inside_a_sentence(nltk_data: Path) -> None:
    sentence = "This sentence has some words and an end."
    text = " ".join([sentence] * 30_000)  # more than a million letters
    assert set(SentenceSplitter().split(text)) == {sentence}
    assert SentenceSplitter().split("no end " * 300_000) == [("no end " * 300_000).rstrip()]


@pytest.mark.parametrize("keep_newlines", [False, True])
def test_nothing_gives_no_sentence(nltk_data: Path, keep_newlines: bool) -> None:
    splitter = SentenceSplitter(keep_newlines=keep_newlines)
    assert [splitter.split(text) for text in ("", " \n", "a", ".")] == [[], [], ["a"], ["."]]


# --- time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_newlines", [False, True])
@pytest.mark.parametrize("piece", ["a", ".", "!", "a.", "\u4e2d", " ", ".\u00a0", "...x", ".)"])
def test_unbroken_text_takes_linear_time(nltk_data: Path, keep_newlines: bool, piece: str) -> None:
    splitter = SentenceSplitter(keep_newlines=keep_newlines)
    times = []
    for letters in (10_000, 40_000):
        began = time.process_time()
        splitter.split(piece * (letters // len(piece)))
        times.append(time.process_time() - began)
    assert times[1] < 10 * times[0] + 0.2  # the square would be 16 times, and seconds


def test_a_newer_nltk_has_no_timeout(nltk_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3.10.3 on there is a module with a limit of five seconds for each look at a text."""
    import nltk

    redos: Any = ModuleType("nltk.redos")
    redos.DEFAULT_TIMEOUT = 5.0
    monkeypatch.setitem(sys.modules, "nltk.redos", redos)
    monkeypatch.setattr(nltk, "redos", redos, raising=False)
    SentenceSplitter()
    assert redos.DEFAULT_TIMEOUT is None


def test_threads_share_a_splitter(shared: Path, nltk_data: Path) -> None:
    splitter = SentenceSplitter()
    texts = corpus(shared, "books_en", 50)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(splitter.split, texts * 2))
    assert found == [splitter.split(text) for text in texts] * 2


def test_memory_does_not_grow_with_the_words_seen(nltk_data: Path) -> None:
    splitter = SentenceSplitter()
    size = len(splitter._punkt._params.ortho_context)
    splitter.split(" ".join(f"Mr. Name{i} came." for i in range(1000)))
    assert len(splitter._punkt._params.ortho_context) == size


# --- refusals ---------------------------------------------------------------------------------


def test_a_language_that_is_not_there_is_named(nltk_data: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lang klingon: .*DATA.*languages: english") as caught:
        SentenceSplitter("klingon")
    assert str(nltk_data) in str(caught.value)
    for lang in ("", "../english", "a/b", "english\n"):
        with pytest.raises(ConfigError, match="is not the name of a language"):
            model_folder(lang)


def test_pickles_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tokenizers" / "punkt" / "PY3"
    folder.mkdir(parents=True)
    (folder / "xyz.pickle").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="punkt_tab/xyz"):
        SentenceSplitter("xyz")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("ortho_context.tab", b"a\tb\n", "line 1 is not a pair"),
        ("collocations.tab", b"a\tb\nc\n", "line 2 is not a pair"),
        ("abbrev_types.txt", b"\xff", "cannot be read"),
        ("sent_starters.txt", None, "cannot be read"),
    ],
)
def test_a_damaged_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes | None, message: str
) -> None:
    folder = tmp_path / "tokenizers" / "punkt_tab" / "xyz"
    folder.mkdir(parents=True)
    for each in ("abbrev_types.txt", "sent_starters.txt", "collocations.tab", "ortho_context.tab"):
        (folder / each).write_bytes(b"")
    (folder / name).unlink()
    if data is not None:
        (folder / name).write_bytes(data)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    with pytest.raises(ArtifactError, match=rf"{name}: .*{message}"):
        SentenceSplitter("xyz")
