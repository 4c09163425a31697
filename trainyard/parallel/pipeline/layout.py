"""The language of --pipeline-model-parallel-layout: `Et|(tt|)*3,tL`.

E is the embedding, t a transformer layer, m one of multi-token prediction, which stand on the last
stage before the loss, L the output layer with its loss, | the end of a stage.
`t*3` and `(...)*3` repeat, groups nest, commas and blanks only please the eye. Pure; every error
points at its place in the string."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.errors import ConfigError

FLAG = "--pipeline-model-parallel-layout"
MEANINGS = {
    "E": "the embedding",
    "t": "a transformer layer",
    "m": "a multi-token prediction layer",
    "L": "the output layer with its loss",
    "|": "the end of a stage",
}
MOST_ITEMS = 100_000
"""More than any model has layers: what repeats oftener is a slip of the pen."""


@dataclass(frozen=True, slots=True)
class Item:
    """One sign of the unrolled layout, and where in the string it was written."""

    sign: str
    place: int


def parse_layout(text: str) -> list[list[Item]]:
    """The stages in the order that tokens pass them, each a list of its layers."""
    items, end = _sequence(text, 0, opened_at=None)
    assert end == len(text)
    stages: list[list[Item]] = [[]]
    for item in items:
        if item.sign == "|":
            stages.append([])
        else:
            stages[-1].append(item)
    return stages


def check_layout(text: str, stages: list[list[Item]], num_layers: int) -> None:
    """Raise ConfigError unless it is one embedding, `num_layers` layers, any number of multi-token
    prediction and one loss, in order."""
    items = [item for stage in stages for item in stage]
    _exactly_one(text, items, "E")
    _exactly_one(text, items, "L")
    if items[0].sign != "E":
        raise layout_error(text, items[0].place, "the first layer must be E, the embedding")
    if items[-1].sign != "L":
        raise layout_error(text, items[-1].place, "the last layer must be L, the loss")
    if not stages[0]:
        raise layout_error(text, 0, "the first stage must hold E, the embedding, and is empty")
    if not stages[-1]:
        raise layout_error(text, len(text), "the last stage must hold L, the loss, and is empty")
    _check_predicting(text, stages)
    layers = sum(item.sign == "t" for item in items)
    if layers != num_layers:
        raise ConfigError(
            f"{FLAG} {text!r} has {layers} transformer layers (t), --num-layers is {num_layers}"
        )


def count_predicting(text: str) -> int:
    """The layers of multi-token prediction in a layout."""
    return sum(item.sign == "m" for stage in parse_layout(text) for item in stage)


def _check_predicting(text: str, stages: list[list[Item]]) -> None:
    last = "".join(item.sign for item in stages[-1])
    before = len(last.rstrip("L").rstrip("m"))
    for stage in stages:
        for place, item in enumerate(stage):
            if item.sign == "m" and (stage is not stages[-1] or place < before):
                raise layout_error(
                    text, item.place, "m must stand on the last stage, between its layers and L"
                )


def layout_error(text: str, place: int, what: str) -> ConfigError:
    """The fault, and the string with a mark under the place."""
    return ConfigError(f"{FLAG}, character {place + 1}: {what}\n    {text}\n    {' ' * place}^")


def _exactly_one(text: str, items: list[Item], sign: str) -> None:
    found = [item for item in items if item.sign == sign]
    if not found:
        raise layout_error(text, len(text), f"there is no {sign}, {MEANINGS[sign]}")
    if len(found) > 1:
        raise layout_error(text, found[1].place, f"a second {sign}; there is one, {MEANINGS[sign]}")


# --- the parser -------------------------------------------------------------------------------


def _sequence(text: str, start: int, opened_at: int | None) -> tuple[list[Item], int]:
    """Items from `start` to the end, or to the bracket that closes the one at `opened_at`; and
    where reading stopped."""
    items: list[Item] = []
    place = start
    while place < len(text):
        sign = text[place]
        if sign in ", ":
            place += 1
            continue
        if sign == ")":
            if opened_at is None:
                raise layout_error(text, place, "this ) closes nothing")
            return items, place
        part, place = _element(text, place)
        times, place = _times(text, place)
        if len(items) + times * len(part) > MOST_ITEMS:
            raise layout_error(text, place - 1, f"that makes more than {MOST_ITEMS} layers")
        items += part * times
    if opened_at is not None:
        raise layout_error(text, opened_at, "this ( is not closed")
    return items, place


def _element(text: str, place: int) -> tuple[list[Item], int]:
    """One sign or one group, and the place behind it."""
    sign = text[place]
    if sign == "(":
        group, end = _sequence(text, place + 1, opened_at=place)
        return group, end + 1
    if sign in MEANINGS:
        return [Item(sign, place)], place + 1
    if sign == "*":
        raise layout_error(text, place, "there is nothing before * to repeat")
    known = ", ".join(f"{sign} {meaning}" for sign, meaning in MEANINGS.items() if sign != "m")
    raise layout_error(text, place, f"{sign!r} means nothing here; known are {known}")


def _times(text: str, place: int) -> tuple[int, int]:
    """The number behind a `*`, else 1; and the place behind it."""
    if text[place : place + 1] != "*":
        return 1, place
    end = place + 1
    while end < len(text) and text[end] in "0123456789":
        end += 1
    if end == place + 1:
        raise layout_error(text, place, "* needs a number behind it, as in t*3")
    return int(text[place + 1 : end]), end
