"""Compares the given tokenizers with those that a chunk database was made with."""

from __future__ import annotations

from stages.retro_embed.chunk_options import DatabaseChunks
from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.artifacts.inputs import read_digest
from trainyard.errors import ConfigError
from trainyard.retrieval.database_sources import database_manifest
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.wordpiece import parse_vocab


def check_tokenizer(source: DatabaseChunks, given: TokenizerConfig, stage: StageRun) -> None:
    """Refuse another tokenizer than that of the database, which would make other texts."""
    manifest = database_manifest(source.retro_db)
    if manifest is None:
        return
    kind = manifest.config.get("tokenizer_type")
    record, mine = manifest.inputs.get("tokenizer"), stage.inputs.get("tokenizer")
    differs = record is not None and mine is not None and record.digest != mine.digest
    if kind != given.tokenizer_type or differs:
        files = "" if record is None else f" of {', '.join(record.urls)}"
        raise ConfigError(
            f"--tokenizer-type {given.tokenizer_type}: {source.retro_db} was cut with the {kind}"
            f"{files}; give the same, as it turns tokens into text"
        )


def check_vocabulary(source: DatabaseChunks, bert: TokenizerConfig) -> None:
    """Refuse another BERT vocabulary than that of the database, whose counts of BERT tokens decide
    which chunks it has."""
    manifest = database_manifest(source.retro_db)
    record = None if manifest is None else manifest.inputs.get("bert")
    if manifest is None or record is None or bert.vocab_file is None:
        return
    kind = manifest.config.get("retro_bert_tokenizer_type")
    (url,) = record.urls
    if kind == bert.tokenizer_type and _same_tokens(bert.vocab_file, url, record.digest):
        return
    raise ConfigError(
        f"the encoder takes the {bert.tokenizer_type} of {bert.vocab_file}, and {source.retro_db} "
        f"counted BERT tokens with the {kind} of {url}, another vocabulary; give the encoder of "
        "that vocabulary, or build the database with this one"
    )


def _same_tokens(mine: str, theirs: str, their_digest: str) -> bool:
    """Whether two files have the same tokens; `theirs` may be gone, or not be that file any
    more."""
    if read_digest(mine) == their_digest:
        return True
    if not store.exists(theirs) or read_digest(theirs) != their_digest:
        return False
    return _tokens(mine) == _tokens(theirs)


def _tokens(url: str) -> dict[str, int]:
    return parse_vocab(store.read_bytes(url), url)
