"""Splits text into sentences by NLTK's Punkt, as Megatron-LM's --split-sentences.

The model of a language is four text files, `tokenizers/punkt_tab/LANG` in a folder of NLTK_DATA or
in a default folder of NLTK; the pickles of older NLTK are never read. A long text is not cut,
unlike in Megatron-LM, which cuts after every million characters, even within a sentence.

Where sentences end depends on the version of NLTK, so it is pinned and recorded in manifests."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import parent_process
from pathlib import Path
from string import whitespace
from typing import Any, NamedTuple

from trainyard.errors import ArtifactError, ConfigError

log = logging.getLogger(__name__)

NLTK = "3.10.0"
"""The pinned version. It splits as all versions from 3.8 on, and so as Megatron-LM's tool, for
which 3.8.1 is the last complete version. 3.10.1 cannot be imported from an environment below the
working directory. 3.10.2 and later also end sentences at curly quotes and guillemets."""

NO_LANGUAGE = "none"
"""Punkt's rules without the abbreviations, names and collocations of a language: needs no files."""
MODEL = Path("tokenizers", "punkt_tab")
ENDS = ".?!"
FROM_END = re.compile(r"[.?!]\S*")
"""A word from its first character on that may end a sentence."""
WHITE_SPACE = re.compile(r"\s*")


# --- the version ------------------------------------------------------------------------------


def nltk_version() -> str:
    """The installed version of NLTK, without importing it; ConfigError if it is missing."""
    from importlib import metadata

    try:
        return metadata.version("nltk")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            "--split-sentences needs the package nltk, which is not installed; run "
            "`pip install '.[tokenize]'` in the checkout"
        ) from error


def _warn_of_version(found: str) -> None:
    if found != NLTK and parent_process() is None:  # once, not by every worker as well
        log.warning(
            "NLTK %s is installed, but trainyard is pinned to %s. Where sentences end depends on "
            "the version (3.10.2 and later also split at curly quotes, those before 3.8 at other "
            "places), so these token files may differ from those of other machines and of "
            "Megatron-LM. The manifest names the version; `pip install nltk==%s` gives the usual "
            "files",
            found,
            NLTK,
            NLTK,
        )


# --- models -----------------------------------------------------------------------------------


def model_folder(lang: str) -> Path:
    """The folder of the model of a language; ConfigError when it is missing."""
    if not re.fullmatch(r"[\w-]{1,64}", lang):
        raise ConfigError(f"--lang {lang!r} is not the name of a language, such as english")
    places = _places()
    for place in places:
        if (place / MODEL / lang).is_dir():
            return place / MODEL / lang
    others = sorted({model.name for place in places for model in (place / MODEL).glob("[!.]*/")})
    raise ConfigError(
        f"--lang {lang}: no Punkt model {MODEL / lang} in any of "
        f"{', '.join(map(str, places))}. On a machine with a network, "
        "`python -m nltk.downloader -d FOLDER punkt_tab` downloads it; then set NLTK_DATA=FOLDER. "
        f"--lang {NO_LANGUAGE} needs no model, and takes abbreviations for ends of sentences"
        + (f". Available languages: {', '.join(others)}" if others else "")
    )


def model_inputs(lang: str) -> tuple[str, ...]:
    """The folder of the model of a language; nothing for `NO_LANGUAGE`."""
    return () if lang == NO_LANGUAGE else (str(model_folder(lang)),)


def _places() -> list[Path]:
    """NLTK_DATA, then NLTK's default folders. Listed here, since importing NLTK takes a third of a
    second."""
    named = [Path(place) for place in os.environ.get("NLTK_DATA", "").split(os.pathsep) if place]
    own = [Path(sys.prefix, part, "nltk_data") for part in ("", "share", "lib")]
    shared = [Path(f"/usr/{part}/nltk_data") for part in ("share", "local/share", "lib")]
    return [*named, Path.home() / "nltk_data", *own, *shared, Path("/usr/local/lib/nltk_data")]


class _Contexts(dict[str, int]):
    """Ortho contexts. NLTK's own table adds an entry for every word that is looked up, so it would
    fill the memory with the words of the corpus."""

    def __missing__(self, word: str) -> int:
        return 0


def _load(folder: Path | None) -> Any:
    """The parameters of Punkt, as NLTK's `load_punkt_params` returns them; without a folder, those
    of an untrained splitter."""
    from nltk.tokenize.punkt import PunktParameters  # type: ignore[import-untyped]

    parameters = PunktParameters()
    parameters.ortho_context = _Contexts()
    if folder is None:
        return parameters
    parameters.abbrev_types = set(_lines(folder / "abbrev_types.txt"))
    parameters.sent_starters = set(_lines(folder / "sent_starters.txt"))
    parameters.collocations = set(_pairs(folder / "collocations.tab", str))
    parameters.ortho_context = _Contexts(_pairs(folder / "ortho_context.tab", int))
    return parameters


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: a file of the Punkt model cannot be read: {error}") from error
    return lines if lines[-1] else lines[:-1]


def _pairs(path: Path, kind: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_lines(path), 1):
        try:
            first, second = line.split("\t")
            yield first, kind(second)
        except ValueError:
            raise ArtifactError(
                f"{path}: line {number} is not a pair of a Punkt model: {line[:60]!a}"
            ) from None


# --- splitting --------------------------------------------------------------------------------


class _Candidate(NamedTuple):
    """A word that may end a sentence."""

    start: int
    after_space: int | None
    """The place after the last ASCII white space before it; None if that is before the last
    candidate."""
    end: int
    """Where the sentence would end."""
    follower: str
    """The text that follows: a word, or a character such as a closing quote."""


class SentenceSplitter:
    """Splits texts of one language; may be used by several threads at once.

    With `keep_newlines`, the white space after a sentence stays at its end, as in Megatron-LM's
    --keep-newlines; otherwise it is dropped. In both cases NLTK drops white space after closing
    quotes that it moves to the sentence before, and at the end of the text."""

    def __init__(self, lang: str = "english", keep_newlines: bool = False) -> None:
        self.keep_newlines = keep_newlines
        self._punkt = _punkt(None if lang == NO_LANGUAGE else model_folder(lang))
        self._follower = re.compile(rf"{self._punkt._lang_vars._re_non_word_chars}|\S+")

    def split(self, text: str) -> list[str]:
        """The sentences of a text, in order; none for a text of only white space."""
        if not self.keep_newlines:
            sentences: list[str] = self._punkt.tokenize(text)
            return sentences
        slices = self._punkt._realign_boundaries(text, self._slices(text))
        return [text[one] for one in slices]

    def _slices(self, text: str) -> Iterator[slice]:
        """Sentences with the white space after them, before closing quotes are moved."""
        begin = 0
        for start, end, follower in _followed(self._candidates(text)):
            if self._punkt.text_contains_sentbreak(text[start:end] + follower):
                yield slice(begin, end)
                begin = end
        yield slice(begin, len(text.rstrip()))

    def _candidates(self, text: str) -> Iterator[_Candidate]:
        """Every word that may end a sentence. Takes linear time; Megatron-LM's regular expression
        takes time quadratic in the length of a word."""
        read = start = 0
        for rest in FROM_END.finditer(text):
            previous, start = start, rest.start() - _unfinished(text[read : rest.start()])
            read = rest.end()
            end = _end(text, rest.start(), rest.end())
            if follower := self._follower.match(text, end):
                yield _Candidate(start, _after_space(text, previous, start), end, follower[0])


def _followed(candidates: Iterator[_Candidate]) -> Iterator[tuple[int, int, str]]:
    """The queries for Punkt: start of the words, possible end of the sentence, next word.

    As in NLTK, white space that is not ASCII joins words. Joined words make one query, at the last
    of them."""
    begin = stop = 0
    last: tuple[int, str] | None = None
    for one in candidates:
        start = begin if one.after_space is None else one.after_space
        if last is not None and stop <= start:
            yield begin, *last
        begin, stop, last = start, one.start, (one.end, one.follower)
    if last is not None:
        yield begin, *last


def _after_space(text: str, low: int, high: int) -> int | None:
    found = high - 1
    if high == low or text[found] not in whitespace:
        found = max(text.rfind(letter, low, high) for letter in whitespace)
    return found + 1 if found > low else None  # as in NLTK, one at the very front does not count


def _unfinished(text: str) -> int:
    """Length of the unfinished word at the end of a text; 0 if it ends with white space."""
    return len(text.rsplit(maxsplit=1)[-1]) if text and not text[-1].isspace() else 0


def _end(text: str, first: int, stop: int) -> int:
    """Where a sentence may end in a word: after the last of `.?!` that is not followed by white
    space only, or after the white space behind the word.

    first: the place of the first `.?!` in the word. stop: the end of the word."""
    end = WHITE_SPACE.match(text, stop).end()  # type: ignore[union-attr]
    if text[stop - 1] in ENDS and end < len(text):
        return end
    found = max(text.rfind(letter, first, stop - 1) for letter in ENDS)
    return found + 1 if found >= 0 else len(text)


def _punkt(folder: Path | None) -> Any:
    """NLTK's splitter. folder: of the four files of the model; None: without a model."""
    found = nltk_version()
    _warn_of_version(found)
    try:
        from nltk.tokenize.punkt import PunktSentenceTokenizer
    except ImportError as error:
        raise ConfigError(
            f"--split-sentences needs NLTK, but NLTK {found} cannot be imported: {error}; run "
            f"`pip install nltk=={NLTK}`"
        ) from error
    with suppress(ImportError):
        from nltk import redos  # type: ignore[import-untyped]

        # NLTK's default allows five seconds for each regular expression, so a long document on a
        # busy machine would sometimes fail. Punkt's patterns take linear time.
        redos.DEFAULT_TIMEOUT = None
    return PunktSentenceTokenizer(_load(folder))
