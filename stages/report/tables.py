"""The tables of the run card: results, time, options, artifacts."""

from __future__ import annotations

from typing import Any

from stages.report import formats, lineage
from stages.report.facts import Artifact, Card, Lineage, Option
from stages.report.formats import ARROW, DOT, is_number, milliseconds, three, whole
from stages.report.markup import Child, Markup, el, join

MEGATRON_MB = 2**20


def section(title: str, lead: str, *content: Markup) -> Markup:
    """A heading, a line that says what is seen, and the thing itself."""
    line = el("p", lead, class_="lead") if lead else None
    return el("section", el("h2", title), line, *content)


def facts(rows: list[tuple[Child, Child]], css: str = "") -> Markup:
    """Names and values, one a row; rows without a value are left out."""
    body = [el("tr", el("th", name, scope="row"), el("td", value)) for name, value in rows if value]
    return el("table", el("tbody", *body), class_=f"facts {css}".strip())


# --- results ----------------------------------------------------------------------------------


def measures(card: Card) -> Markup:
    """Evaluation beside benchmark."""
    parts = [part for part in (evaluation(card), benchmark(card)) if part]
    if not parts:
        return Markup("")
    return section("How good, how fast", "", el("div", *parts, class_="pair"))


EVALUATION = (
    ("ppl", "perplexity, per token", formats.perplexity),
    ("adjusted_ppl", "adjusted perplexity, per word", formats.perplexity),
    ("avg_loss", "loss, nats per token", formats.fixed(4)),
    ("bits_per_byte", "bits per byte", formats.fixed(3)),
    ("token_ratio", "tokens per word", formats.fixed(3)),
    ("num_tokens", "tokens scored", whole),
)


def evaluation(card: Card) -> Markup:
    """The numbers of results.json under words; what we do not know comes under its own name."""
    results = card.evaluation
    if not results:
        return Markup("")
    rows: list[tuple[Child, Child]] = [
        (label, form(results[key]))
        for key, label, form in EVALUATION
        if is_number(results.get(key))
    ]
    known = {key for key, _, _ in EVALUATION} | {"format_version", "task", "step"}
    rest = [(key, formats.shown(value)) for key, value in results.items() if key not in known]
    plain = [(key.replace("_", " "), value) for key, value in rest]
    title = el("h3", f"Evaluation: {results.get('task', 'text')}")
    fold = _fold("protocol", facts([*plain], "words")) if plain else None
    return el("div", title, facts(rows), fold)


def benchmark(card: Card) -> Markup:
    """The figures over all requests, and each request behind a fold."""
    timings = card.timings
    if not timings:
        return Markup("")
    rows: list[tuple[Child, Child]] = []
    if is_number(timings.get("tokens_per_second")):
        rows.append(("output tokens per second", three(timings["tokens_per_second"])))
    for key, label in (
        ("time_to_first_token", "time to first token"),
        ("inter_token_latency", "between tokens"),
    ):
        value = timings.get(key)
        if value:
            text = f"{milliseconds(value['median'])} {DOT} p99 {milliseconds(value['p99'])}"
            rows.append((label, text))
    if is_number(timings.get("latency_per_output_token")):
        rows.append(("latency per output token", milliseconds(timings["latency_per_output_token"])))
    for key, label in (("peak_memory_bytes", "peak memory"), ("kv_cache_bytes", "KV cache")):
        if is_number(timings.get(key)):
            rows.append((label, formats.size(timings[key])))
    requests = timings.get("requests") or []
    many = "1 request" if len(requests) == 1 else f"{len(requests)} requests"
    fold = _fold(many, _requests(requests)) if requests else None
    device = timings.get("device", "")
    where = (
        f" on {'the ' if device == 'cpu' else ''}{device.upper() if device == 'cpu' else device}"
    )
    return el("div", el("h3", "Generation" + (where if device else "")), facts(rows), fold)


def _requests(requests: list[dict[str, Any]]) -> Markup:
    head = ("request", "prompt tokens", "new tokens", "first token", "latency")
    rows = []
    for request in requests[:64]:
        first = (request.get("tpot") or [0.0])[0]
        values = (
            str(request["id"]),
            whole(request["num_input_tokens"]),
            whole(request["num_output_tokens"]),
            milliseconds(first),
            milliseconds(request["latency"]),
        )
        rows.append(el("tr", *[el("td", value) for value in values]))
    names = el("tr", *[el("th", name, scope="col") for name in head])
    return el("table", el("thead", names), el("tbody", *rows), class_="numbers")


def _fold(summary: str, content: Markup, css: str = "more-options") -> Markup:
    area = el("div", content, class_="scroll", tabindex="0", role="region", aria_label=summary)
    return el("details", el("summary", summary), area, class_=css)


# --- time -------------------------------------------------------------------------------------


def time_by_stage(card: Card) -> Markup:
    """A bar for each artifact that took time."""
    timed = [a for a in card.lineage.artifacts if a.seconds is not None]
    if not timed:
        return Markup("")
    total = sum(a.seconds or 0.0 for a in timed) or 1.0
    longest = max(a.seconds or 0.0 for a in timed) or 1.0
    rows = [_time_row(artifact, longest, total) for artifact in timed]
    table = el("table", el("tbody", *rows), class_="time")
    lead = "Each stage as it was last made; one that was reused shows what it took back then."
    return section("Where the time went", lead, table)


def _time_row(artifact: Artifact, longest: float, total: float) -> Markup:
    seconds = artifact.seconds or 0.0
    bar = el(
        "span",
        class_=f"bar {lineage.kind(artifact)}",
        style=f"width:{100 * seconds / longest:.2f}%",
    )
    return el(
        "tr",
        el("th", artifact.long_label, scope="row"),
        el("td", bar, class_="bars"),
        el("td", formats.duration(seconds), class_="amount"),
        el("td", _share(seconds / total), class_="share"),
    )


def _share(part: float) -> str:
    return f"{100 * part:.0f}%" if part >= 0.005 else "<1%"


# --- options ----------------------------------------------------------------------------------


def what_was_run(card: Card) -> Markup:
    """Options of the training run, what was foreseen, where it ran, the other stages' options."""
    changed = [option for option in card.options if option.differs]
    rest = [option for option in card.options if not option.differs]
    parts: list[Markup] = []
    if changed:
        parts.append(_options(changed))
    if rest:
        summary = el("summary", f"{len(rest)} options at their defaults")
        parts.append(el("details", summary, _options(rest, "quiet"), class_="more-options"))
    others = [a for a in card.lineage.artifacts if a.config and a.key != card.lineage.destination]
    if others:
        parts.append(_other_stages(others))
    sides = [side for side in (foreseen(card), found(card)) if side]
    if sides:
        parts.append(el("div", *[el("div", side) for side in sides], class_="pair gap"))
    if not parts:
        return Markup("")
    lead = "Options of the training run that have no default or differ from it." if changed else ""
    return section("What was run", lead, *parts)


def _options(options: list[Option], css: str = "") -> Markup:
    items = []
    for option in options:
        flag = el("dt", el("code", "--" + option.name.replace("_", "-")))
        was = option.has_default and option.differs
        before = el("small", f"{formats.shown(option.default)} {ARROW} ") if was else None
        items.append(el("div", flag, el("dd", before, formats.shown(option.value))))
    return el("dl", *items, class_=f"options {css}".strip())


def _other_stages(artifacts: list[Artifact]) -> Markup:
    blocks = []
    for artifact in artifacts:
        options = [Option(name=key, value=value) for key, value in artifact.config.items()]
        blocks += [el("h3", artifact.long_label), _options(options, "quiet")]
    summary = el("summary", "options of the other stages")
    return el("details", summary, *blocks, class_="more-options")


PLAN_MEMORY = (
    ("parameters", "parameters"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer state"),
    ("activations", "activations"),
    ("total", "in all"),
)


def foreseen(card: Card) -> Markup:
    """The plan: parameters, arithmetic and memory before anything was built."""
    plan = card.plan
    if not plan:
        return Markup("")
    memory = plan.get("memory_bytes") or {}
    rows: list[tuple[Child, Child]] = []
    if is_number((plan.get("parameters") or {}).get("exact")):
        rows.append(("parameters", whole(plan["parameters"]["exact"])))
    for key, label, form in (
        ("tokens_per_iteration", "tokens per step", whole),
        ("flops_per_token", "operations per token", formats.scaled),
        ("flops_per_iteration", "operations per step", formats.scaled),
    ):
        if is_number(plan.get(key)):
            rows.append((label, form(plan[key])))
    for key, label in PLAN_MEMORY:
        if is_number(memory.get(key)):
            rows.append((f"memory, {label}", formats.size(memory[key])))
    note = "Memory in theory, mixed precision, most loaded device."
    return el("div", el("h3", "Foreseen"), facts(rows), el("p", note, class_="under"))


def found(card: Card) -> Markup:
    """What the training came to, and where."""
    return join([part for part in (measured(card), environment(card)) if part])


def measured(card: Card) -> Markup:
    """Beside what was foreseen."""
    rows: list[tuple[Child, Child]] = []
    for key, label, form in (
        ("step_ms", "time of a step", lambda value: milliseconds(value / 1e3)),
        ("tokens_per_second", "tokens per second", formats.scaled),
        ("tflops_per_gpu", "TFLOP/s of each device", three),
        ("peak_memory_bytes", "peak memory of a process", formats.size),
    ):
        if is_number(card.measured.get(key)):
            rows.append((label, form(card.measured[key])))
    return el("div", el("h3", "Measured"), facts(rows), class_="block") if rows else Markup("")


def environment(card: Card) -> Markup:
    """Versions and machine."""
    if not card.environment:
        return Markup("")
    rows: list[tuple[Child, Child]] = list(card.environment)
    return el("div", el("h3", "Environment"), facts(rows, "words"), class_="block")


# --- artifacts --------------------------------------------------------------------------------


def artifacts(line: Lineage) -> Markup:
    """Every artifact with its whole digest."""
    head = ("stage", "digest", "size", "files", "took", "made", "where")
    rows = []
    for artifact in line.artifacts:
        seconds, num_bytes = artifact.seconds, artifact.size_bytes
        values = (
            artifact.long_label,
            el("span", artifact.digest, class_="digest"),
            formats.size(num_bytes) if num_bytes is not None else "",
            str(artifact.num_files or ""),
            formats.duration(seconds) if seconds is not None else "",
            artifact.started.replace("T", " ").replace("Z", " UTC"),
            artifact.key,
        )
        rows.append(el("tr", *[el("td", value) for value in values]))
    names = el("tr", *[el("th", name, scope="col") for name in head])
    table = el("table", el("thead", names), el("tbody", *rows), class_="artifacts")
    return _fold(f"all {len(rows)} artifacts, with whole digests", join([table]))
