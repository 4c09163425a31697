"""Learns a WordPiece vocabulary, BERT's kind: words, and parts of words that begin with ##."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import BpeTrainer

from stages.train_tokenizer.config import BERT_SPECIAL_TOKENS

CONTINUES = "##"
MAX_CHARACTERS = 1000
"""Characters that get tokens, as in BERT's vocabularies."""
CHARACTER_SHARE = 4
"""At most this part of the vocabulary is characters that begin a word, and as many that do not."""


def count_characters(batches: Iterator[list[str]], lower_case: bool) -> Counter[str]:
    """How often each character occurs in the words of the texts."""
    normalizer, counts = BertNormalizer(lowercase=lower_case), Counter[str]()
    for batch in batches:
        counts.update(normalizer.normalize_str("\n".join(batch)))
    for character in [c for c in counts if c.isspace()]:
        del counts[character]
    return counts


def choose_alphabet(counts: Counter[str], vocab_size: int) -> list[str]:
    """The most frequent characters, in the order of their code points."""
    most = min(MAX_CHARACTERS, (vocab_size - len(BERT_SPECIAL_TOKENS)) // CHARACTER_SHARE)
    by_count = sorted(counts, key=lambda character: (-counts[character], character))
    return sorted(by_count[:most])


def learn_vocabulary(
    batches: Iterable[list[str]],
    vocab_size: int,
    alphabet: list[str],
    lower_case: bool,
    min_frequency: int,
) -> list[str]:
    """The tokens in the order of their ids: special ones, characters, then the most frequent pairs.

    The same texts give the same tokens. The library numbers ## characters in the order in which it
    meets them, which differs between runs, and breaks ties by these numbers. As special tokens
    they are numbered before."""
    inner = [CONTINUES + character for character in alphabet]
    library = Tokenizer(BPE())
    library.normalizer = BertNormalizer(lowercase=lower_case)
    library.pre_tokenizer = BertPreTokenizer()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[*BERT_SPECIAL_TOKENS, *inner],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUES,
        show_progress=False,
    )
    library.train_from_iterator(batches, trainer)
    ids = library.get_vocab()
    first = [*BERT_SPECIAL_TOKENS, *alphabet, *inner]
    known = set(first)
    return [*first, *sorted((token for token in ids if token not in known), key=ids.__getitem__)]
