"""Translates Megatron-LM's --yaml-cfg files into documents of our options.

Keys are the names of options inside its programs. Most are flags with underscores; some are negated
(`add_bias_linear: False`), others are fields of its model classes (`layernorm_epsilon`). A key of
an unsupported option does no harm if its value is null, False or empty."""

from __future__ import annotations

import re
import shlex
import types
import typing
from collections.abc import Mapping
from typing import Any

from trainyard.config import leaves
from trainyard.errors import ConfigError
from trainyard.megatron_cli.accepted import CLASS_FIELDS
from trainyard.megatron_cli.command_line import NO_EFFECT
from trainyard.megatron_cli.run_rules import WEIGHTS_ALONE, exit_signal_problem
from trainyard.megatron_cli.spellings import Meaning, Vocabulary, flag, vocabulary
from trainyard.megatron_cli.yaml_text import YamlEntry, read_entries

NEGATED = {"add_bias_linear": "disable_bias_linear"}
"""Keys that are the negation of an option of ours."""

ACTIVATIONS = {
    "swiglu": "swiglu",
    "squaredrelu": "squared_relu",
    "quick_gelu": "quick_gelu",
    "quick_geglu": "quick_geglu",
}
"""Values of activation_func, except gelu, and the option that stands for each."""

ALWAYS_SAVED = "SIGTERM, SIGINT and SIGUSR1 always save and stop"

TENSOR = "tensor_model_parallel_size"
RANKS = "nproc_per_node"

Document = dict[str, Any]


def read_yaml_cfg(
    text: str,
    config_class: type,
    environ: Mapping[str, str],
    where: str,
    given: Mapping[str, str] = types.MappingProxyType({}),
    known: Vocabulary | None = None,
) -> tuple[Document, list[str]]:
    """The document of options that the file describes, and lines to log about it.

    given: values of the flags on the command line. where: names the file in messages. known: the
    vocabulary of the command; unset: that of a training with these options. Raises ConfigError,
    with line and section, for a key or value that cannot be translated."""
    reader = _Reader(config_class, known or vocabulary(config_class), where, given, environ)
    return reader.read(read_entries(text, environ, where))


class _Reader:
    def __init__(
        self,
        config_class: type,
        known: Vocabulary,
        where: str,
        given: Mapping[str, str],
        environ: Mapping[str, str],
    ) -> None:
        self.vocabulary = known
        self.annotations = {name: annotation for name, annotation, _ in leaves(config_class)}
        self.where, self.given, self.environ = where, given, environ
        self.document: Document = {}
        self.sources: dict[str, str] = {}
        self.remarks: list[str] = []
        self.ineffective: dict[str, list[str]] = {}

    def read(self, entries: Mapping[str, YamlEntry]) -> tuple[Document, list[str]]:
        """Put every entry into the document; returns it and the lines to log."""
        rest = dict(entries)
        self._activation(rest)
        self._names_of_others(rest)
        if flag(RANKS) in self.vocabulary.names:
            self._world_size(rest)
        for key, entry in rest.items():
            self._entry(key, entry)
        self._sequence_parallel()
        self._mock_data()
        for reason, keys in self.ineffective.items():
            self.remarks.append(f"{self.where}: {', '.join(keys)}: {NO_EFFECT}: {reason}")
        return self.document, self.remarks

    def _entry(self, key: str, entry: YamlEntry) -> None:
        meaning = self._meaning(key)
        if meaning.kind == "unknown":
            raise self._error(entry, f"{key} is not an option: {_as_keys(meaning.reason)}")
        if entry.value is None:
            return
        if key == "exit_signal" and (problem := exit_signal_problem(str(entry.value))) is not None:
            raise self._error(entry, f"{key}: {entry.value}: {problem}")
        if key in ("fp8", "fp8_format") and entry.value is False:
            return
        if key == "fp8_wgrad" and entry.value is False:
            meaning = self.vocabulary.meaning("no-fp8-wgrad")
            raise self._error(entry, f"{key}: False is not supported: {meaning.reason}")
        # Files that people pass on have it, so False is no error.
        if key == "exit_signal_handler" and entry.value is False:
            self.ineffective.setdefault(ALWAYS_SAVED, []).append(key)
        elif meaning.kind == "ours":
            self._set(meaning.name.replace("-", "_"), key, entry)
        elif meaning.kind == "rule":
            if _is_on(entry.value):
                raise self._error(entry, f"{key}: {self._rule(key, entry)}")
        elif meaning.kind == "accepted":
            if _is_on(entry.value):
                self.ineffective.setdefault(meaning.reason, []).append(key)
        elif _is_on(entry.value) and not self.vocabulary.is_harmless(flag(key), [str(entry.value)]):
            raise self._error(entry, f"{key}: {entry.value!r} is not supported: {meaning.reason}")

    def _rule(self, key: str, entry: YamlEntry) -> str:
        value = "" if entry.value is True else f" {entry.value}"
        return f"give it on the command line, --{flag(key)}{value}"

    def _meaning(self, key: str) -> Meaning:
        if key in CLASS_FIELDS.split():
            return Meaning("accepted", reason="it only concerns Megatron-LM's own classes")
        negated = NEGATED.get(key)
        if negated is not None:
            return self.vocabulary.meaning("no-" + flag(negated))
        meaning = self.vocabulary.meaning(flag(key))
        if meaning.kind == "unknown":  # a key may name what a no-x or disable-x flag turns off
            for negation in ("no-", "disable-"):
                found = self.vocabulary.meaning(negation + flag(key))
                if found.kind in ("accepted", "absent"):
                    return Meaning("accepted", reason=found.reason)
        return meaning

    def _set(self, name: str, key: str, entry: YamlEntry) -> None:
        value = entry.value
        if isinstance(value, str):
            if (refusal := self.vocabulary.refusal(flag(name), value)) is not None:
                raise self._error(entry, f"{key}: {value}: {refusal}")
            value = self.vocabulary.value(flag(name), value)
        if name not in self.annotations:  # a no_x name, which turns x off
            name = name.removeprefix("no_")
            value = not self._boolean(key, entry)
        if name in self.document:
            raise self._error(
                entry, f"{key} and {self.sources[name]} set the same option; remove one"
            )
        self.document[name] = self._fitted(value, self.annotations[name], key, entry)
        self.sources[name] = key

    # --- values -----------------------------------------------------------------------------

    def _fitted(self, value: Any, annotation: Any, key: str, entry: YamlEntry) -> Any:
        """A value converted to an option's type. One that does not convert is left as it is: the
        option's own check refuses it."""
        args = typing.get_args(annotation)
        if types.NoneType in args:
            (annotation,) = (a for a in args if a is not types.NoneType)
        if typing.get_origin(annotation) is tuple:
            items = value if isinstance(value, list) else shlex.split(str(value))
            inner = typing.get_args(annotation)[0]
            return [self._fitted(item, inner, key, entry) for item in items]
        if annotation is bool:
            return self._boolean(key, entry) if isinstance(value, str) else value
        if annotation is str and isinstance(value, list):
            return ",".join(map(str, value))
        if annotation is str and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if annotation in (int, float) and isinstance(value, str):
            return _number(value)
        if annotation is int and isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    def _boolean(self, key: str, entry: YamlEntry) -> bool:
        words = {"true": True, "1": True, "false": False, "0": False}
        found = words.get(str(entry.value).lower())
        if found is None:
            raise self._error(entry, f"{key} must be true or false, got {entry.value!r}")
        return found

    # --- keys that are more than another spelling ------------------------------------------------

    def _activation(self, rest: dict[str, YamlEntry]) -> None:
        """Translate activation_func and gated_linear_unit, fields of Megatron-LM's classes."""
        gated, named = rest.pop("gated_linear_unit", None), rest.pop("activation_func", None)
        function = named.value if named is not None else None
        if function is not None and function not in (*ACTIVATIONS, "gelu"):
            raise self._error(
                typing.cast(YamlEntry, named),
                f"activation_func {function!r}: choose one of gelu, {', '.join(ACTIVATIONS)}",
            )
        if gated is not None and gated.value and function not in ("swiglu", "quick_geglu"):
            raise self._error(
                gated,
                "gated_linear_unit: for a gated MLP, give activation_func swiglu or quick_geglu",
            )
        if named is None or function in (None, "gelu"):
            return
        option = ACTIVATIONS[function]
        same = rest.pop(option, None)
        if same is not None and same.value is False:
            raise self._error(
                named, f"activation_func {function} contradicts {option}: False in {same.place}"
            )
        self.document[option], self.sources[option] = True, "activation_func"

    def _names_of_others(self, rest: dict[str, YamlEntry]) -> None:
        fusion = rest.pop("bias_activation_fusion", None)
        if fusion is not None and fusion.value is not None and "bias_gelu_fusion" not in rest:
            rest["bias_gelu_fusion"] = fusion
        rotary = rest.pop("use_rotary_position_embeddings", None)
        if rotary is not None and rotary.value:
            kind = rest.setdefault(
                "position_embedding_type", YamlEntry("rope", rotary.line, rotary.section)
            )
            if kind.value != "rope":
                raise self._error(
                    rotary,
                    "use_rotary_position_embeddings contradicts position_embedding_type in "
                    f"{kind.place}",
                )
        added = rest.pop("add_position_embedding", None)
        if added is not None and added.value is False and "position_embedding_type" not in rest:
            raise self._error(
                added, "add_position_embedding: give position_embedding_type rope, or none"
            )
        finetune, no_optim = rest.get("finetune"), rest.get("no_load_optim")
        if no_optim is not None and finetune is not None and finetune.value is True:
            del rest["no_load_optim"]
            self.ineffective.setdefault(WEIGHTS_ALONE, []).append("no_load_optim")
        offloading = rest.pop("cpu_offloading", None)
        layers = rest.get("cpu_offloading_num_layers")
        if offloading is not None and offloading.value and (layers is None or not layers.value):
            raise self._error(offloading, "cpu_offloading: give cpu_offloading_num_layers too")

    def _world_size(self, rest: dict[str, YamlEntry]) -> None:
        """world_size: how many ranks to start, unless a launcher did; flags override it."""
        entry = rest.pop("world_size", None)
        if entry is None or entry.value is None:
            return
        size = entry.value
        if type(size) is not int or size < 1:
            raise self._error(entry, f"world_size must be a whole number above 0, got {size!r}")
        if "RANK" in self.environ:
            started = self.environ.get("WORLD_SIZE", str(size))
            if started != str(size):
                raise self._error(
                    entry,
                    f"world_size {size}: the launcher started {started} ranks (WORLD_SIZE); leave "
                    "it out",
                )
            return
        if {"world-size", flag(RANKS)} & self.given.keys():
            return
        here = rest.setdefault(RANKS, YamlEntry(size, entry.line, entry.section))
        if here.value != size:
            raise self._error(
                entry,
                f"world_size {size} contradicts {RANKS} {here.value} in {here.place}: this "
                "command starts the ranks of one machine, and torchrun those of several",
            )

    def _sequence_parallel(self) -> None:
        """It is turned off for one tensor-parallel rank, as in Megatron-LM, whose file sets it."""
        size = self.given.get(flag(TENSOR), self.document.get(TENSOR, 1))
        if self.document.get("sequence_parallel") and str(size) == "1":
            del self.document["sequence_parallel"]
            self.remarks.append(f"{self.where}: sequence_parallel: turned off, as {TENSOR} is 1")

    def _mock_data(self) -> None:
        """Made-up data needs no tokenizer, only the size of its vocabulary, as with flags."""
        names = {flag(name) for name in self.document} | self.given.keys()
        if {"mock-data", "vocab-size"} <= names and "tokenizer-type" not in names:
            if self.document.get("mock_data", True) is not True:
                return
            self.document["tokenizer_type"] = "NullTokenizer"
            self.remarks.append(f"{self.where}: tokenizer_type NullTokenizer, as none is given")

    def _error(self, entry: YamlEntry, message: str) -> ConfigError:
        return ConfigError(f"{self.where}, {entry.place}: {message}")


def _as_keys(text: str) -> str:
    """A text with its flags written as keys of a file."""
    return re.sub("--([a-z][a-z0-9-]*)", lambda found: found[1].replace("-", "_"), text)


def _is_on(value: Any) -> bool:
    """Whether a value turns on an option that we ignore or do not support."""
    return value not in (None, False, "", [])


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
