"""What a flag or key of Megatron-LM means here: one of our options, ignored, or not supported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from trainyard.config import leaves, other_names
from trainyard.megatron_cli.absent import ABSENT, HARMLESS
from trainyard.megatron_cli.accepted import ACCEPTED
from trainyard.megatron_cli.options import flag_hint

RENAMED: dict[str, str] = {
    "learning-rate": "lr",
    "train-steps": "train-iters",
    "warmup-steps": "lr-warmup-iters",
    "gradient-clip-val": "clip-grad",
    "batch-size": "micro-batch-size",
    "encoder-seq-length": "seq-length",
    "encoder-num-layers": "num-layers",
    "model-parallel-size": "tensor-model-parallel-size",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "microbatch-group-size-per-vp-stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "warmup": "lr-warmup-fraction",
    "persistent-save-interval": "save-interval",
    "layernorm-epsilon": "norm-epsilon",
    "layernorm-zero-centered-gamma": "apply-layernorm-1p",
    "min-scale": "min-loss-scale",
    "num-moe-experts": "num-experts",
    "fp8": "fp8-format",
    "bert-no-binary-head": "no-bert-binary-head",
    "retro-workdir": "retro-project-dir",
    "barrier-with-L1-time": "barrier-with-level-1-timing",
    "no-log-learnig-rate-to-tensorboard": "no-log-learning-rate-to-tensorboard",
}
"""Older and other spellings, and the flag of ours that each stands for."""

VALUES: dict[tuple[str, str], str] = {
    ("rerun-mode", "report_stats"): "report_determinism_stats",
    ("optimizer", "adamw"): "adam",
    ("model-type", "GPT"): "gpt",
    ("model-type", "BERT"): "bert",
    ("model-type", "T5"): "t5",
}
"""Other spellings of values."""


RULES = (
    *("use-rotary-position-embeddings", "no-position-embedding", "rope-type", "logging-level"),
    *("ckpt-step", "pretrained-checkpoint", "world-size", "init-method", "local-rank", "epochs"),
    "retro-add-retriever",
)
"""Flags that are more than another spelling; `command` has the rule for each."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a flag stands for."""

    kind: Literal["ours", "accepted", "absent", "rule", "unknown"]
    name: str = ""
    """Our flag, without leading dashes; `no-x` if it turns x off."""
    reason: str = ""
    """Why it is ignored, or what to do instead."""


def _tables(rows: Iterable[tuple[str, str]], kind: Literal["accepted", "absent"]) -> None:
    for reason, names in rows:
        for name in names.split():
            if name.endswith("*"):
                _PREFIXES[name[:-1]] = Meaning(kind, reason=reason)
            else:
                assert name not in EXACT, f"{name} is in two rows"
                EXACT[name] = Meaning(kind, reason=reason)


EXACT: dict[str, Meaning] = {}
_PREFIXES: dict[str, Meaning] = {}
_tables(ACCEPTED, "accepted")
_tables(ABSENT, "absent")


class Vocabulary:
    """The options of a command, under all their names."""

    def __init__(self, config_class: type, more: Iterable[str] = ()) -> None:
        """more: flags that the command has in addition to the configuration's."""
        self.others = {flag(other): flag(name) for other, name in other_names(config_class).items()}
        self.switches = {
            flag(name) for name, annotation, _ in leaves(config_class) if annotation is bool
        }
        self.names = {flag(name) for name, _, _ in leaves(config_class)} | set(more)

    def meaning(self, name: str) -> Meaning:
        """What a flag stands for. name: without leading dashes, with hyphens."""
        ours = self._ours(name)
        if ours is not None:
            return Meaning("ours", ours)
        renamed = RENAMED.get(name)
        if renamed is not None:
            return self.meaning(renamed)
        if name in RULES:
            return Meaning("rule")
        found = EXACT.get(name) or EXACT.get(name.lower())
        if found is not None:
            return found
        prefixes = [prefix for prefix in _PREFIXES if name.startswith(prefix)]
        if prefixes:
            return _PREFIXES[max(prefixes, key=len)]
        return Meaning("unknown", reason=self._nearest(name))

    def _ours(self, name: str) -> str | None:
        if name in self.names:
            return name
        if name in self.others:
            return self.others[name]
        for negation in ("no-", "disable-"):
            if name.startswith(negation) and name.removeprefix(negation) in self.switches:
                return "no-" + name.removeprefix(negation)
        return None

    def _nearest(self, name: str) -> str:
        known = [
            *self.names,
            *self.others,
            *("no-" + s for s in self.switches),
            *RENAMED,
            *RULES,
            *EXACT,
        ]
        return flag_hint(name, sorted(known, key=self._rank))

    def _rank(self, name: str) -> tuple[bool, int]:
        return name not in self.names, len(name)


@cache
def vocabulary(config_class: type, more: tuple[str, ...] = ()) -> Vocabulary:
    """The Vocabulary of a configuration class and additional flags, built once."""
    return Vocabulary(config_class, more)


def flag(name: str) -> str:
    """The flag of a key, without leading dashes."""
    return name.replace("_", "-")


def is_harmless(name: str, values: Sequence[str]) -> bool:
    """Whether an option that we do not support changes nothing with these values."""
    return len(values) == 1 and values[0] in HARMLESS.get(name, ())
