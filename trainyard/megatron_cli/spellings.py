"""What a flag or key of Megatron-LM means to a command: an option of its own, ignored, compared
with a checkpoint, or not supported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from trainyard.config import leaves, other_names
from trainyard.megatron_cli.absent import ABSENT, HARMLESS, LATER_VALUES
from trainyard.megatron_cli.accepted import ACCEPTED
from trainyard.megatron_cli.newer import NEWER_ABSENT, NEWER_ACCEPTED, NEWER_HARMLESS
from trainyard.megatron_cli.options import flag_hint
from trainyard.megatron_cli.other_programs import DEFAULTS, OLDER, OTHER_PROGRAMS
from trainyard.megatron_cli.tool import Tool

RENAMED: dict[str, str] = {
    "learning-rate": "lr",
    "train-steps": "train-iters",
    "warmup-steps": "lr-warmup-iters",
    "gradient-clip-val": "clip-grad",
    "batch-size": "micro-batch-size",
    "encoder-seq-length": "seq-length",
    "encoder-num-layers": "num-layers",
    "model-parallel-size": "tensor-model-parallel-size",
    "override-lr-scheduler": "override-opt-param-scheduler",
    "use-checkpoint-lr-scheduler": "use-checkpoint-opt-param-scheduler",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "microbatch-group-size-per-vp-stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "warmup": "lr-warmup-fraction",
    "vocab": "vocab-file",
    "persistent-save-interval": "save-interval",
    "layernorm-epsilon": "norm-epsilon",
    "layernorm-zero-centered-gamma": "apply-layernorm-1p",
    "min-scale": "min-loss-scale",
    "num-moe-experts": "num-experts",
    "fp8": "fp8-format",
    "use-custom-fsdp": "use-megatron-fsdp",
    "torch-fsdp2-no-reshard-after-forward": "no-torch-fsdp2-reshard-after-forward",
    "muon-no-split-qkv": "no-muon-split-qkv",
    "bert-no-binary-head": "no-bert-binary-head",
    "retro-workdir": "retro-project-dir",
    "retro-neighbors": "retro-num-neighbors",
    "s3-cache-path": "object-storage-cache-path",
    "no-check-for-nan-in-loss": "no-check-for-nan-in-loss-and-grad",
    "no-check-for-nan-in-grad": "no-check-for-nan-in-loss-and-grad",
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
    ("model-type", "hybrid"): "mamba",
    ("loader", "megatron"): "core",
    ("loader", "mcore"): "core",
    ("loader", "llama2"): "llama_mistral",
    ("loader", "llama2_hf"): "llama_mistral",
    ("loader", "llama2_meta"): "llama_mistral",
    ("saver", "mcore"): "core",
    ("task", "NQ"): "nq",
    ("task", "TRIVIAQA"): "triviaqa",
    ("task", "SQUAD"): "squad",
    ("task", "tqa"): "triviaqa",
    ("task", "squad1.1"): "squad",
}
"""Other spellings of values."""


NOT_OPTIONS = (
    *("use-rotary-position-embeddings", "no-position-embedding", "rope-type", "logging-level"),
    *("ckpt-step", "pretrained-checkpoint", "world-size", "init-method", "local-rank"),
    *("retro-add-retriever", "data-folder", "spec", "enable-gpt-oss", "moe-layer-recompute"),
    *("checkpoint-activations", "retro-cyclic-train-iters"),
)
"""Flags that are no options of ours, but say something about them."""

RULES = (
    *NOT_OPTIONS,
    *("mock-data", "no-load-optim", "sequence-parallel", "exit-signal", "optimizer"),
    *("hybrid-layer-pattern", "hybrid-override-pattern"),
    *("moe-router-pre-softmax", "moe-token-dispatcher-type"),
    *("recompute-modules", "retro-project-dir", "retro-workdir"),
)
"""Flags of a training that are more than another spelling; `command` has the rule for each, and for
those of tools."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a flag stands for."""

    kind: Literal["ours", "checked", "accepted", "absent", "rule", "unknown"]
    name: str = ""
    """Our flag, without leading dashes; `no-x` if it turns x off. `checked`: an option of the model
    that the checkpoint must have too."""
    reason: str = ""
    """Why it is ignored, or what to do instead."""


class Answers:
    """The flags of a table that are ignored or refused, under their names and beginnings."""

    def __init__(
        self, accepted: Iterable[tuple[str, str]], absent: Iterable[tuple[str, str]]
    ) -> None:
        self.exact: dict[str, Meaning] = {}
        self._prefixes: dict[str, Meaning] = {}
        self._add(accepted, "accepted")
        self._add(absent, "absent")

    def _add(self, rows: Iterable[tuple[str, str]], kind: Literal["accepted", "absent"]) -> None:
        for reason, names in rows:
            for name in names.split():
                if name.endswith("*"):
                    self._prefixes[name[:-1]] = Meaning(kind, reason=reason)
                else:
                    assert name not in self.exact, f"{name} is in two rows"
                    self.exact[name] = Meaning(kind, reason=reason)

    def meaning(self, name: str) -> Meaning | None:
        """The answer to a flag; None if the table has none."""
        found = self.exact.get(name) or self.exact.get(name.lower())
        if found is not None:
            return found
        prefixes = [prefix for prefix in self._prefixes if name.startswith(prefix)]
        return self._prefixes[max(prefixes, key=len)] if prefixes else None


ANSWERS = Answers((*ACCEPTED, *NEWER_ACCEPTED), (*ABSENT, *NEWER_ABSENT, *OLDER, *OTHER_PROGRAMS))
EXACT = ANSWERS.exact
ALL_HARMLESS = (HARMLESS, NEWER_HARMLESS, DEFAULTS)


class Vocabulary:
    """The options of a command, under all their names."""

    def __init__(self, config_class: type, more: Iterable[str] = ()) -> None:
        """more: flags that the command has in addition to the configuration's."""
        self.others = {flag(other): flag(name) for other, name in other_names(config_class).items()}
        self.switches = {
            flag(name)
            for name, annotation, _ in leaves(config_class)
            if annotation in (bool, bool | None)
        }
        self.names = {flag(name) for name, _, _ in leaves(config_class)} | set(more)
        self._choices = {
            flag(name): _choices(annotation) for name, annotation, _ in leaves(config_class)
        }

    @property
    def rules(self) -> Collection[str]:
        """Flags that are more than another spelling."""
        return RULES

    def meaning(self, name: str) -> Meaning:
        """What a flag stands for. name: without leading dashes, with hyphens."""
        ours = self.ours(name)
        if ours is not None:
            return Meaning("ours", ours)
        renamed = RENAMED.get(name)
        if renamed is not None:
            return self.meaning(renamed)
        if name in NOT_OPTIONS:
            return Meaning("rule")
        return ANSWERS.meaning(name) or Meaning("unknown", reason=self.hint(name))

    def is_harmless(self, name: str, values: Sequence[str]) -> bool:
        """Whether an option that we do not support changes nothing with these values."""
        return any(_is_one_of(values, table.get(name, ())) for table in ALL_HARMLESS)

    def refusal(self, name: str, value: str) -> str | None:
        """Why a value of an option of ours is refused, if the option's own check does not say."""
        return LATER_VALUES.get((name, value))

    def value(self, name: str, text: str) -> str:
        """A value of an option of ours in our spelling."""
        if name in ("loader", "saver"):  # Megatron-LM takes the name of the plug-in's module too
            text = text.removeprefix(f"{name}_")
        return text if text in self._choices.get(name, ()) else VALUES.get((name, text), text)

    def ours(self, name: str) -> str | None:
        """Our flag under one of its names; `no-x` if it turns x off."""
        if name in self.names:
            return name
        if name in self.others:
            return self.others[name]
        for negation in ("no-", "disable-"):
            if name.startswith(negation) and name.removeprefix(negation) in self.switches:
                return "no-" + name.removeprefix(negation)
        return None

    def hint(self, name: str) -> str:
        """The nearest known flags, for an unknown one."""
        return flag_hint(name, sorted(dict.fromkeys(self.known()), key=self._rank))

    def known(self) -> list[str]:
        """All flags that have a meaning by their exact name."""
        return [*self._own(), *RENAMED, *NOT_OPTIONS, *EXACT]

    def _own(self) -> list[str]:
        return [*self.names, *self.others, *("no-" + s for s in self.switches)]

    def _rank(self, name: str) -> tuple[bool, int]:
        return name not in self.names, len(name)


class ToolVocabulary(Vocabulary):
    """The options of a command that trains nothing. Those of a training are known too: they are
    ignored, compared with the checkpoint's, or refused where the result would be another."""

    def __init__(
        self,
        config_class: type,
        more: Iterable[str],
        tool: Tool,
        training: Callable[[], Vocabulary],
        checked: Collection[str],
    ) -> None:
        """training: what flags mean to a training, asked for a flag that is none of this command.
        checked: options of the model that a checkpoint must have with the same values."""
        super().__init__(config_class, more)
        self._tool, self._training = tool, training
        self._checked = checked if tool.checks_model else ()
        self._answers = Answers(tool.accepted, tool.absent)
        self._minds = frozenset(tool.minds.split())

    @property
    def rules(self) -> Collection[str]:
        """Flags that are more than another spelling of an option of this command."""
        return self._tool.rules

    def meaning(self, name: str) -> Meaning:
        """What a flag stands for. name: without leading dashes, with hyphens."""
        ours = self.ours(name)
        if ours is not None:
            return Meaning("ours", ours)
        renamed = self._tool.renamed.get(name) or RENAMED.get(name)
        if renamed is not None:
            return self.meaning(renamed)
        if name in self.rules and name in NOT_OPTIONS:
            return Meaning("rule")
        return self._answers.meaning(name) or self._of_training(name)

    def _of_training(self, name: str) -> Meaning:
        found = self._training().meaning(name)
        if found.kind == "unknown":
            return Meaning("unknown", reason=self.hint(name))
        if found.kind == "absent" and name in self._minds:
            return found
        if found.kind == "ours" and found.name.removeprefix("no-") in self._checked:
            return Meaning("checked", found.name)
        return Meaning("accepted", reason=self._tool.training)

    def is_harmless(self, name: str, values: Sequence[str]) -> bool:
        """Whether an option that we do not support changes nothing with these values."""
        own = self._tool.harmless.get(name, ())
        return _is_one_of(values, own) or super().is_harmless(name, values)

    def refusal(self, name: str, value: str) -> str | None:
        """Why a value of an option of ours is refused, if the option's own check does not say."""
        return self._tool.later.get((name, value)) or super().refusal(name, value)

    def known(self) -> list[str]:
        """The flags that do something here, by their exact name."""
        return [*self._own(), *self._tool.renamed, *self._answers.exact, *self._checked]


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal, of an optional one too."""
    arguments = get_args(annotation)
    return arguments + tuple(choice for one in arguments for choice in get_args(one))


def _is_one_of(values: Sequence[str], known: Collection[str]) -> bool:
    return len(values) == 1 and values[0] in known


@cache
def vocabulary(config_class: type, more: tuple[str, ...] = ()) -> Vocabulary:
    """The Vocabulary of a training's options and additional flags, built once."""
    return Vocabulary(config_class, more)


def flag(name: str) -> str:
    """The flag of a key, without leading dashes."""
    return name.replace("_", "-")
