"""Where the time of a step goes, kernel by kernel, from a trace of torch's profiler.

    python -m benchmarks.kernel_table run/logs/profile-rank0000-steps-31-33.json.gz

The trace is that of `stages.pretrain --profile --use-pytorch-profiler`, or any other in which each
step has a range `step N`. A trace without a GPU is read too: its kernels are the innermost
operators. Kernels of several streams may run at once, so shares may add up to more than all; what
no kernel covers is listed as gaps. Product sizes are those that the trace records for operators."""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]

HELD = {"bf16": 684e12, "fp8": 1289e12}
"""Operations a second that one H200 holds for seconds at its 700 W in a product of
8192 x 4096 x 28672: the ceiling of a product in a step. A first call alone reaches more."""

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
PRODUCTS = {
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_grouped_mm", "_grouped_mm")
}
STEP = re.compile(r"step \d+$")
GROUPS = {
    # Inductor names a loop after the operators around it too.
    "norms and elementwise": r"^triton_",
    "NCCL": r"nccl",
    "copies": r"^mem(cpy|set)|direct_copy|catarraybatchedcopy|^aten::(copy_|cat|fill_|zero_)$",
    # cuDNN's backward pass has kernels before and after it.
    "attention": r"flash|fmha|attention|sdpa|^_attend|cudnn::fusion::(compute_dot|convert_dq)",
    "matrix products": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|^_product$",
    "optimizer": r"multi_tensor|foreach|adam|^_update$",
    "gradient sums": r"^_accumulate$",
    "casts to FP8": r"^_cast_(both|block)$",
    "sums of experts' rows": r"^_(sum|gradients)$",
    "Mamba-2 scan": r"^_(states|outputs|(state|token|group)_gradients)$",
}
"""Patterns of names; the first that fits. Names that begin with _ are those of trainyard/kernels;
multi_tensor is also the gradient norm."""
ELEMENTWISE = re.compile(r"^_|elementwise|norm|reduce_kernel|softmax|^aten::")
"""Of the names that are left."""
REST = "rest"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of a kernel; times in microseconds."""

    name: str
    group: str
    begin: float
    end: float
    shape: str = ""
    """Of a product: rows x inner x columns."""
    flops: float = 0.0
    """0: unknown, or counted with another kernel of the product."""
    of_product: bool = False
    """It belongs to a product whose operations are known."""
    is_fp8: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Kernels of one name and shape, or of one group, a step."""

    name: str
    group: str
    shape: str
    calls: float
    ms: float
    share: float
    """Of the time of the step."""
    tflops: float | None
    """A second, of the runs whose product is known; None: of none."""
    of_ceiling: float | None
    """Of what the chip holds in such products (HELD)."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which no kernel ran."""

    ms: float
    after: str
    before: str


@dataclass(frozen=True, slots=True)
class KernelTable:
    """What a trace says of a step."""

    steps: int
    ms: float
    """Of a step, from the begin of its first kernel to the end of its last, gaps included."""
    idle_ms: float
    """Of a step: no kernel ran."""
    gaps: int
    """A step."""
    longest_gaps: tuple[Gap, ...]
    groups: tuple[Row, ...]
    kernels: tuple[Row, ...]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


# --- events to kernels ------------------------------------------------------------------------


def group_of(name: str, op: str = "") -> str:
    """The group of a kernel, launched by that operator."""
    name = name.lower()
    found = next((group for group, p in GROUPS.items() if re.search(p, name)), None)
    if found is not None:
        return found
    if op in PRODUCTS:
        return "matrix products"
    return "norms and elementwise" if ELEMENTWISE.search(name) else REST


def product_of(op: str, dims: Sequence[Sequence[int]]) -> tuple[str, float]:
    """(shape, operations) of a product with arguments of those sizes; ("", 0) where unknown."""
    first = 1 if op in ("aten::addmm", "aten::baddbmm") else 0
    if op not in PRODUCTS or len(dims) < first + 2:
        return "", 0.0
    a, b = dims[first : first + 2]
    if not a or not b:
        return "", 0.0
    rows, inner, columns = a[-2], a[-1], b[-1]
    is_grouped = "grouped" in op
    # Of groups, if one is 2-d: each row meets the matrix of its group, so the groups do not count.
    number = 1 if len(a) == 2 or (is_grouped and len(b) == 2) else a[0]
    times = f"{number} x " if number > 1 else ""
    return f"{times}{rows} x {inner} x {columns}", 2.0 * number * rows * inner * columns


def kernels_of(events: Iterable[Event]) -> list[Kernel]:
    """The kernels of a trace, in their order."""
    complete = [event for event in events if event.get("ph") == "X"]
    ops = [event for event in complete if event.get("cat") == "cpu_op"]
    device = [event for event in complete if event.get("cat") in DEVICE]
    if not device:
        return sorted((_kernel(op, op) for op in _innermost(ops)), key=lambda one: one.begin)
    by_id = {op["args"]["External id"]: op for op in ops if "External id" in op.get("args", {})}
    launched = [(event, by_id.get(event.get("args", {}).get("External id"))) for event in device]
    # A product may launch more than one kernel, such as the sum of its parts: the longest counts.
    longest: dict[int, float] = {}
    for event, op in launched:
        if op is not None:
            longest[id(op)] = max(longest.get(id(op), 0.0), event["dur"])
    found = []
    for event, op in launched:
        is_product = op is not None and event["dur"] == longest[id(op)]
        if op is not None and is_product:
            longest[id(op)] = -1.0  # one of two that took equally long
        found.append(_kernel(event, op, is_product=is_product))
    return sorted(found, key=lambda one: one.begin)


def _kernel(event: Event, op: Event | None, *, is_product: bool = True) -> Kernel:
    name, begin = event["name"], float(event["ts"])
    end, args = begin + float(event["dur"]), (op or {}).get("args", {})
    launcher = op["name"] if op else ""
    shape, flops = product_of(launcher, args.get("Input Dims", ()))
    group = group_of(name, launcher)
    of_product = flops > 0 and group == "matrix products"
    if not (of_product and is_product):
        shape, flops = "", 0.0
    is_fp8 = "scaled" in launcher or any("Float8" in kind for kind in args.get("Input type", ()))
    return Kernel(name, group, begin, end, shape, flops, of_product, is_fp8)


def _innermost(ops: list[Event]) -> Iterator[Event]:
    """Operators that call no others, and products with all that they call."""

    def thread(event: Event) -> tuple[str, str]:
        return str(event["pid"]), str(event["tid"])

    for _, group in groupby(sorted(ops, key=thread), key=thread):
        ordered = sorted(group, key=lambda event: (event["ts"], -event["dur"]))
        product_end = -1.0
        for event, following in zip(ordered, [*ordered[1:], None], strict=True):
            end = event["ts"] + event["dur"]
            if event["ts"] < product_end:
                continue
            if event["name"] in PRODUCTS:
                product_end = end
                yield event
            elif following is None or following["ts"] >= end:
                yield event


def num_steps(events: Iterable[Event]) -> int:
    """How many steps have a range in the trace."""
    kinds = ("user_annotation", "gpu_user_annotation")
    named = {e["name"] for e in events if e.get("cat") in kinds and STEP.match(e["name"])}
    return len(named)


# --- kernels to a table -----------------------------------------------------------------------


def kernel_table(trace: dict[str, Any], num_gaps: int = 5) -> KernelTable:
    """The table of a trace as torch's profiler writes it. ValueError for one without kernels."""
    events = trace["traceEvents"]
    kernels, steps = kernels_of(events), num_steps(events) or 1
    if not kernels:
        raise ValueError("the trace has no kernels and no operators")
    gaps = gaps_of(kernels)
    span = (max(one.end for one in kernels) - kernels[0].begin) / 1e3
    by_group = sorted({one.group for one in kernels})
    rows = [
        _row(group, [k for k in kernels if k.group == group], span, steps) for group in by_group
    ]
    alike: dict[tuple[str, str, str], list[Kernel]] = {}
    for one in kernels:
        alike.setdefault((one.name, one.group, one.shape), []).append(one)
    single = [_row(name, runs, span, steps, shape) for (name, _, shape), runs in alike.items()]
    longest = sorted(gaps, key=lambda gap: -gap.ms)[:num_gaps]
    return KernelTable(
        steps,
        span / steps,
        sum(gap.ms for gap in gaps) / steps,
        round(len(gaps) / steps),
        tuple(longest),
        tuple(sorted(rows, key=lambda row: -row.ms)),
        tuple(sorted(single, key=lambda row: -row.ms)),
    )


def gaps_of(kernels: Sequence[Kernel]) -> list[Gap]:
    """Where no kernel ran, between the first and the last; kernels in the order of their begin."""
    gaps, last = [], kernels[0]
    for one in kernels[1:]:
        if one.begin > last.end:
            gaps.append(Gap((one.begin - last.end) / 1e3, last.name, one.name))
        if one.end > last.end:
            last = one
    return gaps


def _row(name: str, runs: list[Kernel], span: float, steps: int, shape: str = "") -> Row:
    """span: milliseconds of all steps."""
    ms = sum(one.end - one.begin for one in runs) / 1e3
    known = [one for one in runs if one.of_product]
    seconds = sum(one.end - one.begin for one in known) / 1e6
    flops = sum(one.flops for one in known)
    ideal = sum(one.flops / HELD["fp8" if one.is_fp8 else "bf16"] for one in known)
    tflops = flops / seconds / 1e12 if flops else None
    of_ceiling = ideal / seconds if flops else None
    share, calls = ms / span if span else 0.0, len(runs) / steps
    return Row(name, runs[0].group, shape, calls, ms / steps, share, tflops, of_ceiling)


# --- a table to text --------------------------------------------------------------------------


def markdown(table: KernelTable, max_kernels: int = 30) -> str:
    """Tables of groups, kernels and gaps."""
    head = ["calls a step", "ms a step", "share", "TFLOP/s", "of ceiling"]
    idle = f"{table.idle_ms:.2f} ms of it ({100 * table.idle_ms / table.ms:.1f} %)"
    lines = [
        f"A step takes {table.ms:.2f} ms (mean of {table.steps}). No kernel ran for {idle}, in "
        f"{table.gaps} gaps.",
        "",
        *_lines(["group", *head], [[row.name, *_figures(row)] for row in table.groups]),
        "",
    ]
    shown = table.kernels[:max_kernels]
    rows = [[f"`{_short(row.name)}`", row.group, row.shape, *_figures(row)] for row in shown]
    lines += [*_lines(["kernel", "group", "product", *head], rows), ""]
    if more := len(table.kernels) - len(shown):
        left = sum(row.ms for row in table.kernels[max_kernels:])
        lines += [f"And {more} more, {left:.2f} ms.", ""]
    gaps = [
        [f"{g.ms:.3f}", f"`{_short(g.after)}`", f"`{_short(g.before)}`"] for g in table.longest_gaps
    ]
    return "\n".join([*lines, *_lines(["longest gaps, ms", "after", "before"], gaps)])


def _figures(row: Row) -> list[str]:
    tflops = "" if row.tflops is None else f"{row.tflops:,.3g}"
    of_ceiling = "" if row.of_ceiling is None else f"{100 * row.of_ceiling:.0f} %"
    return [f"{row.calls:,.1f}", f"{row.ms:.3f}", f"{100 * row.share:.1f} %", tflops, of_ceiling]


def _lines(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _short(name: str, width: int = 60) -> str:
    """A kernel's name without its return type, for a cell."""
    name = name.removeprefix("void ").replace("|", "/").replace("`", "'")
    return name if len(name) <= width else name[: width - 3] + "..."


def read_trace(path: Path) -> dict[str, Any]:
    """A trace, compressed or not."""
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--json", type=Path, help="file for the whole table")
    parser.add_argument("--kernels", type=int, default=30, help="rows to print")
    args = parser.parse_args()
    table = kernel_table(read_trace(args.trace))
    print(markdown(table, args.kernels))
    if args.json:
        args.json.write_text(json.dumps(table.document(), indent=1) + "\n")


if __name__ == "__main__":
    main()
