"""Text to sentences, by NLTK's Punkt, as with Megatron's --split-sentences.

The model of a language is four text files, `tokenizers/punkt_tab/LANG` in a folder of NLTK_DATA or
in a default folder of NLTK; the pickles of older NLTK are never read. A text is never cut for its
size: Megatron cuts at every millionth letter, in the middle of a sentence.

Where sentences end depends on the version of NLTK, which is pinned and which manifests name."""

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
"""The pinned version. It cuts as 3.8 and all versions between do, and so as Megatron's tool, which
3.8.1 is the last to serve in full; 3.10.1 cannot be imported from an environment below the working
directory; 3.10.2 and later end sentences at curly quotes and guillemets too."""

MODEL = Path("tokenizers", "punkt_tab")
ENDS = ".?!"
FROM_END = re.compile(r"[.?!]\S*")
"""A word from the first letter on that may end a sentence."""
WHITE_SPACE = re.compile(r"\s*")


# --- the version ------------------------------------------------------------------------------


def nltk_version() -> str:
    """The installed version of NLTK, without importing it; ConfigError when there is none."""
    from importlib import metadata

    try:
        return metadata.version("nltk")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            "--split-sentences needs the package nltk, which is not installed; trainyard's extra "
            "[tokenize] brings it"
        ) from error


def _warn_of_version(found: str) -> None:
    if found != NLTK and parent_process() is None:  # once, not by every worker as well
        log.warning(
            "NLTK %s is installed and trainyard is pinned to %s. Where sentences end depends on "
            "the version (3.10.2 and later cut at curly quotes, those before 3.8 at other "
            "places), so these token files may differ from those of other machines and of "
            "Megatron-LM. The manifest names the version; `pip install nltk==%s` for the usual "
            "bytes",
            found,
            NLTK,
            NLTK,
        )


# --- models -----------------------------------------------------------------------------------


def model_folder(lang: str) -> Path:
    """The folder of the model of a language; ConfigError when it is missing."""
    if not re.fullmatch(r"[\w-]+", lang):
        raise ConfigError(f"--lang {lang!r} is no name of a language, such as english")
    places = _places()
    for place in places:
        if (place / MODEL / lang).is_dir():
            return place / MODEL / lang
    others = sorted({model.name for place in places for model in (place / MODEL).glob("[!.]*/")})
    raise ConfigError(
        f"--lang {lang}: there is no Punkt model {MODEL / lang} in any of "
        f"{', '.join(map(str, places))}. On a machine with a network "
        "`python -m nltk.downloader -d FOLDER punkt_tab` fetches it; then set NLTK_DATA=FOLDER"
        + (f". Available languages: {', '.join(others)}" if others else "")
    )


def _places() -> list[Path]:
    """NLTK_DATA, then NLTK's default folders; written out, since importing NLTK takes a third of a
    second."""
    named = [Path(place) for place in os.environ.get("NLTK_DATA", "").split(os.pathsep) if place]
    own = [Path(sys.prefix, part, "nltk_data") for part in ("", "share", "lib")]
    shared = [Path(f"/usr/{part}/nltk_data") for part in ("share", "local/share", "lib")]
    return [*named, Path.home() / "nltk_data", *own, *shared, Path("/usr/local/lib/nltk_data")]


class _Contexts(dict[str, int]):
    """Ortho contexts. NLTK's own table gains an entry for every word that it is asked about, and
    so would fill the memory with the words of the corpus."""

    def __missing__(self, word: str) -> int:
        return 0


def _load(folder: Path) -> Any:
    """The parameters of Punkt as NLTK's `load_punkt_params` gives them."""
    from nltk.tokenize.punkt import PunktParameters  # type: ignore[import-untyped]

    parameters = PunktParameters()
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
                f"{path}: line {number} is no pair of a Punkt model: {line[:60]!a}"
            ) from None


# --- splitting --------------------------------------------------------------------------------


class _Candidate(NamedTuple):
    """A word that may end a sentence."""

    start: int
    after_space: int | None
    """Behind the last ASCII white space before it; None if that is before the last candidate."""
    end: int
    """Where the sentence would end."""
    follower: str
    """What follows: a closing quote or the like, or a word."""


class SentenceSplitter:
    """Splits texts of one language; may be used by several threads at once.

    With `keep_newlines` the white space behind a sentence stays at its end, as with Megatron's
    --keep-newlines; otherwise white space between sentences is dropped. Either way NLTK drops it
    behind closing quotes that it moves to the sentence before, and at the end of the text."""

    def __init__(self, lang: str = "english", keep_newlines: bool = False) -> None:
        self.folder = model_folder(lang)
        """The folder of the four files of the model."""
        self.keep_newlines = keep_newlines
        self._punkt = _punkt(self.folder)
        self._follower = re.compile(rf"{self._punkt._lang_vars._re_non_word_chars}|\S+")

    def split(self, text: str) -> list[str]:
        """The sentences of a text, in order; none for a text of white space alone."""
        if not self.keep_newlines:
            sentences: list[str] = self._punkt.tokenize(text)
            return sentences
        slices = self._punkt._realign_boundaries(text, self._slices(text))
        return [text[one] for one in slices]

    def _slices(self, text: str) -> Iterator[slice]:
        """Sentences with the white space behind them, before closing quotes are moved."""
        begin = 0
        for start, end, follower in _followed(self._candidates(text)):
            if self._punkt.text_contains_sentbreak(text[start:end] + follower):
                yield slice(begin, end)
                begin = end
        yield slice(begin, len(text.rstrip()))

    def _candidates(self, text: str) -> Iterator[_Candidate]:
        """Every word that may end a sentence. Megatron finds these by a regular expression whose
        time grows with the square of the length of a word; this reads each letter a few times."""
        read = start = 0
        for rest in FROM_END.finditer(text):
            previous, start = start, rest.start() - _unfinished(text[read : rest.start()])
            read = rest.end()
            end = _end(text, rest.start(), rest.end())
            if follower := self._follower.match(text, end):
                yield _Candidate(start, _after_space(text, previous, start), end, follower[0])


def _followed(candidates: Iterator[_Candidate]) -> Iterator[tuple[int, int, str]]:
    """The queries for Punkt: begin of the words, possible end of the sentence, next word.

    As in NLTK, white space that is not ASCII joins words: of joined words only the last is a query,
    together with those before it."""
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
    return found + 1 if found > low else None  # as in NLTK, where one at the very front is none


def _unfinished(text: str) -> int:
    """Length of the word that a text breaks off in."""
    return len(text.rsplit(maxsplit=1)[-1]) if text and not text[-1].isspace() else 0


def _end(text: str, first: int, stop: int) -> int:
    """Where a sentence may end in a word, the white space behind it included: at the last of `.?!`
    that anything but white space follows. `first` is the place of the first of them, `stop` the end
    of the word."""
    end = WHITE_SPACE.match(text, stop).end()  # type: ignore[union-attr]
    if text[stop - 1] in ENDS and end < len(text):
        return end
    found = max(text.rfind(letter, first, stop - 1) for letter in ENDS)
    return found + 1 if found >= 0 else len(text)


def _punkt(folder: Path) -> Any:
    found = nltk_version()
    _warn_of_version(found)
    try:
        from nltk.tokenize.punkt import PunktSentenceTokenizer
    except ImportError as error:
        raise ConfigError(
            f"--split-sentences needs NLTK, and NLTK {found} cannot be imported: {error}; "
            f"`pip install nltk=={NLTK}`"
        ) from error
    with suppress(ImportError):
        from nltk import redos  # type: ignore[import-untyped]

        # By the clock, each look at a text may take five seconds: a long document on a busy
        # machine would fail now and then. Punkt's patterns take time in proportion to the text.
        redos.DEFAULT_TIMEOUT = None
    return PunktSentenceTokenizer(_load(folder))
