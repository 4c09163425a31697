"""A schedule as a picture: text for a terminal, SVG for a page. Pure."""

from __future__ import annotations

import math
from string import ascii_letters

from trainyard.charts.markup import Markup, element
from trainyard.parallel.pipeline.schedule import Action
from trainyard.parallel.pipeline.simulate import Simulation

WIDTH = 120
"""Columns, where the caller knows no better."""
PANELS = 6
"""Panels that are printed whole; of more, the first and the last ones."""
IDLE, FORWARD, BACKWARD = ".", "-", "="


# --- text -------------------------------------------------------------------------------------


def text_timeline(simulation: Simulation, width: int = WIDTH) -> str:
    """One line a rank, cut into panels of `width` columns.

    `3-` is the forward pass of micro-batch 3, `3===` its backward pass, dots are idle time; where
    ranks have several chunks a letter behind the number says which."""
    scale = _columns_per_time(simulation)
    rows = [_row(simulation, rank, scale) for rank in range(len(simulation.schedule))]
    names = [f"rank {rank}" for rank in range(len(rows))]
    margin = max(map(len, names)) + 1
    length = max(map(len, rows))
    room = math.ceil(length / math.ceil(length / (width - margin - 1)))  # panels of one width
    panels = [
        "\n".join(
            f"{name:{margin}}|{row[begin : begin + room]}"
            for name, row in zip(names, rows, strict=True)
        )
        for begin in range(0, length, room)
    ]
    if len(panels) > PANELS:
        half, left_out = PANELS // 2, len(panels) - PANELS
        panels[half:-half] = [f"({left_out} panels in between are left out)"]
    return "\n\n".join(panels)


def legend(chunks: int) -> str:
    """How to read `text_timeline`."""
    letters = f"; {_letter(0)} to {_letter(chunks - 1)}: chunk" if chunks > 1 else ""
    return (
        f"0{FORWARD}{FORWARD} forward of micro-batch 0, 0{BACKWARD * 5} its backward, "
        f"{IDLE * 3} idle{letters}"
    )


def _row(simulation: Simulation, rank: int, scale: float) -> str:
    end = _column(simulation.makespan, scale)
    cells = [IDLE] * end
    has_chunks = _num_chunks(simulation) > 1
    for action, start, stop in _actions(simulation, rank):
        begin, size = _column(start, scale), _column(stop, scale) - _column(start, scale)
        fill = FORWARD if action.kind == "F" else BACKWARD
        cells[begin : begin + size] = (_label(action, has_chunks) + fill * size)[:size]
    return "".join(cells)


def _columns_per_time(simulation: Simulation) -> float:
    """Room for a label and a line in a typical forward pass."""
    durations = sorted(
        stop - start
        for rank in range(len(simulation.schedule))
        for action, start, stop in _actions(simulation, rank)
        if action.kind == "F"
    )
    most = max(action.microbatch for action in simulation.schedule[0])
    size = len(str(most)) + (_num_chunks(simulation) > 1) + 1
    return size / (durations[len(durations) // 2] or 1.0)


def _column(time: float, scale: float) -> int:
    return math.floor(time * scale + 0.5)


def _label(action: Action, has_chunks: bool) -> str:
    return f"{action.microbatch}{_letter(action.chunk) if has_chunks else ''}"


def _letter(chunk: int) -> str:
    return ascii_letters[chunk % len(ascii_letters)]


def _num_chunks(simulation: Simulation) -> int:
    return 1 + max(action.chunk for actions in simulation.schedule for action in actions)


def _actions(simulation: Simulation, rank: int) -> list[tuple[Action, float, float]]:
    return list(
        zip(simulation.schedule[rank], simulation.starts[rank], simulation.ends[rank], strict=True)
    )


# --- SVG --------------------------------------------------------------------------------------

ROW, GAP, MARGIN, TOP = 26, 6, 64, 54
"""Heights of a rank's bar and of the space below it; space at the left and at the top; pixels."""
PIXELS_PER_COLUMN = 9.0
SHADES = {"F": ((219, 234, 254), (96, 150, 230)), "B": ((209, 243, 220), (78, 175, 120))}
"""Lightest and darkest fill, first and last chunk: blue forward, green backward."""
STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2937}"
    ".c{text-anchor:middle}.h{font-weight:600}rect{stroke:#fff}.i{fill:#f1f3f5}"
)


def svg_timeline(simulation: Simulation, title: str) -> str:
    """The whole schedule, one bar for each rank; every cell has a tooltip."""
    scale = _columns_per_time(simulation) * PIXELS_PER_COLUMN
    ranks = range(len(simulation.schedule))
    width = math.ceil(MARGIN + simulation.makespan * scale + 16)
    height = TOP + len(ranks) * (ROW + GAP) + 12
    return element(
        "svg",
        element("style", Markup(STYLE)),
        element("rect", width=width, height=height, fill="#fff"),
        element("text", title, class_="h", x=12, y=22),
        *_svg_legend(_num_chunks(simulation)),
        *[part for rank in ranks for part in _svg_row(simulation, rank, scale)],
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
    )


def _svg_legend(chunks: int) -> list[Markup]:
    parts, x = [], 12
    for kind, name in (("F", "forward"), ("B", "backward")):
        for chunk in range(chunks):
            fill = _fill(kind, chunk, chunks)
            parts.append(element("rect", x=x, y=32, width=14, height=14, fill=fill))
            x += 16
        parts.append(element("text", name, x=x + 4, y=43))
        x += 84
    parts.append(element("rect", class_="i", x=x, y=32, width=14, height=14))
    parts.append(element("text", "idle", x=x + 20, y=43))
    if chunks > 1:
        letters = f"{_letter(0)} to {_letter(chunks - 1)}"
        parts.append(element("text", f"darker: later chunk, {letters}", x=x + 76, y=43))
    return parts


def _svg_row(simulation: Simulation, rank: int, scale: float) -> list[Markup]:
    y, chunks = TOP + rank * (ROW + GAP), _num_chunks(simulation)
    length = simulation.makespan * scale
    parts = [
        element("text", f"rank {rank}", x=12, y=y + 17),
        element("rect", class_="i", x=MARGIN, y=y, width=length, height=ROW),
    ]
    for action, start, stop in _actions(simulation, rank):
        x, width = MARGIN + start * scale, (stop - start) * scale
        fill = _fill(action.kind, action.chunk, chunks)
        kind = "forward" if action.kind == "F" else "backward"
        about = (
            f"rank {rank}: {kind} of micro-batch {action.microbatch}, chunk {action.chunk}, "
            f"{start:g} to {stop:g}"
        )
        label = _label(action, chunks > 1)
        text = element("text", label, class_="c", x=x + width / 2, y=y + 17)
        parts.append(
            element(
                "g",
                element("title", about),
                element("rect", x=x, y=y, width=width, height=ROW, fill=fill),
                text if width >= 8 * len(label) else None,
            )
        )
    return parts


def _fill(kind: str, chunk: int, chunks: int) -> str:
    light, dark = SHADES[kind]
    share = chunk / max(chunks - 1, 1) if chunks > 1 else 0.5
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(light, dark, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"
