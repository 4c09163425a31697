"""Checks that a checkpoint fits this run, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from trainyard.artifacts.digest import digest_bytes
from trainyard.checkpoint.load import Restorable
from trainyard.errors import ArtifactError, ConfigError
from trainyard.parallel.config import TP
from trainyard.retrieval.options import RetrievalConfig
from trainyard.tokenizers.base import Tokenizer
from trainyard.training.loop.length import RunLength
from trainyard.training.loop.state import TrainState
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.run.repadding import Repadding
from trainyard.training.run.run_steps import FoundSteps

log = logging.getLogger(__name__)

DATABASE = "retro_db"
"""Name of the chunk database among the inputs of a run."""


def refuse_lost_steps(config: PretrainConfig, found: FoundSteps) -> None:
    """Refuse to start over silently where a run has lost its steps.

    `--load` equal to `--save` asks to resume. The folder may still be empty at the first start of a
    command, or hold steps of other options."""
    if found.damaged:
        raise ArtifactError(
            f"{config.run_folder}: no step of this run is whole ({len(found.damaged)} are damaged, "
            "see above), so it cannot resume. To start over at step 0, move them away or give "
            "another --save; nothing was changed"
        )
    if config.load is None or config.foreign_load() is not None:
        return
    if found.foreign:
        raise ConfigError(
            f"--load {config.load} means to resume from the steps there, and --new-run (or "
            "--force) "
            f"to start at step 0: leave one of them out, or give another --save, as in --load "
            f"{config.load} --save {config.run_folder.rstrip('/')}-2"
        )
    if config.finetune or config.exit_on_missing_checkpoint:
        asks = "--finetune" if config.finetune else "--exit-on-missing-checkpoint"
        raise ConfigError(
            f"--load {config.load} holds no checkpoint, and {asks} needs one; --load and --save "
            "are the same folder: give --load the checkpoint to start from"
        )
    log.warning("--load %s holds no checkpoint yet: starting from initial weights", config.load)


def check_tokenizer(checkpoint: Restorable, tokenizer: Tokenizer, finetune: bool) -> None:
    """Refuse a checkpoint of another tokenizer, unless the run is a fine-tuning."""
    carried = {name: digest_bytes(data) for name, data in tokenizer.files().items()}
    differ = [
        name
        for name, digest in sorted(carried.items())
        if (record := checkpoint.manifest.record(f"tokenizer/{name}")) is None
        or record.digest != digest
    ]
    has_none = not any(one.path.startswith("tokenizer/") for one in checkpoint.manifest.files)
    if differ and has_none and not finetune:
        raise ConfigError(
            f"--load {checkpoint.url} has no tokenizer, so trainyard cannot check that it is this "
            "one: convert it again with stages.reshard and the --tokenizer-type and files that it "
            "was trained with, or give --finetune"
        )
    if differ and has_none:
        log.warning(
            "%s has no tokenizer, so trainyard cannot check that its weights were trained with "
            "these tokens",
            checkpoint.url,
        )
    elif differ and finetune:
        log.warning("the tokenizer differs from the checkpoint's: %s", ", ".join(differ))
    elif differ:
        raise ConfigError(
            f"--load {checkpoint.url} was trained with another tokenizer ({', '.join(differ)} "
            "differ); give the one in its tokenizer/, or --finetune"
        )


def check_database(
    checkpoint: Restorable, retrieval: RetrievalConfig, input_digests: Mapping[str, str]
) -> None:
    """Refuse a checkpoint that was trained with another chunk database, unless its digest is named.
    A GPT was trained with none."""
    theirs: str | None = checkpoint.config["inputs"].get(DATABASE)
    ours, named = input_digests.get(DATABASE), retrieval.retro_loaded_database
    if theirs is None or ours is None or theirs == ours:
        return
    if named is None or not theirs.startswith(named):
        raise ConfigError(
            f"--load {checkpoint.url} was trained with the chunk database {theirs[:12]}, and "
            f"--retro-db {retrieval.retro_db} is {ours[:12]}; give the database that it was "
            f"trained with, or --retro-loaded-database {theirs[:12]} to continue with this one"
        )
    log.warning("the checkpoint was trained with the chunk database %s, not %s", theirs, ours)


def repadding_of(
    checkpoint: Restorable, config: PretrainConfig, vocab_size: int, padded: int, dtype: torch.dtype
) -> Repadding | None:
    """How to fit embedding and output layer if the checkpoint pads the vocabulary to another number
    of rows; None if the numbers are equal.

    Refuses a checkpoint with another number of tokens. dtype: of the run's weights."""
    theirs, tokens = checkpoint.config["padded_vocab_size"], checkpoint.config["vocab_size"]
    if theirs == padded:
        return None
    if tokens == vocab_size:
        return Repadding(theirs, padded, config.model, config.training.seed, dtype)
    tp, unit = config.parallel.tensor_model_parallel_size, config.model.make_vocab_size_divisible_by
    ways = ["the tokenizer that it was trained with"]
    extra = config.tokenizer.num_extra_ids
    without = vocab_size - extra
    if extra and (tokens == without or theirs == config.model.padded_vocab_size(without, tp)):
        ways.insert(0, f"--vocab-extra-ids 0, as this tokenizer has {extra} extra ids")
    if theirs % tp == 0 and theirs >= vocab_size:
        ways.append(f"--make-vocab-size-divisible-by {theirs // tp} in another run")
    raise ConfigError(
        f"{checkpoint.url} has a vocabulary of {theirs} rows ({tokens} tokens, padded), and this "
        f"run one of {padded} ({vocab_size} tokens, padded to a multiple of "
        f"--make-vocab-size-divisible-by ({unit}) x {TP} ({tp})); use {', or '.join(ways)}"
    )


def log_repadding(repadding: Repadding) -> None:
    """Log it in one line."""
    theirs, ours = repadding.theirs, repadding.ours
    what = (
        f"rows from {theirs} on get initial weights and zero moments"
        if ours > theirs
        else f"rows from {ours} on are dropped"
    )
    log.info(
        "padded vocabulary: %d rows, %d in the checkpoint; %s",
        *(ours, theirs, what),
    )


def check_samples_left(
    config: PretrainConfig, state: TrainState, length: RunLength, num_samples: int
) -> None:
    """Refuse a run with too few samples for its remaining steps; a cyclic order never ends."""
    needed = samples_at_end(state, length)
    if config.data.dataloader_type == "single" and needed > num_samples:
        raise ConfigError(
            f"--load is at {state.consumed_train_samples} samples, and the remaining "
            f"{length.steps - state.step} steps end at {needed}, but the data of this run has "
            f"{num_samples}: keep the batch size, raise --train-iters (or --train-samples), or "
            "restart the data with --finetune"
        )


def samples_at_end(state: TrainState, length: RunLength) -> int:
    """Samples consumed after the remaining steps."""
    consumed = state.consumed_train_samples
    if length.batch_size_schedule.is_constant:
        return consumed + (length.steps - state.step) * length.global_batch_size
    for _ in range(state.step, length.steps):
        consumed += length.batch_size_schedule.at(consumed).global_batch_size
    return consumed
