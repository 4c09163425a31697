"""Reads another program's JSON document, field by field, and refuses unknown fields.

An unknown field may change what a model computes, so only null fields and harmless ones are
skipped."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from trainyard.errors import ArtifactError, ConfigError

T = TypeVar("T", int, float, str, bool)


class Fields:
    """The fields of one document.

    where: names the document in messages. prefix: precedes the names of its fields there."""

    def __init__(self, document: Any, where: str, prefix: str = "") -> None:
        if not isinstance(document, Mapping):
            name = prefix.rstrip(".") or "it"
            raise ArtifactError(f"{where}: {name} is {document!r:.60}, wanted a table of fields")
        self._document: Mapping[str, Any] = document
        self._where, self._prefix = where, prefix
        self._seen: set[str] = set()

    def stated(self, name: str) -> bool:
        """Whether the document has the field, even if it is null."""
        return name in self._document

    def raw(self, name: str) -> Any:
        """A field of any type; None if it is absent."""
        self._seen.add(name)
        return self._document.get(name)

    def maybe(self, name: str, kind: type[T]) -> T | None:
        """A field of a type; None if it is absent or null."""
        value = self.raw(name)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)  # never overflows: read_document allows 64 bits
        if type(value) is not kind:
            raise ArtifactError(
                f"{self._where}: {self._prefix}{name} is {value!r:.60}, wanted {kind.__name__}"
            )
        return value

    def get(self, name: str, default: T) -> T:
        """A field of the default's type; the default if it is absent or null."""
        value = self.maybe(name, type(default))
        return default if value is None else value

    def need(self, name: str, kind: type[T]) -> T:
        """A required field; ArtifactError if it is absent or null."""
        value = self.maybe(name, kind)
        if value is None:
            raise ArtifactError(f"{self._where}: has no {self._prefix}{name}")
        return value

    def must_be(self, name: str, *allowed: Any, default: Any = None) -> None:
        """Refuse a field with another value. An absent or null field counts as `default`, or as
        the first of `allowed`."""
        value = self.raw(name)
        if value is None:
            value = allowed[0] if default is None else default
        if value not in allowed:
            raise ConfigError(
                f"{self._where}: {self._prefix}{name} is {value!r:.60}, but this version reads "
                f"only {' or '.join(repr(item) for item in allowed)}"
            )

    def refuse_rest(self, harmless: Collection[str]) -> None:
        """Raise ConfigError for fields that were not read, unless they are harmless or null."""
        rest = self._document.keys() - self._seen - set(harmless)
        unknown = sorted(name for name in rest if self._document[name] is not None)
        if unknown:
            shown = ", ".join(
                f"{self._prefix}{name} ({self._document[name]!r:.60})" for name in unknown[:10]
            )
            raise ConfigError(
                f"{self._where}: this version does not know {shown}, which might change what the "
                "model computes; if it does not, delete it from the file"
            )
