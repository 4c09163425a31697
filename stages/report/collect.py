"""Reads the facts of a run card from the artifacts of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.report.config import ARTIFACTS, ReportConfig
from stages.report.facts import Card, Option, Sample
from stages.report.lineage import Ancestry, Artifact
from stages.report.profiles import profiles_of
from stages.report.retrieval import gather_retrieval
from stages.report.run_lines import (
    LEDGER,
    TIMINGS,
    expert_shares,
    saves_of,
    step_lines,
    step_of_line,
)
from stages.report.steps import Speeds, Steps
from stages.report.toxicity import Toxicity
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, read_listed_json
from trainyard.artifacts.parts import part_manifest
from trainyard.artifacts.urls import basename, join
from trainyard.charts.markup import Markup
from trainyard.charts.numbers import is_number
from trainyard.checkpoint.steps import step_of
from trainyard.collection.datasheet import section
from trainyard.config import leaves
from trainyard.datasets.config import DataConfig
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.families import FAMILIES, read_model_config
from trainyard.optim.config import OptimizerConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.training.options.node_local import NonPersistentConfig
from trainyard.training.options.training import TrainingConfig

COMPONENTS = (
    *(family.config for family in FAMILIES.values()),
    TokenizerConfig,
    DataConfig,
    OptimizerConfig,
    TrainingConfig,
    NonPersistentConfig,
    ParallelConfig,
)
"""The options of a training run. Those at their defaults were not chosen by anyone."""

TRAINED = ("pretrain", "reshard")
"""Stages whose output a card can show."""

PERFORMANCE = "performance.json"

VERDICTS = ("proven", "broken")
CERTIFICATE_VERSION = 1


def gather(config: ReportConfig) -> Card:
    """Read the named artifacts.

    Raises ArtifactError for an artifact without the content of its kind, ConfigError for a
    checkpoint without a training."""
    ancestry = Ancestry()
    urls = {name: getattr(config, name) for name in ARTIFACTS}
    keys = {name: ancestry.add(url) for name, url in urls.items() if url is not None}
    destination = keys["checkpoint" if config.checkpoint is not None else "retro_neighbors"]
    retrieval = None
    if config.retro_neighbors is not None:
        key = keys["retro_neighbors"]
        retrieval = gather_retrieval(ancestry, key, config.retro_neighbors)
    load = _volatile(ancestry, keys.get("benchmark"), "summary.json")
    generations = None
    if load is None:
        generations = _document(ancestry, keys.get("benchmark"), "generations.json")
    return Card(
        title=title(config),
        lineage=ancestry.lineage(destination),
        retrieval=retrieval,
        datasheets=tuple(map(datasheet, config.datasheets)),
        **_training(config, ancestry, destination),
        goodput=read_goodput(config.goodput),
        plan=_document(ancestry, keys.get("plan"), "plan.json"),
        evaluation=_document(ancestry, keys.get("evaluation"), "results.json"),
        timings=_volatile(ancestry, keys.get("benchmark"), "timings.json"),
        load=load,
        parity=_document(ancestry, keys.get("parity"), "parity.json"),
        quantization=_document(ancestry, keys.get("quantized"), "quantization.json"),
        toxicity=_toxicity(ancestry, keys),
        sampling=dict((generations or {}).get("sampling") or {}),
        samples=samples_of(generations, config.num_samples),
        num_prompts=len((generations or {}).get("requests") or ()),
        evaluated=evaluated_text(ancestry.manifests.get(keys.get("evaluation", ""))),
    )


def _toxicity(ancestry: Ancestry, keys: Mapping[str, str]) -> Toxicity | None:
    """Of the texts before and after the training; None where they were not scored."""
    before, after = (
        _document(ancestry, keys.get(f"toxicity_{when}"), "report.json")
        for when in ("before", "after")
    )
    if before is None or after is None:
        return None
    evaluated = _document(ancestry, keys.get("evaluation_before"), "results.json")
    return Toxicity(before, after, evaluated)


def datasheet(prefix: str) -> Markup:
    """The section about a corpus; ArtifactError for a file that is no datasheet's."""
    url = f"{prefix}.json"
    try:
        return section(store.read_json(url))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{url}: not the data of a datasheet ({repr(error)[:80]}); run stage datasheet again"
        ) from error


def _training(config: ReportConfig, ancestry: Ancestry, key: str) -> dict[str, Any]:
    """The facts of a training; none for a card without one."""
    if config.checkpoint is None:
        return {}
    checkpoint = ancestry.manifests.get(key)
    if checkpoint is None:
        raise ArtifactError(
            f"{config.checkpoint}: no manifest.json, so the training has not finished; "
            f"rerun that stage"
        )
    check_trained(config.checkpoint, checkpoint)
    trained = ancestry.artifacts[key]
    speeds, steps, line = Speeds(step_lines(key, checkpoint, TIMINGS)), Steps(), {}
    for line in step_lines(key, checkpoint, LEDGER):
        steps.add(step_of_line(line, speeds.of(line["step"])))
    return {
        "steps": steps,
        "expert_loads": expert_shares(line, "layer_loads"),
        "expert_drops": expert_shares(line, "layer_drops"),
        "options": options_of(checkpoint.config),
        "environment": environment(trained),
        "profiles": profiles_of(key, folder_of(config)),
        "measured": measured(trained),
        "performance": _volatile(ancestry, key, PERFORMANCE),
        "saves": saves_of(key, checkpoint),
        "certificate": read_certificate(config.certificate, config.checkpoint, checkpoint.lineage),
        "num_parameters": num_parameters(key, checkpoint),
    }


def check_trained(url: str, manifest: Manifest) -> None:
    """Refuse an artifact that is neither a run, nor a reshard of one, nor a step."""
    folders = {record.path.partition("/")[0] for record in manifest.files}
    folders |= {part.path for part in manifest.parts}
    if manifest.stage in TRAINED or any(step_of(folder) is not None for folder in folders):
        return
    raise ConfigError(
        f"--checkpoint {url}: made by {manifest.stage}, so there is no training to show; give the "
        "folder that pretrain wrote, or a reshard of one"
    )


def title(config: ReportConfig) -> str:
    """--title, else the name of the folder that holds the card."""
    return config.title or basename(folder_of(config).rstrip("/")) or "run"


def folder_of(config: ReportConfig) -> str:
    """The URL of the folder that holds the card."""
    output = config.output()
    assert output is not None
    return output.folder_url


def _document(ancestry: Ancestry, key: str | None, name: str) -> dict[str, Any] | None:
    if key is None:
        return None
    manifest = ancestry.manifests.get(key)
    record = None if manifest is None else manifest.record(name)
    document = read_listed_json(join(key, name), record)
    if not isinstance(document, dict):
        raise ArtifactError(f"{join(key, name)}: not a JSON object; rerun the stage that wrote it")
    return document


def _volatile(ancestry: Ancestry, key: str | None, name: str) -> dict[str, Any] | None:
    manifest = ancestry.manifests.get(key or "")
    is_listed = manifest is not None and manifest.record(name) is not None
    return _document(ancestry, key, name) if is_listed else None


# --- training ---------------------------------------------------------------------------------


def num_parameters(key: str, manifest: Manifest) -> int | None:
    """Parameters of the GPT in config.json of the last step; None for another kind of model."""
    if manifest.parts:
        last = max(manifest.parts, key=lambda part: part.path)
        return num_parameters(join(key, last.path), part_manifest(key, last))
    configs = [f.path for f in manifest.files if basename(f.path) == "config.json"]
    if not configs:
        return None
    url = join(key, max(configs))
    document = read_listed_json(url, manifest.record(max(configs)))
    try:
        model = read_model_config(document["model"], url)
        return model.num_params(int(document["padded_vocab_size"]))
    except (ConfigError, KeyError, TypeError, ValueError):
        return None


def options_of(config: dict[str, Any]) -> tuple[Option, ...]:
    """The options of the run in their order, with their defaults."""
    defaults: dict[str, Any] = {}
    for component in COMPONENTS:
        for name, _, field in leaves(component):
            defaults[name] = field.default
    return tuple(_option(name, value, defaults) for name, value in config.items())


def _option(name: str, value: Any, defaults: dict[str, Any]) -> Option:
    default = defaults.get(name)
    known = name in defaults and isinstance(default, str | int | float | tuple | None)
    plain = list(default) if isinstance(default, tuple) else default
    return Option(name=name, value=value, default=plain, has_default=known)


# --- documents of other programs ----------------------------------------------------------------


def read_certificate(url: str | None, checkpoint: str, lineage: str) -> dict[str, Any] | None:
    """The document of certify at a URL. Raises ArtifactError for any other document, ConfigError
    for the certificate of another run than `lineage`."""
    if url is None:
        return None
    document: dict[str, Any] = store.read_json(url)
    known = isinstance(document, dict) and document.get("verdict") in VERDICTS
    if not known or document.get("format_version") != CERTIFICATE_VERSION:
        raise ArtifactError(
            f"{url}: not a certificate; make one with python -m stages.certify {checkpoint} "
            f"--output {url}"
        )
    if document.get("lineage") != lineage:
        raise ConfigError(
            f"--certificate {url}: belongs to another run than --checkpoint {checkpoint}; make it "
            f"again with python -m stages.certify {checkpoint} --output {url}"
        )
    return document


def read_goodput(url: str | None) -> dict[str, Any] | None:
    """The goodput document of a flow at a URL; None where no file exists (yet)."""
    if url is None or not store.exists(url):
        return None
    document = store.read_json(url)
    if not isinstance(document, dict) or not isinstance(document.get("spent_seconds"), dict):
        raise ArtifactError(f"{url}: not a goodput document; leave out --goodput")
    return document


# --- environment and speed ----------------------------------------------------------------------


def environment(trained: Artifact) -> tuple[tuple[str, str], ...]:
    """Versions and machine of the training run, as far as they were recorded."""
    device, ranks = trained.metrics.get("device"), trained.metrics.get("ranks")
    threads = trained.metrics.get("threads")
    rows = [
        ("trainyard", trained.code.get("version")),
        ("code", (trained.code.get("digest") or "")[:12]),
        ("Python", trained.run.get("python")),
        ("PyTorch", trained.run.get("torch") or trained.metrics.get("torch")),
        ("device", "CPU" if device == "cpu" else device),
        ("processes", ranks),
        ("threads of each", threads),
        ("machine", trained.run.get("platform")),
    ]
    return tuple((name, str(value)) for name, value in rows if value)


def measured(trained: Artifact) -> dict[str, float]:
    """Time, throughput and memory of a training step."""
    names = ("step_ms", "tokens_per_second", "tflops_per_gpu", "peak_memory_bytes")
    return {name: trained.metrics[name] for name in names if is_number(trained.metrics.get(name))}


# --- generations ------------------------------------------------------------------------------


def evaluated_text(manifest: Manifest | None) -> str:
    """The file name of the text that an evaluation read; empty if its manifest does not say."""
    text = None if manifest is None else manifest.inputs.get("valid_data")
    return basename(text.urls[0]) if text is not None and text.urls else ""


def samples_of(generations: dict[str, Any] | None, count: int) -> tuple[Sample, ...]:
    """The first generations."""
    requests: Sequence[dict[str, Any]] = (generations or {}).get("requests") or ()
    return tuple(
        Sample(
            prompt=str(request.get("prompt", "")),
            continuation=str(request.get("generated_output", "")),
            finish_reason=str(request.get("finish_reason", "")),
        )
        for request in requests[:count]
    )
