"""Counts words, merges pairs, and writes the tokenizer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from stages.runtime.context import StageRun
from stages.train_tokenizer.config import SPECIAL_TOKENS, TrainTokenizerConfig
from stages.train_tokenizer.wordpiece import choose_alphabet, count_characters, learn_vocabulary
from trainyard.artifacts import store
from trainyard.artifacts.inputs import check_all_listed
from trainyard.corpus.documents import DocumentReader, check_inputs, split_ranges
from trainyard.errors import DataError
from trainyard.progress import Progress

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH = 512
MIN_FREQUENCY = 2
READ_BYTES = 2**24

SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": SPECIAL_TOKENS[0],
    "eos_token": SPECIAL_TOKENS[0],
    "unk_token": SPECIAL_TOKENS[0],
    "clean_up_tokenization_spaces": False,
}
"""The tokenizer_config.json: how transformers, and our HuggingFaceTokenizer, read the folder."""


def run(config: TrainTokenizerConfig, stage: StageRun) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json, or vocab.txt."""
    files = check_inputs(config.input, stage.inputs["input"].files, config.json_keys)
    sizes = {url: store.info(url).size_bytes for url in files}
    check_all_listed(files)
    learn = _write_bpe if config.algorithm == "bpe" else _write_wordpiece
    reached = learn(config, stage, sizes)
    if reached < config.vocab_size:
        log.warning(
            "the corpus has pairs for only %d tokens, fewer than --vocab-size %d",
            reached,
            config.vocab_size,
        )
    return {"vocab_size": reached, "input_bytes": sum(sizes.values())}


def _write_bpe(config: TrainTokenizerConfig, stage: StageRun, sizes: dict[str, int]) -> int:
    with stage.progress(sum(sizes.values()), "bytes", "read") as progress:
        batches = read_batches(sizes, config, progress)
        tokenizer = stoppable(lambda: train(batches, config.vocab_size))
    stage.write_text("tokenizer.json", tokenizer.to_str(pretty=True))
    stage.write_json("tokenizer_config.json", SETTINGS)
    return tokenizer.get_vocab_size()


def _write_wordpiece(config: TrainTokenizerConfig, stage: StageRun, sizes: dict[str, int]) -> int:
    size = config.vocab_size
    with stage.progress(2 * sum(sizes.values()), "bytes", "read") as progress:
        counts = count_characters(read_batches(sizes, config, progress), config.lower_case)
        alphabet = choose_alphabet(counts, size)
        batches = read_batches(sizes, config, progress)
        tokens = stoppable(
            lambda: learn_vocabulary(batches, size, alphabet, config.lower_case, MIN_FREQUENCY)
        )
    stage.write_text("vocab.txt", "".join(token + "\n" for token in tokens))
    return len(tokens)


def read_batches(
    sizes: dict[str, int], config: TrainTokenizerConfig, progress: Progress
) -> Iterator[list[str]]:
    """The texts of all documents, some hundred at a time."""
    batch: list[str] = []
    found = False
    for url, size in sizes.items():
        for source in split_ranges(url, size, READ_BYTES):
            reader = DocumentReader(source, config.json_keys, max_bytes=config.max_document_bytes)
            for document in reader:
                batch += [text for sentences in document.values for text in sentences]
                if len(batch) >= BATCH:
                    found = True
                    yield batch
                    batch = []
            progress.update(source.size_bytes)
    if batch:
        yield batch
    elif not found:
        raise DataError(f"--input {' '.join(sizes)}: there is no document to learn from")


def train(batches: Iterator[list[str]], vocab_size: int) -> Tokenizer:
    """A byte-level BPE as GPT-2's: the 256 bytes, then the most frequent pairs.

    The same texts give the same tokenizer, in any number of threads."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(batches, trainer)
    return tokenizer


def stoppable(work: Callable[[], T]) -> T:
    """Run `work` in a thread, so that a signal takes effect before the library returns."""
    done: list[T] = []
    failed: list[BaseException] = []

    def target() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=target, name="train-tokenizer", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if failed:
        raise failed[0]
    return done[0]
