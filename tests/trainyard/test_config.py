"""Configurations round-trip through documents and refuse what they do not know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from trainyard.config import (
    differing,
    digest_relevant,
    dump_toml,
    execution,
    from_dict,
    leaves,
    location,
    one_of,
    to_dict,
)
from trainyard.config_text import parse_document
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    num_layers: int
    dropout: float = 0.1
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    input: tuple[str, ...] = location()
    model: Inner
    extra: Inner2 = field(default_factory=lambda: Inner2())
    workers: int = execution(1)
    name: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--workers must be positive, got {self.workers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner2:
    fast: bool = False


GIVEN = {"input": ["x"], "num_layers": 2}


def test_a_document_is_flat_and_round_trips_through_toml_and_json() -> None:
    config = from_dict(Outer, GIVEN | {"dropout": 0, "fast": True})
    assert config.model.num_layers == 2
    assert config.model.dropout == 0.0
    assert from_dict(Outer, parse_document(dump_toml(config), ".toml", "t")) == config
    assert from_dict(Outer, to_dict(config)) == config


def test_locations_and_execution_options_are_outside_the_digest() -> None:
    config = from_dict(Outer, GIVEN)
    assert digest_relevant(config).keys() == {"num_layers", "dropout", "kind", "fast", "name"}
    assert differing(config) == {"input": ["x"], "num_layers": 2}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (GIVEN | {"num_layer": 2}, "unknown key 'num_layer'; did you mean 'num_layers'"),
        ({"input": ["x"]}, "num_layers is required"),
        (GIVEN | {"num_layers": "two"}, "num_layers must be a whole number, got 'two'"),
        (GIVEN | {"num_layers": True}, "must be a whole number"),
        (GIVEN | {"fast": 1}, "must be true or false"),
        (GIVEN | {"kind": "c"}, "choose one of 'a', 'b'"),
        (GIVEN | {"input": "x"}, "must be a list"),
        (GIVEN | {"workers": 0}, "--workers must be positive"),
    ],
)
def test_invalid_values_are_refused(document: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_dict(Outer, document)


@pytest.mark.parametrize(
    ("text", "suffix"), [("a = = 1", ".toml"), ("{", ".json"), ("a: [", ".yaml"), ("a", ".ini")]
)
def test_a_broken_document_is_refused(text: str, suffix: str) -> None:
    with pytest.raises(ConfigError):
        parse_document(text, suffix, "here")


def test_yaml_is_read() -> None:
    assert parse_document("num_layers: 3\ninput: [x]", ".yaml", "y") == {
        "num_layers": 3,
        "input": ["x"],
    }


@dataclass(frozen=True, kw_only=True)
class Shape:
    shape: Literal["disc", "box"] = "disc"
    size: int


@dataclass(frozen=True, kw_only=True)
class Box(Shape):
    shape: Literal["disc", "box"] = "box"
    corners: int = 4


@dataclass(frozen=True, kw_only=True)
class Drawing:
    form: Shape = field(metadata=one_of("shape", {"disc": Shape, "box": Box}))


def test_a_document_chooses_one_of_several_classes_of_options() -> None:
    assert from_dict(Drawing, {"size": 2}).form == Shape(size=2)
    box = from_dict(Drawing, {"shape": "box", "size": 2, "corners": 6})
    assert box.form == Box(size=2, corners=6)
    assert from_dict(Drawing, to_dict(box)) == box
    assert [name for name, _, _ in leaves(Drawing)] == ["shape", "size", "corners"]
    assert from_dict(Drawing, {"size": 2, "corners": 4}).form == Shape(size=2)
    with pytest.raises(ConfigError, match=r"corners \(--corners\) only applies with --shape box"):
        from_dict(Drawing, {"size": 2, "corners": 5})
    with pytest.raises(ConfigError, match="shape is 'star'; choose one of 'disc', 'box'"):
        from_dict(Drawing, {"size": 2, "shape": "star"})
