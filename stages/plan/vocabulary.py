"""The number of tokens of a tokenizer, counted in its files without its library.

Known are files that list every token: vocab.json and merges.txt of GPT-2, vocab.txt of BERT, and
tokenizer.json of Hugging Face. For others the number is given."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from stages.plan.config import GPT2_TOKENS, PlanConfig
from trainyard import json_text
from trainyard.artifacts.documents import read_text
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError, ConfigError
from trainyard.tokenizers.config import TokenizerConfig

log = logging.getLogger(__name__)


def with_vocabulary(config: PlanConfig) -> PlanConfig:
    """The plan with the number of tokens of its tokenizer; without one, GPT-2's, which is logged.

    Raises ConfigError for a tokenizer whose files do not list its tokens."""
    if config.vocab_size is not None or config.padded_vocab_size is not None:
        return config
    tokenizer = config.tokenizer()
    if tokenizer is None:
        log.info(
            "neither --vocab-size nor a tokenizer is given: counting GPT-2's %d tokens", GPT2_TOKENS
        )
        return config
    count = count_tokens(tokenizer)
    log.info("%s has %d tokens", tokenizer.tokenizer_type, count)
    return dataclasses.replace(config, vocab_size=count)


def count_tokens(tokenizer: TokenizerConfig) -> int:
    """The number of ids, as the tokenizer itself has it."""
    kind = tokenizer.tokenizer_type
    if kind == "GPT2BPETokenizer" and tokenizer.vocab_file:
        return _last(_read_json(tokenizer.vocab_file), tokenizer.vocab_file)
    if kind.startswith("BertWordPiece") and tokenizer.vocab_file:
        pieces = read_text(tokenizer.vocab_file).split("\n")
        return len(pieces) - (pieces[-1] == "") + tokenizer.num_extra_ids
    if kind == "HuggingFaceTokenizer" and tokenizer.tokenizer_model:
        return _count_huggingface(tokenizer.tokenizer_model)
    raise ConfigError(
        f"--tokenizer-type {kind}: only its library can count the tokens in its files; give "
        "--vocab-size"
    )


def _count_huggingface(url: str) -> int:
    file = url if url.endswith(".json") else join(url, "tokenizer.json")
    document = _read_json(file)
    vocabulary = document.get("model", {}).get("vocab")
    if isinstance(vocabulary, list):  # of a unigram model: pairs of a piece and its score
        ids: dict[str, Any] = {str(number): number for number in range(len(vocabulary))}
    else:
        ids = dict(vocabulary or {})
    for token in document.get("added_tokens", []):
        ids[f"added {token['id']}"] = token["id"]
    return _last(ids, file)


def _read_json(url: str) -> dict[str, Any]:
    try:
        document = json_text.loads(read_text(url))
    except ValueError as error:
        raise ArtifactError(f"{url}: not a JSON document: {error}") from error
    if not isinstance(document, dict):
        raise ArtifactError(f"{url}: not a JSON object")
    return document


def _last(ids: dict[str, Any], url: str) -> int:
    """One more than the highest id."""
    numbers = [number for number in ids.values() if type(number) is int]
    if not numbers or len(numbers) < len(ids):
        raise ArtifactError(f"{url}: does not list tokens with their ids")
    return max(numbers) + 1
