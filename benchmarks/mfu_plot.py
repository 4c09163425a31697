"""MFU against model size, as a picture: docs/assets/mfu.svg.

    python -m benchmarks.mfu_plot

Our figures are those of benchmarks/README.md; the published ones are of Megatron-LM's README."""

from __future__ import annotations

from pathlib import Path

from benchmarks.shapes import SHAPES, Shape
from trainyard.charts.line_chart import Axis, LineChart, Series, line_chart
from trainyard.charts.markup import Markup, element, join
from trainyard.charts.numbers import scaled

SVG = Path(__file__).parents[1] / "docs/assets/mfu.svg"
WIDTH, HEIGHT = 760, 380
LEFT, TOP, RIGHT, BOTTOM = 56, 84, 24, 48

OURS = {"gpt-125m": 41.6, "gpt-345m": 49.1, "gpt-1.3b": 55.3, "llama-8b-half": 55.9}
"""Per cent, one H200, bf16."""
MEGATRON = {"gpt-345m": 39.7, "gpt-1.3b": 49.4, "llama-8b-half": 49.8}
"""Megatron-Core 0.19.2 with Transformer Engine 2.20.2, in the same calls."""
PUBLISHED = (
    *((1.7e9, 41.0), (7.1e9, 47.0), (16e9, 49.0), (32e9, 46.0), (70e9, 42.0)),
    *((119e9, 43.0), (177e9, 44.0), (314e9, 48.0), (462e9, 47.0)),
)
"""Megatron-LM's table of GPTs in bf16 at sequences of 4,096, on 48 to 6,144 H100."""

STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#4b5563}.ytick{text-anchor:end}"
    ".h{font-weight:600;fill:#1f2937}.axis line{stroke:#e5e7eb}.axis line.base{stroke:#6b7280}"
    ".curve{fill:none;stroke-width:2;vector-effect:non-scaling-stroke}"
    ".dots{fill:none;stroke-width:8;stroke-linecap:round;vector-effect:non-scaling-stroke}"
    ".a{stroke:#2563eb}.b{stroke:#d97706}.c{stroke:#6b7280}.curve.c{stroke-dasharray:5 4}"
)


def num_params(shape: Shape) -> float:
    """Weights of matrices, embeddings included."""
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    layer = h * (h + 2 * kv) + h * h + (3 if shape.llama else 2) * h * shape.ffn
    return float(shape.layers * layer + shape.vocab * h * (2 if shape.untied else 1))


def chart() -> LineChart:
    """The three curves."""
    ours = [(num_params(SHAPES[name]), mfu) for name, mfu in OURS.items()]
    theirs = [(num_params(SHAPES[name]), mfu) for name, mfu in MEGATRON.items()]
    made = line_chart(
        "MFU, % of 989 TFLOP/s",
        [
            Series("trainyard, one H200", ours, "a", dots=True),
            Series("Megatron-Core + Transformer Engine, the same H200", theirs, "b", dots=True),
            Series("Megatron-LM as published, 48 to 6,144 H100", PUBLISHED, "c", dots=True),
        ],
        lambda mfu: f"{mfu:.1f} %",
        axis=Axis("parameters", scaled, scaled, is_log=True),
    )
    assert made is not None
    return made


def picture(made: LineChart) -> Markup:
    """The chart with its title and legend."""
    legend = [
        join(
            [
                element("path", d=f"M{LEFT + 4} {34 + 16 * row}h0", class_=f"dots {one.css}"),
                element("text", one.name, x=LEFT + 14, y=38 + 16 * row),
            ]
        )
        for row, one in enumerate(made.series)
    ]
    plot = made.inset(LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
    return element(
        "svg",
        element("title", made.description),
        element("style", Markup(STYLE)),
        element("rect", width=WIDTH, height=HEIGHT, fill="#fff"),
        element("text", made.title, x=LEFT, y=18, class_="h"),
        *legend,
        plot,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width=WIDTH,
        height=HEIGHT,
    )


if __name__ == "__main__":
    SVG.write_text(f"{picture(chart())}\n")
