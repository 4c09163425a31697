"""What options of Megatron-LM's programs mean to a command that trains nothing.

Names are flags without leading dashes; `x-*` is every flag that begins with `x-`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Rows = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A command that trains nothing."""

    training: str
    """Why an option of a training is ignored."""
    minds: str = ""
    """Unsupported options of a training that would change what the command does: refused."""
    rules: tuple[str, ...] = ("logging-level",)
    """Flags that are more than another spelling here too."""
    accepted: Rows = ()
    """Its own flags that are ignored, by the reason."""
    absent: Rows = ()
    """Its own flags that are refused, by what to do instead."""
    harmless: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values with which a flag in `absent` changes nothing."""
    later: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Values of its own flags that are refused, by flag and value."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of its own flags."""
    checks_model: bool = False
    """Whether options of the model are compared with those of its checkpoint."""


NO_FILE = (
    "this command reads no such file; give its options as flags, or in a document with --config",
    "yaml-cfg",
)

CHECKPOINT_ARGS = (
    "the checkpoint always brings the model's options",
    "use-checkpoint-args enable-gpt-oss model-provider",
)

OWN_TOKENIZER = (
    "the checkpoint brings its tokenizer",
    """
    tokenizer-type tokenizer-model vocab-file merge-file vocab-size vocab-extra-ids
    tiktoken-pattern tiktoken-num-special-tokens tiktoken-special-tokens
    """,
)

NOT_SPREAD = (
    "ranks share the layers and what is in them (--tensor-model-parallel-size, "
    "--pipeline-model-parallel-size), not the sequences or the experts",
    "context-parallel-size expert-model-parallel-size expert-tensor-parallel-size",
)

OF_FP8 = (
    "fp8-format fp8-recipe fp8-margin fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather"
)

OF_LOADED: Rows = (
    OWN_TOKENIZER,
    NOT_SPREAD,
    ("only stages.serve and stages.benchmark --inference-weight-dtype fp8 compute in FP8", OF_FP8),
)
"""Flags without effect on commands that generate text."""

OF_A_CHECKPOINT = (
    "logging-level",
    "use-rotary-position-embeddings",
    "ckpt-step",
    "moe-router-pre-softmax",
)
"""Flags that are more than another spelling to commands that read a checkpoint of a run."""
