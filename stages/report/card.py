"""The run card as one HTML document: card.html.j2 filled in, with card.css inside.

The template has the order of the page, its texts, and the format of each number. This module
computes the rest. Documents of other programs may lack any key: the template leaves those rows
out."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from stages.report import experts, lineage_picture
from stages.report.config import MAX_SAMPLES
from stages.report.evaluations import evaluated_sets
from stages.report.facts import Card, Sample, Save
from stages.report.losses import further_loss_charts
from stages.report.retrieval import Search
from stages.report.retrieval_section import recall_charts, recall_rows, retrieval_lead
from stages.report.toxicity import toxicity_lead, toxicity_rows, toxicity_title
from trainyard.charts import numbers
from trainyard.charts.line_chart import LineChart, Series, line_chart
from trainyard.charts.markup import Markup, printable
from trainyard.charts.numbers import NARROW, is_number, three, whole
from trainyard.charts.points import Point
from trainyard.version import VERSION

FOLDER = Path(__file__).parent
TEMPLATE, CSS = "card.html.j2", "card.css"

MAX_SAMPLE_CHARS = 4000
MAX_REQUESTS = 64
END_TOKEN = re.compile(r"(<\|[a-z_]+\|>|</s>)\s*\Z")

OF_SPLIT = "per token of the validation split"
"""What the perplexity of the training is of; that of the evaluation is of another text."""

SAVE_KINDS = (
    ("durable", "in the run folder", "a"),
    ("local", "on nodes", "b"),
    ("global", "in a shared folder", "c"),
    ("upload", "copied from nodes", "d"),
)
"""(kind, label, color) of saves."""

GOODPUT_KINDS = (
    ("queue", "waiting in a queue", "source"),
    ("start", "starting", "source"),
    ("restore", "loading a checkpoint", "source"),
    ("compile", "compiling", "source"),
    ("data_wait", "waiting for data", "source"),
    ("step", "steps that were kept", "model"),
    ("evaluation", "measuring the loss", "measure"),
    ("checkpoint", "waiting for saves", "source"),
    ("lost", "steps that were lost", "source"),
    ("idle", "allocated, doing nothing", "source"),
    ("between", "between attempts", "source"),
)
"""(kind, label, color) of time."""

SHOWN_SECONDS = 0.05
"""A shorter time has no bar."""


@cache
def template() -> jinja2.Template:
    """Compiled once."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["finite"] = is_number
    environment.filters["entries"] = _entries
    environment.globals |= {"f": numbers, "lineage_picture": lineage_picture}
    return environment.get_template(TEMPLATE)


def render(card: Card) -> str:
    """The whole page."""
    return template().render(
        card=card,
        css=Markup((FOLDER / CSS).read_text("utf-8")),
        version=VERSION,
        headline=headline(card),
        stats=list(stats(card)),
        loss=loss_chart(card),
        small_charts=[*small_charts(card), *further_loss_charts(card)],
        recall_charts=recall_charts(card.retrieval),
        recall_rows=recall_rows(card.retrieval),
        retrieval_lead=retrieval_lead(card.retrieval),
        expert_charts=experts.load_charts(card),
        expert_columns=experts.load_columns(card),
        expert_rows=experts.load_rows(card),
        samples=[sample_text(sample) for sample in card.samples],
        samples_lead=samples_lead(card),
        evaluated=evaluated_sets(card.evaluation, card.evaluated),
        toxicity_title=toxicity_title(card.toxicity),
        toxicity_lead=toxicity_lead(card.toxicity),
        toxicity_rows=list(toxicity_rows(card.toxicity, card.evaluation)),
        max_requests=MAX_REQUESTS,
        save_rows=save_rows(card.saves),
        save_charts=save_charts(card.saves),
        goodput_bars=goodput_bars(card.goodput or {}),
        stage_bars=stage_bars(card),
    )


def _printed(value: Any) -> Any:
    """Every value before it is escaped: printable text, and nothing for None."""
    if value is None:
        return ""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _entries(value: Any) -> list[dict[str, Any]]:
    """The objects in a list of a document; none when it is not a list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


# --- headline -----------------------------------------------------------------------------------


def headline(card: Card) -> str:
    """What was trained, or else found, in a sentence."""
    if card.retrieval is not None and not card.of_training:
        table, index = card.retrieval.table, card.retrieval.index
        among = index.get("num_vectors")
        of_all = f" among {numbers.scaled(among)}" if is_number(among) else ""
        return f"Neighbours of {numbers.scaled(table['num_chunks'])} chunks{of_all}"
    count, tokens, seconds = card.num_parameters, card.tokens, card.training_seconds
    model = f"{numbers.scaled(count)} parameters" if count else "A model"
    data = f" on {numbers.scaled(tokens)} tokens" if tokens else ""
    return f"{model} trained{data}" + (f" in {numbers.duration(seconds)}" if seconds else "")


@dataclass(frozen=True, slots=True)
class Stat:
    """A number below the headline."""

    name: str
    value: str
    more: str
    before: str = ""
    css: str = ""


def stats(card: Card) -> Iterator[Stat]:
    """The most important numbers, as far as known."""
    if card.validation:
        yield from _validation(*card.validation)
    elif (loss := card.steps.last("loss")) is not None:
        yield Stat("Training loss", numbers.fixed(3)(loss), "at the last step")
    if card.tokens and card.steps.last_step is not None:
        steps = f"in {whole(card.steps.last_step)} steps"
        yield Stat("Tokens seen", numbers.scaled(card.tokens), steps)
    if (speed := card.training_speed) is not None:
        yield Stat("Training speed", numbers.scaled(speed), "tokens/s, median")
    yield from _retrieval(card)
    if card.total_seconds:
        stages = len({a.stage for a in card.lineage.artifacts if a.seconds is not None})
        more = f"in {stages} stages" if stages > 1 else "in one stage"
        yield Stat("All together", numbers.duration(card.total_seconds), more)


def _retrieval(card: Card) -> Iterator[Stat]:
    """Recall and neighbours, on a card without a training."""
    if card.retrieval is None or card.of_training:
        return
    chosen = next((one for one in card.retrieval.searches if one.is_default), None)
    if chosen is not None:
        neighbors = card.retrieval.index["recall"].get("neighbors", "")
        yield Stat(f"Recall@{neighbors}", numbers.fixed(3)(chosen.recall), _lists(chosen), css="b")
    mean, most = (card.retrieval.table.get(key) for key in ("mean_neighbors", "num_neighbors"))
    if is_number(mean):
        yield Stat("Neighbours of a chunk", numbers.three(mean), f"of {most}, the mean")


def _lists(search: Search) -> str:
    return f"{whole(search.nprobe)} list{'s' if search.nprobe > 1 else ''} searched"


def _validation(first: Point, last: Point) -> Iterator[Stat]:
    """Loss and perplexity at the first and the last measurement, or at the only one."""
    losses = [loss for _, loss in (first, last)]
    before, loss = (numbers.fixed(2)(value) for value in losses)
    was, perplexity = (numbers.perplexity(numbers.bounded_exp(value)) for value in losses)
    if first[0] == last[0]:
        at = f"at step {whole(last[0])}"
        yield Stat("Validation loss", loss, at, css="b")
        yield Stat("Validation perplexity", perplexity, f"{at}, {OF_SPLIT}")
        return
    fall = losses[0] - losses[1]
    more = f"{numbers.fixed(2)(fall)} nats lower" if fall > 0 else "not lower than before"
    when = "before and after" if first[0] == 0 else f"first at step {whole(first[0])}"
    yield Stat("Validation loss", loss, more, before, "b")
    yield Stat("Validation perplexity", perplexity, f"{when}, {OF_SPLIT}", was)


# --- training -----------------------------------------------------------------------------------


def _series(card: Card, name: str, field: str, css: str, dots: bool = False) -> Series:
    return Series(name, card.steps.points(field), css, dots)


def loss_chart(card: Card) -> LineChart | None:
    """Training and validation loss."""
    training = _series(card, "training", "loss", "a")
    validation = _series(card, "validation", "validation_loss", "b", dots=True)
    return line_chart("Loss", [training, validation], numbers.fixed(3), note="nats per token")


def small_charts(card: Card) -> list[LineChart]:
    """Learning rate, gradient norm and speed."""
    return _drawn(
        line_chart(
            "Learning rate",
            [_series(card, "learning rate", "learning_rate", "c")],
            numbers.rate,
            from_zero=True,
        ),
        line_chart(
            "Gradient norm",
            [_series(card, "gradient norm", "grad_norm", "d")],
            numbers.fixed(2),
            from_zero=True,
            note="before clipping",
        ),
        line_chart(
            "Tokens per second",
            [_series(card, "tokens/s", "tokens_per_second", "a")],
            numbers.scaled,
            from_zero=True,
        ),
    )


def _drawn(*charts: LineChart | None) -> list[LineChart]:
    return [chart for chart in charts if chart is not None]


# --- samples ------------------------------------------------------------------------------------


def sampling(options: dict[str, Any]) -> str:
    """How the next token was chosen, as a sentence."""
    if not options:
        return ""
    if options.get("temperature") == 0 or options.get("top_k") == 1:
        return "The most likely token at each step."
    parts = [f"temperature {numbers.shown(options.get('temperature', 1.0))}"]
    parts += [f"top-k {options['top_k']}"] if options.get("top_k") else []
    parts += [f"top-p {numbers.shown(options['top_p'])}"] if options.get("top_p") else []
    parts += [f"seed {options['seed']}"] if "seed" in options else []
    return f"Sampled with {', '.join(parts)}."


def samples_lead(card: Card) -> str:
    """How to read the samples, how many there are, and how they were generated."""
    shown, all_prompts = len(card.samples), card.num_prompts
    left_out = f"The first {shown} of {whole(all_prompts)} prompts; " if all_prompts > shown else ""
    left_out += f"--num-samples shows up to {MAX_SAMPLES}." if left_out else ""
    parts = ["Each text begins with its prompt, which is marked.", left_out]
    return " ".join(filter(None, [*parts, sampling(card.sampling)]))


def sample_text(sample: Sample) -> tuple[str, str, str]:
    """Prompt, generated text, and a note on its end. Long texts are cut."""
    text, is_stopped = sample.continuation, sample.finish_reason == "stop"
    if is_stopped:
        text = END_TOKEN.sub("", text)
    end = f"{NARROW}end of document" if is_stopped else ""
    if len(text) > MAX_SAMPLE_CHARS:
        end = f" ... {whole(len(text) - MAX_SAMPLE_CHARS)} more characters"
    return sample.prompt[:MAX_SAMPLE_CHARS], text[:MAX_SAMPLE_CHARS], end


# --- saves --------------------------------------------------------------------------------------


def _by_kind(saves: Sequence[Save]) -> Iterator[tuple[str, str, list[Save]]]:
    for kind, label, css in SAVE_KINDS:
        if found := [save for save in saves if save.kind == kind]:
            yield label, css, found


def save_rows(saves: Sequence[Save]) -> list[list[str]]:
    """A row for each kind: label, number, then medians and the longest time."""
    rows = []
    for label, _, found in _by_kind(saves):
        speed = [save.size_bytes / 1e9 / max(save.durable_seconds, 1e-9) for save in found]
        rows.append(
            [
                label,
                whole(len(found)),
                numbers.size(statistics.median(save.size_bytes for save in found)),
                three(statistics.median(speed)),
                numbers.milliseconds(statistics.median(save.blocked_seconds for save in found)),
                numbers.milliseconds(statistics.median(save.durable_seconds for save in found)),
                numbers.milliseconds(max(save.durable_seconds for save in found)),
            ]
        )
    return rows


def save_charts(saves: Sequence[Save]) -> list[LineChart]:
    """By step: how long training waited, and how long until a save was complete."""

    def chart(title: str, figure: Callable[[Save], float]) -> LineChart | None:
        series = [
            Series(label, tuple((save.step, figure(save)) for save in found), css, dots=True)
            for label, css, found in _by_kind(saves)
            if any(map(figure, found))  # training does not wait for uploads
        ]
        return line_chart(title, series, numbers.milliseconds, from_zero=True, note="seconds")

    return _drawn(
        chart("Training waited", lambda save: save.blocked_seconds),
        chart("Saved after", lambda save: save.durable_seconds),
    )


# --- time ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """A time as a bar."""

    label: str
    css: str
    seconds: float
    share: str
    length: float
    """Between 0 and 1, the longest bar."""


def goodput_bars(document: dict[str, Any]) -> list[Bar]:
    """Where the time of all attempts went."""
    spent, shares = document.get("spent_seconds", {}), document.get("spent_percent") or {}
    seconds = {
        kind: spent[kind]
        for kind, _, _ in GOODPUT_KINDS
        if is_number(spent.get(kind)) and spent[kind] >= SHOWN_SECONDS
    }
    return [
        Bar(
            label,
            css,
            seconds[kind],
            f"{shares[kind]:.1f}%" if is_number(shares.get(kind)) else "",
            seconds[kind] / max(seconds.values()),
        )
        for kind, label, css in GOODPUT_KINDS
        if kind in seconds
    ]


def stage_bars(card: Card) -> list[Bar]:
    """Where the time of all stages went."""
    timed = [(a, a.seconds) for a in card.lineage.artifacts if a.seconds is not None]
    total = sum(seconds for _, seconds in timed) or 1.0
    longest = max((seconds for _, seconds in timed), default=0.0) or 1.0
    return [
        Bar(
            artifact.long_label,
            lineage_picture.family(artifact),
            seconds,
            f"{100 * seconds / total:.0f}%" if seconds / total >= 0.005 else "<1%",
            seconds / longest,
        )
        for artifact, seconds in timed
    ]
