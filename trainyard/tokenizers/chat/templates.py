"""Chat templates: Jinja in a sandbox with bounds, otherwise as in the transformers library.

Templates get no clock. One that asks for the date gets its own default, so that a conversation
always has the same tokens."""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from trainyard import json_text
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.tokenizers.hf_tokenizers import SETTINGS
from trainyard.tokenizers.huggingface import TEMPLATE

MAX_STEPS = 200_000
"""Rounds of all loops and calls of macros of one rendering; a conversation has a few per turn."""
MAX_NUMBER = 1_000_000
"""Of a width, a count or an exponent."""
MAX_CHARS = 50_000_000
"""Of the text or list that one operation makes."""

PER_STEP = 1000
"""Characters or items that are as much work as a round."""

WIDE = re.compile("[0-9]{7}")

_COUNT = threading.local()


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
        _COUNT.steps = 0
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


class _Bounds(NodeTransformer):
    """Counts the rounds of loops and the calls of macros, and bounds what `~` joins."""

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("count", []), lineno=node.lineno))
        if getattr(node, "test", None) is not None:
            node.test = nodes.And(_call("count", []), node.test, lineno=node.lineno)
        return cast(nodes.Node, node)

    visit_For = visit_Macro = visit_CallBlock = _counted  # noqa: N815  # Jinja's names

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)


def _call(name: str, arguments: list[nodes.Expr], line: int | None = None) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)


class _Bounded(ImmutableSandboxedEnvironment):
    """A sandbox for templates of others: bounded in rounds, and in what one operation makes."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        return cast(nodes.Template, _Bounds().visit(parsed).set_environment(self))

    def count(self) -> bool:
        """One more round of a loop, or call of a macro."""
        _count(1)
        return True

    def joined(self, *parts: Any) -> str:
        """The texts of values, one after the other, as `~` joins them."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Any, obj: Any, /, *args: Any, **options: Any) -> Any:
        """Call what a template calls."""
        _check_arguments(getattr(obj, "__name__", ""), getattr(obj, "__self__", ""), args, options)
        return super().call(context, obj, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operation on numbers or texts."""
        sizes = [len(one) if isinstance(one, Sized) else one for one in (left, right)]
        if operator == "**":
            _check_arguments(operator, "", sizes, {})
        elif operator == "%" and isinstance(left, str):
            if "*" in left or WIDE.search(left):
                raise TemplateError(f"a width above {MAX_NUMBER}, or none that is written out")
        elif sizes != [left, right] and all(isinstance(size, int) for size in sizes):
            _check_size(math.prod(sizes) if operator == "*" else sum(sizes))
        return super().call_binop(context, operator, left, right)


def _count(steps: int) -> None:
    _COUNT.steps = getattr(_COUNT, "steps", 0) + steps
    if _COUNT.steps > MAX_STEPS:
        raise TemplateError(f"more than {MAX_STEPS} rounds of its loops")


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks its arguments first."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        text = next((one for one in args if isinstance(one, str)), "")
        _check_arguments(name, text, args, options)
        return function(*args, **options)

    return call


def _check_arguments(name: str, text: Any, args: Iterable[Any], options: Mapping[str, Any]) -> None:
    """Refuse a width, count or exponent without end, and a replacement that makes too much."""
    given = [*args, *options.values()]
    if any(isinstance(one, int) and abs(one) > MAX_NUMBER for one in given):
        raise TemplateError(f"{name} of a number above {MAX_NUMBER}")
    _count(sum(len(one) for one in (text, *given) if isinstance(one, Sized)) // PER_STEP)
    if name in ("replace", "join") and isinstance(text, str):
        longest = max((len(one) for one in given if isinstance(one, Sized)), default=1)
        _check_size(len(text) * longest)


def _check_size(size: int) -> None:
    _count(size // PER_STEP)
    if size > MAX_CHARS:
        raise TemplateError(f"a text or list of {size} characters; at most {MAX_CHARS} are allowed")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    for name, function in environment.filters.items():
        environment.filters[name] = _guarded(name, function)
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
