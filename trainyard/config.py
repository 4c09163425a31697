"""Configurations: frozen dataclasses to and from flat documents.

A document is a flat table whose keys are the flag names with underscores, regardless of the nesting
of the dataclasses behind it: `num_layers` reaches `PretrainConfig.model.num_layers`. Unknown keys
(with a suggestion) and wrong types are errors. Knows nothing of command lines or storage."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from trainyard.errors import ConfigError
from trainyard.shown_values import shown
from trainyard.stored_values import to_stored

C = TypeVar("C")

# Upper bounds by kind of option, as a greater number is a typing error: better a message than an
# array that no machine holds.
MAX_NUMBER = 2**63 - 1  # any whole number, of either sign: what arrays and files hold
MAX_SIZE = 2**31 - 1  # widths, heads, lengths, batches, vocabularies: token files have 32 bits
MAX_STEPS = 10**8  # steps of a run
MAX_SAMPLES = 10**12  # samples of a run: the largest models saw 10**10 of 4096 tokens
MAX_RANKS = 2**20  # ranks of a training, files of a checkpoint, shares of a stage
MAX_PROCESSES = 1024  # processes or threads on one machine

ROLE = "trainyard.role"
COURSE = "course"
Role = Literal["execution", "location", "course"]
ALSO = "trainyard.also"
VARIANTS = "trainyard.variants"


class _Missing:
    def __repr__(self) -> str:
        return "(required)"


MISSING: Any = _Missing()
"""Value of a required field in a partial configuration that no document has given yet."""


def execution(default: Any = dataclasses.MISSING) -> Any:
    """A field that changes speed or logging of a stage, never its result.

    The config digest leaves such fields out, so changing one reruns nothing."""
    return dataclasses.field(default=default, metadata={ROLE: "execution"})


def location(default: Any = dataclasses.MISSING) -> Any:
    """A field with the location of an input or the output.

    The config digest leaves it out: inputs count by the digest of their content."""
    return dataclasses.field(default=default, metadata={ROLE: "location"})


def course(default: Any = dataclasses.MISSING) -> Any:
    """A field that decides a result and may change in the middle of a run, as a learning rate."""
    return dataclasses.field(default=default, metadata={ROLE: COURSE})


def also(*names: str, default: Any = dataclasses.MISSING, role: Role | None = None) -> Any:
    """A field with further names in documents and flags. role: as the functions of that name."""
    metadata = {ALSO: names} | ({ROLE: role} if role is not None else {})
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Variants:
    """The classes of a nested configuration, by the value of their own field `key`."""

    key: str
    classes: Mapping[str, type]
    """The first is that of a document without the key."""
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """How messages name the choice of a value; unset: as its flag."""

    def chosen(self, document: Mapping[str, Any], where: str) -> type:
        """The class that a document describes; ConfigError for a value that none has."""
        name = document.get(self.key, next(iter(self.classes)))
        if not isinstance(name, str) or name not in self.classes:
            rule = choose_one(name, self.classes)
            raise ConfigError(f"{where}: {self.key} is {shown(name)}; {rule}")
        return self.classes[name]


def one_of(key: str, classes: Mapping[str, type], **words: str) -> Mapping[str, Variants]:
    """Metadata of a field with a nested configuration of one of several classes, which share the
    field `key` and differ in its value. Flat keys are those of all classes."""
    return {VARIANTS: Variants(key, classes, words)}


# --- the flat key space -----------------------------------------------------------------------


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _is_config(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def variants_of(cls: type) -> Iterator[Variants]:
    """The variants of all nested configurations."""
    for field in dataclasses.fields(cls):
        if VARIANTS in field.metadata:
            yield field.metadata[VARIANTS]


Leaf = tuple[str, Any, "dataclasses.Field[Any]"]


def _leaves(cls: type) -> Iterator[Leaf]:
    hints = _hints(cls)
    for field in (field for field in dataclasses.fields(cls) if field.init):
        if VARIANTS in field.metadata:
            variants = reversed(field.metadata[VARIANTS].classes.values())
            yield from {leaf[0]: leaf for one in variants for leaf in leaves(one)}.values()
        elif _is_config(hints[field.name]):
            yield from leaves(hints[field.name])
        else:
            yield field.name, hints[field.name], field


leaves: Callable[[type], tuple[Leaf, ...]] = functools.cache(lambda cls: tuple(_leaves(cls)))
"""Every flat key of a configuration class: name, annotation, field. Of variants, the keys of each
class, those that they share once."""


def other_names(cls: type) -> dict[str, str]:
    """Further names of flat keys, each with its key."""
    return {other: name for name, _, field in leaves(cls) for other in field.metadata.get(ALSO, ())}


def to_dict(config: Any) -> dict[str, Any]:
    """The flat document of a configuration: JSON-able values, keys in field order."""
    document: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if not field.init:
            continue
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            document.update(to_dict(value))
        else:
            document[field.name] = list(value) if isinstance(value, tuple) else value
    return document


def digest_relevant(config: Any) -> dict[str, Any]:
    """The part of the flat document that decides a stage's result.

    `DESCRIBES`, an attribute or property, names `execution` keys that the result depends on too."""
    fields = {name: field for name, _, field in leaves(type(config))}
    relevant = {name for name, one in fields.items() if one.metadata.get(ROLE) in (None, COURSE)}
    relevant.update(getattr(config, "DESCRIBES", ()))
    return {k: to_stored(v, fields[k]) for k, v in to_dict(config).items() if k in relevant}


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")


def check_above_zero(config: Any, *names: str) -> None:
    """Raise ConfigError for a given value that is not above 0, NaN included; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{flag(name)} must be above 0, got {value}")


def check_at_least(config: Any, limit: int, *names: str) -> None:
    """Raise ConfigError for a given value below `limit`; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= limit:
            raise ConfigError(f"{flag(name)} must be at least {limit}, got {value}")


def check_at_most(config: Any, limit: int, *names: str) -> None:
    """Raise ConfigError for a given value above `limit`; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value > limit:
            raise ConfigError(f"{flag(name)} must be at most {limit}, got {value}")


def differing(config: Any) -> dict[str, Any]:
    """The flat keys whose value is not the class's default, required ones included."""
    defaults = {name: field.default for name, _, field in leaves(type(config))}
    return {k: v for k, v in to_dict(config).items() if _as_document(defaults[k]) != v}


def _as_document(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# --- reading ----------------------------------------------------------------------------------


def check_keys(cls: type, document: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for an unknown key, suggesting the nearest known one.

    A stage that accepts documents of another names its configuration in `ALSO_READS`: keys that
    only the other has are ignored."""
    known = [name for name, _, _ in leaves(cls)]
    others = other_names(cls)
    ignored = {
        key
        for other in getattr(cls, "ALSO_READS", ())
        for key in (*(name for name, _, _ in leaves(other)), *other_names(other))
    }
    for key in document:
        if others.get(key) in document:
            raise ConfigError(f"{where}: {key!r} is another name of {others[key]!r}; give one")
        if key not in known and key not in others and key not in ignored:
            hint = suggest(str(key), known, "known keys:", [*known, *sorted(ignored)])
            raise ConfigError(f"{where}: unknown key {shown(key)}; {hint}")
    check_variants(cls, document, where)


def check_variants(cls: type, document: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a key that only another variant than the chosen one has, unless its
    value is the default there."""
    for variants in variants_of(cls):
        chosen = variants.chosen(document, where)
        ours = {name for name, _, _ in leaves(chosen)}
        for value, other in variants.classes.items():
            for name, _, field in leaves(other):
                if name not in ours and document.get(name, field.default) != field.default:
                    chosen_by = variants.words.get(value, f"{flag(variants.key)} {value}")
                    what = f"{where}: {name} ({flag(name)})"
                    raise ConfigError(f"{what} only applies with {chosen_by}; leave it out")


def suggest(
    name: str, known: Iterable[str], listed: str = "known:", candidates: Iterable[str] | None = None
) -> str:
    """A hint for an unknown name: the nearest candidate, else all known names after `listed`."""
    known = list(known)
    options = known if candidates is None else list(candidates)
    near = difflib.get_close_matches(name.replace("-", "_"), options, n=1)
    near = near or difflib.get_close_matches(name, options, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{listed} {', '.join(known)}"


def choose_one(value: Any, known: Iterable[Any]) -> str:
    """The values that may be chosen, and the nearest to another one, whatever its case."""
    spelt = {str(one).lower(): one for one in known}
    near = nearest(value.lower(), spelt) if value and isinstance(value, str) else []
    hint = f": did you mean {spelt[near[0]]!r}?" if near else ""
    return f"choose one of {', '.join(map(repr, spelt.values()))}{hint}"


def nearest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """The names that begin with `name`, an abbreviation, in their order; else those spelt alike."""
    known = list(known)
    begins = [one for one in known if one.startswith(name)]
    return (begins or difflib.get_close_matches(name, known))[:most]


def partial_config(
    cls: type[C], document: Mapping[str, Any], where: str, missing: Any = MISSING
) -> C:
    """The configuration a document describes, with `missing` where a required key is absent.

    No rule that spans fields is checked yet; constructing the class again does that."""
    check_keys(cls, document, where)
    others = other_names(cls)
    named = {others.get(key, key): value for key, value in document.items()}
    return typing.cast(C, _partial(cls, named, where, missing))


def _partial(cls: type, document: Mapping[str, Any], where: str, missing: Any) -> Any:
    hints = _hints(cls)
    config: Any = object.__new__(cls)
    for field in dataclasses.fields(cls):
        annotation = hints[field.name]
        if VARIANTS in field.metadata:
            annotation = field.metadata[VARIANTS].chosen(document, where)
        if _is_config(annotation):
            value = _partial(annotation, document, where, missing)
        elif field.name in document:
            value = convert(document[field.name], annotation, f"{where}: {field.name}")
        else:
            value = missing if field.default is dataclasses.MISSING else field.default
        object.__setattr__(config, field.name, value)
    return config


def from_dict(cls: type[C], document: Mapping[str, Any], where: str = "config") -> C:
    """The validated configuration that a flat document describes.

    Raises ConfigError for an unknown or missing key, a wrong type, or a rule of the class."""
    return _validated(partial_config(cls, document, where), where)


def _validated(config: C, where: str) -> C:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, config)):
        value = getattr(config, field.name)
        if value is MISSING:
            raise ConfigError(
                f"{where}: {field.name} is required (flag {flag(field.name)}) and was not given"
            )
        values[field.name] = _validated(value, where) if dataclasses.is_dataclass(value) else value
    return type(config)(**values)


def convert(value: Any, annotation: Any, where: str) -> Any:
    """A value of a document as a field's type; ConfigError for a wrong type."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        (inner,) = [arg for arg in args if arg is not types.NoneType]
        return None if value is None else convert(value, inner, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} is {shown(value)}; {choose_one(value, args)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list, got {shown(value)}")
        return tuple(convert(item, args[0], where) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a table, got {shown(value)}")
        return {key: convert(item, args[1], f"{where}.{key}") for key, item in value.items()}
    if _is_config(annotation):
        return from_table(annotation, value, where)
    return _convert_scalar(value, annotation, where)


def _convert_scalar(value: Any, annotation: Any, where: str) -> Any:
    if type(value) is int and abs(value) > MAX_NUMBER:
        raise ConfigError(f"{where} must be at most {MAX_NUMBER}, got {shown(value)}")
    if annotation is float and type(value) is int:
        return float(value)
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{where} has a NUL character, got {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} must be a finite number, got {value!r}")
    exact_bool = isinstance(value, bool) == (annotation is bool)
    if not isinstance(value, annotation) or not exact_bool:
        names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
        raise ConfigError(
            f"{where} must be {names.get(annotation, annotation)}, got {shown(value)}"
        )
    return value


# --- nested tables ----------------------------------------------------------------------------


def check_known(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ConfigError for a key that is not known, with the nearest one that is."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {shown(key)}; {suggest(key, known)}")


def from_table(cls: type[C], table: Any, where: str) -> C:
    """The dataclass that a nested table describes, such as a part of a profile.

    Raises ConfigError for an unknown or missing key, a wrong type, or a rule of the class."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, got {shown(table)}")
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls))}
    check_known(table, fields, where)
    for name, field in fields.items():
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if name not in table and not has_default:
            raise ConfigError(f"{where}: {name} is required and was not given")
    hints = _hints(typing.cast(Any, cls))
    values = {key: convert(value, hints[key], f"{where}: {key}") for key, value in table.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def dump_toml(config: Any) -> str:
    """The flat document as TOML that `--config` reads back; an unset option is a comment."""
    import tomli_w

    lines = [
        f"# {key} is not set" if value is None else tomli_w.dumps({key: value}).rstrip()
        for key, value in to_dict(config).items()
    ]
    return "\n".join(lines) + "\n"
