"""Quantizes the tensors of a checkpoint one after the other, and measures what it costs."""

from __future__ import annotations

import logging
from typing import Any

import torch

from stages.quantize.config import QuantizeConfig
from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.artifacts.urls import is_hidden
from trainyard.checkpoint.stored_step import StoredStep, check_step
from trainyard.conversion.detect import loader_for, refuse_unfit
from trainyard.conversion.huggingface.compressed import Quantization
from trainyard.conversion.huggingface.folder import WEIGHT_FILES, write_hf_folder
from trainyard.conversion.loaders import open_source
from trainyard.conversion.write_native import check_source
from trainyard.errors import ConfigError
from trainyard.evaluation.perplexity import open_text
from trainyard.evaluation.scoring import Scorer
from trainyard.inference.load import ModelOnRanks, load_on_ranks
from trainyard.parallel.device import resolve_device
from trainyard.parallel.groups import ALONE

log = logging.getLogger(__name__)

FORMAT_VERSION = 1


def run(config: QuantizeConfig, stage: StageRun) -> dict[str, Any]:
    """Write the folder; returns its sizes, and with --valid-data the perplexities."""
    loader = loader_for(config.load_dir)
    refuse_unfit(config.load_dir, loader)
    if loader == "trainyard":
        check_step(config.load_dir, "--load-dir", also=StoredStep.tokenizer_files)
    refuse_strangers(config, stage)
    quantization = Quantization(
        config.method, config.strategy, config.layout or "compressed-tensors"
    )
    with open_source(config.load_dir, loader) as source:
        check_source(source)
        if config.layout == "modelopt" and any(s.dtype == "F32" for s in source.specs.values()):
            log.warning("weights in fp32: TensorRT-LLM computes such models in bf16 or fp16")
        sizes = [spec.size_bytes for n, spec in source.specs.items() if n.startswith("model.")]
        with stage.progress(None, "bytes", "quantize") as progress:
            write_hf_folder(source, config.num_shards, stage.open, progress.update, quantization)
        step = source.step
    written = [r.size_bytes for name, r in stage.records.items() if name.endswith(".safetensors")]
    metrics: dict[str, Any] = {"bytes_before": sum(sizes), "bytes_after": sum(written)}
    if config.valid_data is not None:
        metrics |= perplexities(config, stage)
    options: dict[str, str] = {"method": config.method, "strategy": config.strategy}
    if config.layout is not None:
        options["layout"] = config.layout
    document = {"format_version": FORMAT_VERSION, "step": step, **options, **metrics}
    stage.write_json("quantization.json", document)
    log.info("quantized %s", " ".join(f"{key}={value:.6g}" for key, value in metrics.items()))
    return metrics


def perplexities(config: QuantizeConfig, stage: StageRun) -> dict[str, float]:
    """Of --valid-data, by the weights as they were and as they are in the folder."""
    device = resolve_device(config.device, 0)
    loaded = load_on_ranks(config.load_dir, device)
    with stage.progress(2, "models", "score") as progress:
        before = perplexity(config, loaded)
        progress.update(1)
        with open_source(config.save_dir, "hf") as source, torch.no_grad():
            for name, parameter in loaded.model.state_dict().items():
                parameter.copy_(source.read(f"model.{name}"))
        after = perplexity(config, loaded)
        progress.update(1)
    return {"ppl_before": before, "ppl_after": after, "ppl_ratio": after / before}


def perplexity(config: QuantizeConfig, loaded: ModelOnRanks) -> float:
    """Of a token, by the definition of stages.evaluate."""
    assert config.valid_data is not None
    evaluation = config.evaluation()
    scorer = Scorer(loaded.model, ALONE, evaluation.micro_batch_size)
    text = open_text(config.valid_data, evaluation, scorer, loaded.tokenizer)
    return float(text.summarize(text.score(range(len(text)))).numbers["ppl"])


def refuse_strangers(config: QuantizeConfig, stage: StageRun) -> None:
    """Refuse a folder with weights of another program, which a loader might take for these."""
    ours = set(stage.slot.files if stage.slot else ()) | stage.work.final_names()
    strange = [
        name
        for name in store.list_files(config.save_dir)
        if "/" not in name
        and not is_hidden(name)
        and name.endswith(WEIGHT_FILES)
        and name not in ours
    ]
    if strange:
        raise ConfigError(
            f"--save-dir {config.save_dir} has {', '.join(strange[:3])}, which this stage did not "
            "write and a loader might take for the model; choose an empty folder"
        )
