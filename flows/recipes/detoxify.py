"""Derives and validates every job of flow detoxify_gpt from a recipe. No Prefect here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.goodput.report import goodput_url
from flows.recipes.corpus import TOKENIZER_KEYS
from flows.recipes.pretrain import num_ranks_of
from flows.recipes.recipe import CONTINUATIONS, Recipe
from flows.recipes.stage_job import StageJob, located_errors, stage_job
from flows.yard.profile import TrainingResources
from stages.pretrain.checkpoint_options import of_checkpoint
from trainyard.artifacts.urls import join, parent
from trainyard.errors import ConfigError

TEXT = "generated_text"
"""Key of what stage generate wrote."""

NOT_OF_SCORE = {
    "prompt_path": f"leave it out, and give the prompts as [{CONTINUATIONS}] prompt_file",
    "rank": "leave it out",
    "world_size": "leave it out",
}
"""Options of stage score that a recipe cannot have, and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The jobs that measure a model: texts for prompts, their scores, and the perplexity."""

    generate: StageJob
    score: StageJob
    evaluate: StageJob


@dataclass(frozen=True, slots=True, kw_only=True)
class DetoxifyJobs:
    """The jobs of flow detoxify_gpt, in order."""

    before: Measures
    generate: StageJob
    score: StageJob
    tokenize: StageJob
    pretrain: StageJob
    after: Measures
    report: StageJob

    def all(self) -> list[StageJob]:
        """Every job."""
        jobs: list[StageJob] = []
        for field in dataclasses.fields(self):
            found = getattr(self, field.name)
            is_job = isinstance(found, StageJob)
            jobs += [found] if is_job else [found.generate, found.score, found.evaluate]
        return jobs


def detoxify_jobs(recipe: Recipe, resources: TrainingResources | None = None) -> DetoxifyJobs:
    """The jobs of a recipe, each with validated options. resources: of the training.

    Raises ConfigError for wrong options, and if there is no checkpoint to begin with."""
    written = recipe.table("pretrain")
    load = str(written.get("load") or _of_base(recipe, "[pretrain] load", "checkpoint"))
    _check_score(recipe)
    with located_errors(f"{recipe.where} [pretrain]"):
        brought = of_checkpoint(load, written)
    tokenizer = {key: brought[key] for key in TOKENIZER_KEYS if key in brought}
    tokens = recipe.at("tokens", "kept")
    decided = {**brought, "finetune": True, "load": load, **_data(recipe, tokens)}
    ranks = None if resources is None else num_ranks_of(written, resources)
    missing = {key: value for key, value in decided.items() if key not in written}
    checkpoint = recipe.checkpoint()
    return DetoxifyJobs(
        before=_measures(recipe, load, "before"),
        generate=recipe.job("generate", {"load": load, "output_dir": recipe.at("self-generated")}),
        score=recipe.job("score", _texts(recipe, "self-generated", "scored")),
        tokenize=recipe.job(
            "tokenize",
            {
                "input": [join(recipe.at("scored"), "documents-*.jsonl")],
                "output_prefix": tokens,
                "json_keys": [TEXT],
                **{k: v for k, v in tokenizer.items() if k not in recipe.table("tokenize")},
            },
        ),
        pretrain=recipe.job("pretrain", missing, num_ranks=ranks),
        after=_measures(recipe, checkpoint, "after"),
        report=recipe.job("report", _card(recipe, checkpoint)),
    )


def _of_base(recipe: Recipe, instead: str, *parts: str) -> str:
    """An artifact of another recipe's training in the same yard."""
    if not recipe.base:
        raise ConfigError(
            f'{recipe.where}: which model is to be trained? Give base = "quickstart", the name of '
            "a "
            f'recipe that was trained in this yard, or {instead} = "..."'
        )
    return join(parent(recipe.root), recipe.base, *parts)


def _check_score(recipe: Recipe) -> None:
    """Refuse what would fail after the texts are generated: scores that no stage computes, texts
    that all stay, prompts of texts that have none, shares that nobody joins."""
    written, where = recipe.table("score"), f"{recipe.where} [score]"
    for key, instead in NOT_OF_SCORE.items():
        if key in written:
            raise ConfigError(f"{where}: {key} is decided by the flow; {instead}")
    if written.get("classifier") == "annotated":
        raise ConfigError(
            f'{where}: classifier = "annotated" reads scores, and what the flow generates has '
            "none; name one that scores, or run the stages yourself (docs/detoxification.md)"
        )
    if "keep_fraction" not in written:
        raise ConfigError(
            f"{where}: keep_fraction is needed, the part of the texts to train on, such as 0.5"
        )


def _data(recipe: Recipe, tokens: str) -> dict[str, Any]:
    """What to train on, and by default the data of the base to validate on, as in Megatron-LM's
    finetune_gpt.py."""
    found: dict[str, Any] = {"train_data_path": [f"{tokens}_{TEXT}_document"]}
    if "train_data_path" in recipe.table("pretrain"):
        raise ConfigError(
            f"{recipe.where} [pretrain]: train_data_path is decided by the flow; leave it out"
        )
    if recipe.base:
        found["valid_data_path"] = [_of_base(recipe, "", "tokens", "corpus_text_document")]
    return found


def _texts(recipe: Recipe, generated: str, output: str) -> dict[str, Any]:
    return {
        "input": [recipe.at(generated, "generations.jsonl")],
        "json_key": TEXT,
        "output_dir": recipe.at(output),
    }


def _measures(recipe: Recipe, load: str, when: str) -> Measures:
    """Of the model before or after the training."""
    texts = recipe.at(when, CONTINUATIONS)
    prompts = recipe.table(CONTINUATIONS).get("prompt_file")
    if not isinstance(prompts, str) or not prompts.endswith(".jsonl"):
        raise ConfigError(
            f"{recipe.where} [{CONTINUATIONS}]: prompt_file is needed, a .jsonl file of prompts as "
            "that of RealToxicityPrompts"
        )
    place = {"load": load, "output_dir": texts}
    generate = recipe.job("generate", place, f"continue-{when}", table=CONTINUATIONS)
    scored = {k: v for k, v in recipe.table("score").items() if k != "keep_fraction"}
    own = {"prompt_path": prompts, **_texts(recipe, join(when, CONTINUATIONS), f"{when}/scores")}
    score = stage_job("score", {**scored, **own}, f"{recipe.where} [score]", f"score-{when}")
    text = recipe.evaluation_data or _of_base(recipe, "evaluation_data", "corpus", "heldout.txt")
    measured = {"load": load, "valid_data": [text], "output_dir": recipe.at(when, "evaluation")}
    evaluate = recipe.job("evaluate", measured, f"evaluate-{when}")
    return Measures(generate=generate, score=score, evaluate=evaluate)


def _card(recipe: Recipe, checkpoint: str) -> Mapping[str, Any]:
    return {
        "checkpoint": checkpoint,
        "tokens": f"{recipe.at('tokens', 'kept')}_{TEXT}_document",
        "evaluation": recipe.at("after", "evaluation"),
        "evaluation_before": recipe.at("before", "evaluation"),
        "toxicity_before": recipe.at("before", "scores"),
        "toxicity_after": recipe.at("after", "scores"),
        "goodput": goodput_url(recipe.root, "pretrain"),
        "output_prefix": recipe.at("card"),
    }
