"""Options that differ by layer: Megatron-LM's patterns `4`, `[1,1,0]`, `([1]*3+[0])*8`, and the
attention window. Standard library only."""

from __future__ import annotations

import ast
import functools

from trainyard.errors import ConfigError


@functools.lru_cache(maxsize=16)  # every layer asks, and a pattern has an entry for each
def layer_pattern(text: str, num_layers: int, option: str) -> tuple[bool, ...]:
    """For each layer whether the option is on.

    A number N switches it off in every Nth layer; a list has an entry for each layer."""
    value = _parsed(text, num_layers, option)
    if isinstance(value, int):
        return tuple((layer + 1) % value != 0 for layer in range(num_layers))
    return value


@functools.lru_cache(maxsize=16)
def every_nth(text: str, num_layers: int, option: str) -> tuple[bool, ...]:
    """The same where a number N switches it on in every Nth layer, the first included."""
    value = _parsed(text, num_layers, option)
    if isinstance(value, int):
        return tuple(layer % value == 0 for layer in range(num_layers))
    return value


def _parsed(text: str, num_layers: int, option: str) -> int | tuple[bool, ...]:
    """A number above 0, or whether the option is on in each layer."""
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{option} must be a number or a list such as [1,1,0] or ([1]*3+[0])*8, got {text!r}"
        ) from error
    if isinstance(value, int):
        if value < 1:
            raise ConfigError(f"{option} must be above 0, got {value}")
        return value
    if len(value) != num_layers or not set(value) <= {0, 1}:
        raise ConfigError(
            f"{option} must have a 0 or 1 for each of --num-layers ({num_layers}) layers; "
            f"{text!r} has {len(value)} entries"
        )
    return tuple(bool(entry) for entry in value)


def _evaluate(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.List(elts=entries):
            values = [_evaluate(entry) for entry in entries]
            if all(isinstance(value, int) for value in values):
                return [value for value in values if isinstance(value, int)]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(a, list) and isinstance(b, int) and len(a) * b < 100_000:
                return a * b
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(a, list) and isinstance(b, list):
                return a + b
    raise ValueError(ast.dump(node))


def window_of_layer(
    window_size: str | None, skip_freq: str | None, num_layers: int, layer: int
) -> tuple[int, int] | None:
    """(left, right) of --window-size in a layer; None where --window-attn-skip-freq skips it."""
    if window_size is None:
        return None
    option = "--window-attn-skip-freq"
    if skip_freq is not None and not layer_pattern(skip_freq, num_layers, option)[layer]:
        return None
    parts = window_size.strip().strip("()").split(",")
    try:
        left, right = (int(part) for part in parts)
    except ValueError:
        raise ConfigError(
            f"--window-size must be LEFT,RIGHT such as 4095,0, got {window_size!r}"
        ) from None
    if left < -1 or right not in (-1, 0):
        raise ConfigError(
            f"--window-size {window_size}: LEFT must be -1 (no bound) or more, and RIGHT 0, since "
            "a decoder sees nothing to the right"
        )
    return left, right
