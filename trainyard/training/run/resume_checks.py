"""What may be continued: refusals for a checkpoint that does not fit this run, before any step."""

from __future__ import annotations

import logging

import torch

from trainyard.artifacts.digest import digest_bytes
from trainyard.checkpoint.load import Checkpoint
from trainyard.errors import ArtifactError, ConfigError
from trainyard.parallel.config import TP
from trainyard.tokenizers.base import Tokenizer
from trainyard.training.loop.length import RunLength
from trainyard.training.loop.state import TrainState
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.run.repadding import Repadding
from trainyard.training.run.run_steps import FoundSteps

log = logging.getLogger(__name__)


def refuse_lost_steps(config: PretrainConfig, found: FoundSteps) -> None:
    """Where a run has no step to go on from: it does not begin anew in silence if it had some.

    `--load` that names `--save` asks to go on. What lies there may be of other options, or nothing:
    the first start of a command that is always the same."""
    if found.damaged:
        raise ArtifactError(
            f"{config.save}: no step of this run is whole ({len(found.damaged)} are damaged, as "
            "told above), so it cannot go on. To begin at step 0 move them away, or give another "
            "--save; nothing was changed"
        )
    if config.load is None or config.foreign_load() is not None:
        return
    if found.foreign:
        raise ConfigError(
            f"--load {config.load}: the steps there are of other options or data, so this is "
            f"another run: give it a --save of its own, as in --load {config.load} --save "
            f"{config.save.rstrip('/')}-2 (or leave --load out to start at step 0 here)"
        )
    if config.finetune or config.exit_on_missing_checkpoint:
        asks = "--finetune" if config.finetune else "--exit-on-missing-checkpoint"
        raise ConfigError(
            f"--load {config.load} holds no checkpoint, and {asks} asks for one; --load and --save "
            "are the same folder: give --load the checkpoint to begin with"
        )
    log.warning("--load %s holds no checkpoint yet: beginning from initial weights", config.load)


def check_tokenizer(checkpoint: Checkpoint, tokenizer: Tokenizer, finetune: bool) -> None:
    """Weights learnt with other tokens are noise to these; only fine-tuning may mean it."""
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
            f"--load {checkpoint.url} carries no tokenizer, so nobody can tell whether it is this "
            "one: convert it again with stages.reshard and the --tokenizer-type and files that it "
            "was trained with, or give --finetune"
        )
    if differ and has_none:
        log.warning(
            "%s carries no tokenizer, so nobody can tell whether its weights were learnt with "
            "these tokens",
            checkpoint.url,
        )
    elif differ and finetune:
        log.warning("the tokenizer is not that of the checkpoint: %s differ", ", ".join(differ))
    elif differ:
        raise ConfigError(
            f"--load {checkpoint.url} was trained with another tokenizer ({', '.join(differ)} "
            "differ); give its own, which it carries in tokenizer/, or --finetune"
        )


def repadding_of(
    checkpoint: Checkpoint, config: PretrainConfig, vocab_size: int, padded: int, dtype: torch.dtype
) -> Repadding | None:
    """How to fit the rows of embedding and output layer, where the checkpoint pads its tokens to
    another number of them than this run does; None where they are as many.

    Refuses rows that stand for another number of tokens. dtype: of the run's weights."""
    theirs, tokens = checkpoint.config["padded_vocab_size"], checkpoint.config["vocab_size"]
    if theirs == padded:
        return None
    if tokens == vocab_size:
        return Repadding(theirs, padded, config.model, config.training.seed, dtype)
    tp, unit = config.parallel.tensor_model_parallel_size, config.model.make_vocab_size_divisible_by
    ways = ["the tokenizer that it was trained with"]
    if theirs % tp == 0 and theirs >= vocab_size:
        ways.append(f"--make-vocab-size-divisible-by {theirs // tp} in a run of its own")
    raise ConfigError(
        f"{checkpoint.url} has a vocabulary of {theirs} rows ({tokens} tokens, padded), and this "
        f"run one of {padded} ({vocab_size} tokens, padded to a multiple of "
        f"--make-vocab-size-divisible-by ({unit}) x {TP} ({tp})); go on with {', or '.join(ways)}"
    )


def say_repadding(repadding: Repadding) -> None:
    """One line."""
    theirs, ours = repadding.theirs, repadding.ours
    what = (
        f"rows from {theirs} on are drawn as initial weights are, their moments are zero"
        if ours > theirs
        else f"its rows from {ours} on are left out"
    )
    log.info(
        "the vocabulary has %d rows of the checkpoint's %d, as it is padded otherwise: %s",
        *(ours, theirs, what),
    )


def check_samples_left(
    config: PretrainConfig, state: TrainState, length: RunLength, num_samples: int
) -> None:
    """The samples of the steps that are left must be there; a cyclic order never ends."""
    needed = samples_at_end(state, length)
    if config.data.dataloader_type == "single" and needed > num_samples:
        raise ConfigError(
            f"--load is at {state.consumed_train_samples} samples, and the "
            f"{length.steps - state.step} steps that are left end at {needed}, but the data of "
            f"this run holds {num_samples}: keep the batch size, raise --train-iters (or "
            "--train-samples), or begin the data anew with --finetune"
        )


def samples_at_end(state: TrainState, length: RunLength) -> int:
    """Samples that are consumed when the steps that are left have been taken."""
    consumed = state.consumed_train_samples
    if length.schedule.is_constant:
        return consumed + (length.steps - state.step) * length.global_batch_size
    for _ in range(state.step, length.steps):
        consumed += length.schedule.at(consumed).global_batch_size
    return consumed
