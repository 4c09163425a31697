"""BertWordPieceLowerCase and BertWordPieceCase: BERT's word pieces from a local vocab.txt.

A text becomes only its pieces, as in Megatron-LM up to 0.16; datasets add [CLS] and [SEP]. With
`--tokenizer-hf-include-special-tokens` every text has them around it, even an empty one. That is
the default of Megatron-LM's main, whose datasets then add them again. [SEP] ends a document. The
cased kind has T5's 100 <extra_id_N> by default, as in Megatron-LM's main, the other has none;
`--vocab-extra-ids` changes the number. Megatron-LM's releases have none by default, so
`--vocab-extra-ids 0` gives the cased vocabulary of a model that they trained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import compress

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from trainyard.errors import ArtifactError, ConfigError
from trainyard.tokenizers.base import (
    Flat,
    check_unicode,
    encode_apart,
    flatten,
    read_part,
    replace_rows,
)
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.fast.seams import LETTERS, is_long
from trainyard.tokenizers.fast.words import WordCache, between_blanks
from trainyard.tokenizers.hf_tokenizers import EngineTokenizer, add_special_tokens, surround

UNKNOWN, SEPARATOR, PAD, FIRST, MASK = SPECIAL = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")

MAX_WORD_LETTERS = 100
"""A longer word is [UNK]."""
KEPT_LETTERS = 256
"""Characters kept at both ends of a far longer word; they may be parts of added tokens."""
IN_WORDS = "0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017f\U0001f300-\U0001f64f" + LETTERS.replace(
    "\u4e00-\u9fa5", ""
)
"""Characters that continue a word in any surroundings; cleaning keeps at least one for each.
Ideographs are separate words."""
LONG_LETTERS = 1 << 12
PARTS = re.compile(r"[!-/:-@\[-`{-~]|[^!-/:-@\[-`{-~]+")
"""Each of ASCII's punctuation marks is a word by itself."""
WORDS_AT_ONCE = 1 << 10
LONG_ROW = re.compile(
    rf"(?<![{IN_WORDS}])([{IN_WORDS}]{{{KEPT_LETTERS}}})[{IN_WORDS}]{{{LONG_LETTERS},}}"
    rf"(?<=([{IN_WORDS}]{{{KEPT_LETTERS}}}))"
)


class WordPieceTokenizer(EngineTokenizer):
    """An `EngineTokenizer` with the ids of BERT's special tokens."""

    def __init__(self, config: TokenizerConfig, library: Library, files: dict[str, bytes]) -> None:
        self.cls, self.sep, self.mask, self.pad_id, self.unk = (
            _id_of(library, token) for token in (FIRST, SEPARATOR, MASK, PAD, UNKNOWN)
        )
        self.bos, self.eos = self.cls, self.sep
        """As in Megatron-LM for a vocabulary without these tokens."""
        around = config.tokenizer_hf_include_special_tokens
        super().__init__(config, library, files, eod=self.sep, pad=self.pad_id, around=around)
        contents = [token.content for token in library.get_added_tokens_decoder().values()]
        self._shortens = not any(
            re.fullmatch(f"[{IN_WORDS}]*", token) or len(token) > KEPT_LETTERS for token in contents
        )
        self._words: WordCache | None = None
        if self._seam is not None and all(between_blanks(one) == [one] for one in contents):
            parts = WordCache(_splitter(contents), self._encode_words)
            self._words = WordCache(between_blanks, parts.encode, self._by_library_flat)
            self.releases_gil = False  # what is not in the library takes longer
        self._can_join = not any(one.isascii() and one.isalnum() for one in contents)

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The ids of several texts as arrays. No token spans two words, and words repeat."""
        if self._words is None:
            return super().encode_flat(texts)
        return encode_apart(texts, is_long, self.reference_array, self._encode_by_words)

    def _encode_by_words(self, texts: Sequence[str]) -> Flat:
        assert self._words is not None
        try:
            return surround(self._words.encode(texts), self._prefix, self._suffix)
        except UnicodeEncodeError:
            check_unicode(texts)  # names the place in the text, not in the word
            raise

    def _by_library_flat(self, texts: Sequence[str]) -> Flat:
        return flatten(self._by_library(texts, False))

    def _encode_words(self, words: Sequence[str]) -> Flat:
        """The ids of words. Those of ASCII letters and digits are encoded as one text, which takes
        a third of the time: each begins with the next token that can begin one."""
        is_plain = [self._can_join and word.isascii() and word.isalnum() for word in words]
        plain = list(compress(words, is_plain))
        joined = [
            " ".join(plain[at : at + WORDS_AT_ONCE]) for at in range(0, len(plain), WORDS_AT_ONCE)
        ]
        ids, bounds = self._by_library_flat(joined)
        begins = np.append(np.flatnonzero(self.begins_word[ids]), bounds[-1])
        counts = np.zeros(len(words), np.int64)
        counts[is_plain] = np.diff(begins)
        bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        others = [number for number, plain in enumerate(is_plain) if not plain]
        rows = self._by_library([words[number] for number in others], False)
        return replace_rows((ids, bounds), others, rows)

    def reference_array(self, text: str) -> NDArray[np.uint32]:
        """The ids of a text by the library.

        A long text is encoded in parts, and a long word without its middle: it is [UNK] either way,
        and the library needs 50 bytes for each byte of a word."""
        if self._shortens and is_long(text):
            text = LONG_ROW.sub(lambda row: row[1] + row[2], text)
        return super().reference_array(text)

    def lengths(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """(n,) number of ids of each text, faster than the ids."""
        if self._words is None or any(map(is_long, texts)):
            return np.diff(self.encode_flat(texts)[1])
        return self._words.lengths(texts) + len(self._prefix) + len(self._suffix)

    @property
    def extra_ids(self) -> tuple[int, ...]:
        """Ids of <extra_id_0>, <extra_id_1> and so on: T5's sentinels."""
        return tuple(_id_of(self.library, token) for token in extra_tokens(self.config))

    @cached_property
    def begins_word(self) -> NDArray[np.bool_]:
        """(vocab_size,) whether a token begins a word: "##" continues one."""
        begins = np.ones(self.vocab_size, np.bool_)
        for token, i in self.library.get_vocab(with_added_tokens=True).items():
            begins[i] = not token.startswith("##")
        return begins


def _splitter(added: Sequence[str]) -> Callable[[str], list[str]]:
    """Cuts words at punctuation; one with an added token stays whole."""
    find_added = re.compile("|".join(map(re.escape, added))).search

    def parts_of(word: str) -> list[str]:
        return [word] if find_added(word) else PARTS.findall(word)

    return parts_of


def build_wordpiece(
    config: TokenizerConfig, extra: Sequence[str] | None = None
) -> WordPieceTokenizer:
    """The tokenizer of `--vocab-file`. extra: tokens besides; None: those of the configuration."""
    assert config.vocab_file is not None
    data = read_part("--vocab-file", config.vocab_file, "vocab.txt")
    lower = config.tokenizer_type == "BertWordPieceLowerCase"
    library = wordpiece_library(parse_vocab(data, config.vocab_file), lower=lower)
    add_special_tokens(library, extra_tokens(config) if extra is None else extra)
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": lower,
        "eos_token": SEPARATOR,
        **{f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")},
    }
    files = {
        "vocab.txt": data,
        "tokenizer_config.json": json.dumps(settings, indent=1).encode() + b"\n",
    }
    return WordPieceTokenizer(config, library, files)


def extra_tokens(config: TokenizerConfig) -> list[str]:
    """The sentinel tokens of a configuration."""
    return [f"<extra_id_{i}>" for i in range(config.num_extra_ids)]


def wordpiece_library(vocab: dict[str, int], *, lower: bool) -> Library:
    """BERT's cleaning, word splitting and longest match over a vocabulary."""
    library = Library(
        WordPiece(vocab, unk_token=UNKNOWN, max_input_chars_per_word=MAX_WORD_LETTERS)
    )
    library.normalizer = BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower
    )
    library.pre_tokenizer = BertPreTokenizer()
    library.decoder = WordPieceDecoder(prefix="##", cleanup=True)
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    library.post_processor = TemplateProcessing(  # for programs that load the saved files
        single=f"{FIRST}:0 $A:0 {SEPARATOR}:0",
        pair=f"{FIRST}:0 $A:0 {SEPARATOR}:0 $B:1 {SEPARATOR}:1",
        special_tokens=[(token, vocab[token]) for token in (FIRST, SEPARATOR)],
    )
    return library


def parse_vocab(data: bytes, url: str) -> dict[str, int]:
    """Ids by token, from a file with one token a line. A token that occurs twice has the later
    id."""
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise ArtifactError(
            f"--vocab-file {url}: byte {error.start} is not UTF-8 text; is it the right file?"
        ) from None
    if lines[-1] == "":
        lines.pop()
    vocab = {line.rstrip("\r"): i for i, line in enumerate(lines)}
    missing = [token for token in SPECIAL if token not in vocab]
    if missing:
        raise ConfigError(
            f"--vocab-file {url} has no {', '.join(missing)}, so it is not a vocabulary of BERT"
        )
    return vocab


def _id_of(library: Library, token: str) -> int:
    found: int | None = library.token_to_id(token)
    assert found is not None
    return found
