"""BertWordPieceLowerCase and BertWordPieceCase: BERT's word pieces from a local vocab.txt.

A text becomes only its pieces, as in Megatron-LM up to 0.16; datasets add [CLS] and [SEP]. With
`--tokenizer-hf-include-special-tokens` every text has them around it, even an empty one. That is
the default of Megatron-LM's main, whose datasets then add them again. [SEP] ends a document. The
cased kind has T5's 100 <extra_id_N> by default, as in Megatron-LM, the other has none;
`--vocab-extra-ids` changes the number."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property

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
from trainyard.tokenizers.base import read_part
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.fast.seams import LETTERS, is_long
from trainyard.tokenizers.hf_tokenizers import EngineTokenizer, add_special_tokens

UNKNOWN, SEPARATOR, PAD, FIRST, MASK = SPECIAL = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
CASED_EXTRA_IDS = 100

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
WORDS = re.compile("[^ \t\n\r]+")
"""BERT separates words at other places too, but never joins what these characters separate."""
MAX_WORDS = 1 << 19
"""Words whose lengths are remembered: some 60 MB."""
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
        self._word_lengths: dict[str, int] = {}
        self._shortens = not any(
            re.fullmatch(f"[{IN_WORDS}]*", token) or len(token) > KEPT_LETTERS for token in contents
        )

    def reference_array(self, text: str) -> NDArray[np.uint32]:
        """The ids of a text by the library.

        A long text is encoded in parts, and a long word without its middle: it is [UNK] either way,
        and the library needs 50 bytes for each byte of a word."""
        if self._shortens and is_long(text):
            text = LONG_ROW.sub(lambda row: row[1] + row[2], text)
        return super().reference_array(text)

    def lengths(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """(n,) number of ids of each text, several times faster than the ids.

        No token spans two words, so the number is a sum over words, and words are remembered."""
        if any(map(is_long, texts)):
            return np.diff(self.encode_flat(texts)[1])
        rows = [WORDS.findall(text) for text in texts]
        known = self._word_lengths
        new = [word for word in {word for row in rows for word in row} if word not in known]
        if len(known) + len(new) > MAX_WORDS:
            known = self._word_lengths = {}  # another thread may still read the one before
            new = list({word for row in rows for word in row})
        known.update(zip(new, map(len, self._encodings(new, False)), strict=True))
        around = len(self._prefix) + len(self._suffix)
        sums = (around + sum(map(known.__getitem__, row)) for row in rows)
        return np.fromiter(sums, np.int64, len(rows))

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
    usual = CASED_EXTRA_IDS if config.tokenizer_type == "BertWordPieceCase" else 0
    return [f"<extra_id_{i}>" for i in range(config.vocab_extra_ids or usual)]


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
