"""Options whose default has changed: documents of outputs hold another value for them, so that
those of earlier versions stay comparable."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

STORED = "trainyard.stored"


def stored_as(values: Mapping[Any, Any]) -> Any:
    """A field whose default is None. values: those that documents hold, by the field's own."""
    return dataclasses.field(default=None, metadata={STORED: values})


def to_stored(value: Any, field: dataclasses.Field[Any]) -> Any:
    """The value in documents of outputs."""
    if STORED not in field.metadata:
        return value  # which may be a list
    return field.metadata[STORED].get(value, value)


def from_stored(
    document: Mapping[str, Any], fields: Iterable[dataclasses.Field[Any]]
) -> dict[str, Any]:
    """The options of a document with such values."""
    options = dict(document)
    for field in fields:
        if field.name in options and STORED in field.metadata:
            own = {stored: value for value, stored in field.metadata[STORED].items()}
            options[field.name] = own.get(options[field.name], options[field.name])
    return options
