"""The run card as one HTML document: sections in reading order, each left out when it has nothing
to say."""

from __future__ import annotations

import re

from stages.report import formats, lineage, tables
from stages.report.certificate import certificate
from stages.report.charts import Series, finite, line_chart
from stages.report.facts import Card, Sample, Step
from stages.report.formats import ARROW, DOT, NARROW
from stages.report.goodput import goodput
from stages.report.markup import Markup, el, join
from stages.report.performance import performance
from stages.report.saves import saves
from stages.report.style import STYLE
from stages.report.tables import section
from trainyard.version import VERSION

MAX_SAMPLE_CHARS = 4000
END_TOKEN = re.compile(r"(<\|[a-z_]+\|>|</s>)\s*\Z")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing may be fetched, whatever a prompt or a title holds."""


def render(card: Card) -> str:
    """The whole page."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{card.title}: run card"),
        el("style", Markup(STYLE)),
    )
    main = el(
        "main",
        masthead(card),
        training(card),
        origin(card),
        certificate(card),
        samples(card),
        tables.measures(card),
        performance(card),
        saves(card),
        goodput(card),
        tables.time_by_stage(card),
        tables.what_was_run(card),
        footer(card),
    )
    return "<!doctype html>\n" + el("html", head, el("body", main), lang="en") + "\n"


# --- head -------------------------------------------------------------------------------------


def masthead(card: Card) -> Markup:
    """Name, one sentence, five numbers."""
    name = el("span", card.title, class_="run")
    brand = el("div", mark(), "trainyard run card", f" {DOT} ", name, class_="masthead")
    return el("header", brand, el("h1", headline(card)), statistics(card))


def mark() -> Markup:
    """A turnout: one track becomes two."""
    return el(
        "svg",
        el("path", d="M1 13h24M5 13c7 0 8-9 15-9h5", class_="rail main"),
        viewBox="0 0 26 17",
        aria_hidden="true",
    )


def headline(card: Card) -> str:
    """What was trained, in a sentence."""
    what = f"{formats.scaled(card.num_parameters)} parameters" if card.num_parameters else "A model"
    seen = f" trained on {formats.scaled(card.tokens)} tokens" if card.tokens else " trained"
    seconds = card.training_seconds
    return what + seen + (f" in {formats.duration(seconds)}" if seconds else "")


def statistics(card: Card) -> Markup:
    """The strip below the headline."""
    cells: list[Markup] = []
    if card.validation:
        cells += _validation(*card.validation)
    elif any(step.loss is not None for step in card.steps):
        loss = next(s.loss for s in reversed(card.steps) if s.loss is not None)
        cells.append(_stat("Training loss", formats.fixed(3)(loss), "at the last step"))
    if card.tokens and card.steps:
        steps = formats.whole(card.steps[-1].step)
        cells.append(_stat("Tokens seen", formats.scaled(card.tokens), f"in {steps} steps"))
    rates = [s.tokens_per_second for s in card.steps if s.tokens_per_second]
    if rates:
        middle = sorted(rates)[len(rates) // 2]
        cells.append(_stat("Training speed", formats.scaled(middle), "tokens/s, median"))
    if card.total_seconds:
        stages = len({a.stage for a in card.lineage.artifacts if a.seconds is not None})
        more = f"in {stages} stages" if stages > 1 else "in one stage"
        cells.append(_stat("All together", formats.duration(card.total_seconds), more))
    return el("dl", *cells, class_="stats") if cells else Markup("")


def _validation(first: Step, last: Step) -> list[Markup]:
    """Loss and perplexity: from the first measurement to the last, or the only one."""
    losses = [step.validation_loss or 0.0 for step in (first, last)]
    loss = [formats.fixed(2)(value) for value in losses]
    perplexity = [formats.perplexity(formats.bounded_exp(value)) for value in losses]
    if first.step == last.step:
        at = f"at step {formats.whole(last.step)}"
        return [
            _stat("Validation loss", el("strong", loss[1]), at, "b"),
            _stat("Validation perplexity", perplexity[1], at),
        ]
    fall = losses[0] - losses[1]
    more = f"{formats.fixed(2)(fall)} nats lower" if fall > 0 else "not lower than before"
    when = "before and after" if first.step == 0 else f"first at step {formats.whole(first.step)}"
    return [
        _stat("Validation loss", _change(*loss), more, "b"),
        _stat("Validation perplexity", _change(*perplexity), when),
    ]


def _stat(name: str, value: Markup | str, more: str, css: str = "") -> Markup:
    body = (el("dt", name), el("dd", value), el("dd", more, class_="more"))
    return el("div", *body, class_=css or None)


def _change(before: str, after: str) -> Markup:
    was = el("span", f"{before} {ARROW} ", class_="was")
    return join([was, el("strong", after)])


# --- training ---------------------------------------------------------------------------------


def training(card: Card) -> Markup:
    """Loss large, what drove it small."""
    steps = card.steps
    two, three = formats.fixed(2), formats.fixed(3)
    loss = line_chart(
        "loss",
        "Loss",
        [
            Series("training", finite([(s.step, s.loss) for s in steps]), "a"),
            Series("validation", finite([(s.step, s.validation_loss) for s in steps]), "b", True),
        ],
        three,
        css="big",
        note="nats per token",
    )
    rates = Series("learning rate", finite([(s.step, s.learning_rate) for s in steps]), "c")
    norms = Series("gradient norm", finite([(s.step, s.grad_norm) for s in steps]), "d")
    speeds = Series("tokens/s", finite([(s.step, s.tokens_per_second) for s in steps]), "a")
    small = [
        line_chart("rate", "Learning rate", [rates], formats.rate, zero=True),
        line_chart("norm", "Gradient norm", [norms], two, zero=True, note="before clipping"),
        line_chart("speed", "Tokens per second", [speeds], formats.scaled, zero=True),
    ]
    if not loss and not any(small):
        return Markup("")
    trio = el("div", *small, class_="trio") if any(small) else Markup("")
    return section("Training", "", loss, trio)


# --- lineage ----------------------------------------------------------------------------------


def origin(card: Card) -> Markup:
    """The picture, and every artifact in a table."""
    families = el(
        "div",
        el("span", "data", class_="a"),
        el("span", "model", class_="b"),
        el("span", "measurement", class_="c"),
        class_="families",
    )
    lead = (
        "Every artifact by the digest of its contents; the heavy track is the way from the first "
        "to the checkpoint."
    )
    table = tables.artifacts(card.lineage)
    return section("Where it came from", lead, lineage.picture(card.lineage), families, table)


# --- samples ----------------------------------------------------------------------------------


def samples(card: Card) -> Markup:
    """Prompts and what the model made of them."""
    if not card.samples:
        return Markup("")
    shown = el("div", *[_sample(sample) for sample in card.samples], class_="samples")
    return section("What it writes", _sampling(card), shown)


def _sampling(card: Card) -> str:
    how, first = card.sampling, "Each begins with its prompt, marked; the rest is the model's."
    if not how:
        return first
    if how.get("temperature") == 0 or how.get("top_k") == 1:
        return f"{first} The likeliest token at each step."
    parts = [f"temperature {formats.shown(how.get('temperature', 1.0))}"]
    parts += [f"top-k {how['top_k']}"] if how.get("top_k") else []
    parts += [f"top-p {formats.shown(how['top_p'])}"] if how.get("top_p") else []
    parts += [f"seed {how['seed']}"] if "seed" in how else []
    return f"{first} Sampled with " + ", ".join(parts) + "."


def _sample(sample: Sample) -> Markup:
    whole = sample.continuation
    if sample.finish_reason == "stop":
        whole = END_TOKEN.sub("", whole)  # said in words instead
    text, rest = whole[:MAX_SAMPLE_CHARS], len(whole) - MAX_SAMPLE_CHARS
    end = f" ... {formats.whole(rest)} more characters" if rest > 0 else ""
    if not end and sample.finish_reason == "stop":
        end = f"{NARROW}end of document"
    return el(
        "div",
        el("span", sample.prompt[:MAX_SAMPLE_CHARS], class_="prompt"),
        el("span", text, class_="text"),
        el("span", end, class_="end") if end else None,
        class_="sample",
        tabindex="0",
        role="group",
        aria_label="sample",
    )


# --- foot -------------------------------------------------------------------------------------


def footer(card: Card) -> Markup:
    """What the page is, and what it is of."""
    digests = [a.digest for a in card.lineage.artifacts if a.key == card.lineage.destination]
    of = join([" Checkpoint ", el("span", digests[0], class_="digest"), "."]) if digests else None
    return el("footer", f"Made by trainyard {VERSION}, stage report.", of)
