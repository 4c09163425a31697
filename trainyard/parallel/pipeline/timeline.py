"""A schedule as a picture: text for a terminal, SVG for a page. Pure."""

from __future__ import annotations

import math
from string import ascii_letters
from xml.sax.saxutils import escape

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
    """The whole schedule, one bar for each rank; every cell says what it is when pointed at."""
    scale = _columns_per_time(simulation) * PIXELS_PER_COLUMN
    ranks = range(len(simulation.schedule))
    width = math.ceil(MARGIN + simulation.makespan * scale + 16)
    height = TOP + len(ranks) * (ROW + GAP) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="h" x="12" y="22">{escape(title)}</text>',
        *_svg_legend(_num_chunks(simulation)),
    ]
    for rank in ranks:
        parts += _svg_row(simulation, rank, scale)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _svg_legend(chunks: int) -> list[str]:
    parts, x = [], 12
    for kind, name in (("F", "forward"), ("B", "backward")):
        for chunk in range(chunks):
            parts.append(
                f'<rect x="{x}" y="32" width="14" height="14" fill="{_fill(kind, chunk, chunks)}"/>'
            )
            x += 16
        parts.append(f'<text x="{x + 4}" y="43">{name}</text>')
        x += 84
    parts.append(f'<rect class="i" x="{x}" y="32" width="14" height="14"/>')
    parts.append(f'<text x="{x + 20}" y="43">idle</text>')
    if chunks > 1:
        letters = f"{_letter(0)} to {_letter(chunks - 1)}"
        parts.append(f'<text x="{x + 76}" y="43">darker: later chunk, {letters}</text>')
    return parts


def _svg_row(simulation: Simulation, rank: int, scale: float) -> list[str]:
    y, chunks = TOP + rank * (ROW + GAP), _num_chunks(simulation)
    length = simulation.makespan * scale
    parts = [
        f'<text x="12" y="{y + 17}">rank {rank}</text>',
        f'<rect class="i" x="{MARGIN}" y="{y}" width="{length:.1f}" height="{ROW}"/>',
    ]
    for action, start, stop in _actions(simulation, rank):
        x, width = MARGIN + start * scale, (stop - start) * scale
        what = "forward" if action.kind == "F" else "backward"
        label = _label(action, chunks > 1)
        parts.append(
            f"<g><title>rank {rank}: {what} of micro-batch {action.microbatch}, chunk "
            f"{action.chunk}, {start:g} to {stop:g}</title>"
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" '
            f'fill="{_fill(action.kind, action.chunk, chunks)}"/>'
        )
        if width >= 8 * len(label):
            parts.append(f'<text class="c" x="{x + width / 2:.1f}" y="{y + 17}">{label}</text>')
        parts.append("</g>")
    return parts


def _fill(kind: str, chunk: int, chunks: int) -> str:
    light, dark = SHADES[kind]
    share = chunk / max(chunks - 1, 1) if chunks > 1 else 0.5
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(light, dark, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"
