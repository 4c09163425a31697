"""Chat templates: Jinja in a sandbox, set up as in the transformers library.

Templates get no clock. One that asks for the date gets its own default, so that a conversation
always has the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainyard import json_text
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.tokenizers.hf_tokenizers import SETTINGS
from trainyard.tokenizers.huggingface import TEMPLATE


class ChatTemplate:
    """A parsed template; it may render in several threads at once."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        try:
            self._template = _environment().from_string(text)
        except (TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f" on line {line}" if line else ""
            raise ConfigError(f"{name}: not a Jinja template{where}: {error}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tokens: Mapping[str, Any], *, invite: bool
    ) -> str:
        """The text of a conversation. tokens: special tokens by role. invite: prompt for a turn."""
        # Some sources write null for a missing key; templates test whether the key exists.
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        try:
            return self._template.render(
                messages=given,
                tools=None,
                documents=None,
                add_generation_prompt=invite,
                **tokens,
            )
        except Exception as error:  # a template is a program, and may fail as it likes
            raise DataError(f"{self._name}: {type(error).__name__}: {error}") from None


def named_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """The special tokens that the files of a tokenizer name, by their roles, such as bos_token."""
    tokens: dict[str, str] = {}
    for name in reversed(SETTINGS):
        for role, token in _settings(files, name).items():
            if isinstance(token, dict):  # an AddedToken written out
                token = token.get("content")
            if role.endswith("_token") and isinstance(token, str):
                tokens[role] = token
    return tokens


def own_template(files: Mapping[str, bytes], name: str) -> ChatTemplate:
    """The chat template of a tokenizer, or the one that was given instead."""
    if TEMPLATE in files:
        try:
            return ChatTemplate(files[TEMPLATE].decode(), f"{name}: {TEMPLATE}")
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{name}: {TEMPLATE}: byte {error.start} is not UTF-8") from None
    template = _settings(files, SETTINGS[0]).get("chat_template")
    if isinstance(template, list):  # several, each with a name
        templates = [entry for entry in template if isinstance(entry, dict)]
        template = {entry.get("name"): entry.get("template") for entry in templates}.get("default")
    if not isinstance(template, str):
        raise ConfigError(f"{name} has no chat template; give one with --chat-template")
    return ChatTemplate(template, f"{name}: {SETTINGS[0]}")


def _settings(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        document = json_text.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ArtifactError(f"{name} is not a JSON document: {error}") from None
    return document if isinstance(document, dict) else {}


class _Generation(Extension):
    """`{% generation %}`, which marks the model's answers; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 # as the class above it declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
