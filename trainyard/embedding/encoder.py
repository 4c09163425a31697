"""Loads the encoder of a BERT, without its heads, from a checkpoint of any kind that has one."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainyard.checkpoint.load import open_checkpoint
from trainyard.conversion.detect import LABELS, OF_KIND, Kind, detect
from trainyard.conversion.huggingface.encoder import ENCODER, open_encoder
from trainyard.conversion.loaders import open_source
from trainyard.conversion.native import CheckpointSource
from trainyard.conversion.source import Source, refuse_differences
from trainyard.embedding.config import EmbeddingConfig, NumberFormat
from trainyard.embedding.ragged import make_ragged
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.bert.config import BertConfig
from trainyard.models.bert.model import BertModel
from trainyard.models.mlp import MLP, gelu_tanh
from trainyard.parallel.device import check_memory

log = logging.getLogger(__name__)

DTYPES: dict[NumberFormat, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Encoder:
    """An encoder on its device, ready for texts end to end (see `ragged`)."""

    url: str
    kind: Kind
    """What it was read from."""
    model: BertModel
    """Without heads."""
    vocab_size: int
    """Tokens of its vocabulary; rows of its embedding where the files do not say."""

    @property
    def rows(self) -> int:
        """Of its embedding: token ids are below."""
        return self.model.vocab_size

    @property
    def dimensions(self) -> int:
        """Of its vectors."""
        return self.model.config.hidden_size


def load_encoder(url: str, device: torch.device, config: EmbeddingConfig) -> Encoder:
    """The encoder of a step folder, the latest step of a run folder, a Hugging Face folder, or a
    checkpoint of Megatron-LM.

    Raises ConfigError for a model that is no BERT, or that cannot see texts of the given length."""
    kind = detect(url) or "trainyard"
    with _open(url, kind) as source:
        if not isinstance(source.config, BertConfig):
            raise ConfigError(
                f"--load {url} holds a {source.config.model_type}, and this needs an encoder, a "
                "bert; name another checkpoint"
            )
        _check_length(url, source.config, config.retro_bert_max_chunk_length)
        model = _empty(source, device, DTYPES[config.number_format])
        _fill(model, source)
        encoder = Encoder(url, kind, model, source.vocab_size)
    make_ragged(model)
    if device.type == "cpu" and model.dtype == torch.float32:
        _quicken_gelu(model)
    log.info(
        "loaded encoder layers=%d dimensions=%d vocabulary=%d dtype=%s device=%s from %s: %s",
        *(model.config.num_layers, encoder.dimensions, encoder.vocab_size),
        *(config.number_format, device, LABELS[kind], url),
    )
    return encoder


def _open(url: str, kind: Kind) -> Source:
    if kind == "hf":
        return open_encoder(url)
    if kind == "trainyard":
        return CheckpointSource(open_checkpoint(url, "--load"))
    return open_source(url, OF_KIND[kind])


def _check_length(url: str, config: BertConfig, max_length: int) -> None:
    kind = config.position_embedding_type
    if kind == "none":
        raise ConfigError(
            f"--load {url}: this model has no positions (--position-embedding-type none), so its "
            "vectors would not depend on the order of words; name another checkpoint"
        )
    if kind == "learned_absolute" and config.positions < max_length:
        raise ConfigError(
            f"--retro-bert-max-chunk-length {max_length}: the encoder {url} has "
            f"{config.positions} positions; give at most that"
        )


def _empty(source: Source, device: torch.device, dtype: torch.dtype) -> BertModel:
    """The model without heads, its parameters unfilled."""
    assert isinstance(source.config, BertConfig)
    types = source.config.token_types
    config = replace(source.config, bert_binary_head=False, num_tokentypes=types)
    with torch.device("meta"):
        model = BertModel(config, source.padded_vocab_size)
    model.lm_head = model.output_layer = None
    count = sum(parameter.numel() for parameter in model.parameters())
    check_memory(
        f"--load {source.url}: the weights of its {count:,} parameters take",
        count * dtype.itemsize,
        device,
        "take a machine with more",
    )
    model = model.to(dtype).to_empty(device=device).eval()
    return model.requires_grad_(False)


def _fill(model: BertModel, source: Source) -> None:
    """Read every parameter; ArtifactError for one that is missing or of another shape."""
    wanted = model.state_dict()
    found = {
        name.removeprefix("model."): spec.shape
        for name, spec in source.specs.items()
        if name.removeprefix("model.").startswith(ENCODER)
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    refuse_differences(found, shapes, source.url, "the configuration of its encoder")
    for name, parameter in wanted.items():
        value = source.read(f"model.{name}")
        if not value.isfinite().all():
            raise ArtifactError(f"{source.url}: NaN or infinity in {name}; the training diverged")
        parameter.copy_(value)


def _quicken_gelu(model: BertModel) -> None:
    """Compute GELU's tanh form with torch.tanh, which is vectorised; torch's own kernel for it on
    CPUs is not, and takes twice the time of the matrix before it."""
    for module in model.encoder.modules():
        if isinstance(module, MLP) and module.activation is gelu_tanh:
            module.activation = _gelu_tanh


def _gelu_tanh(x: Tensor) -> Tensor:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2"""
    scale = math.sqrt(2.0 / math.pi)
    inner = (x * x).mul_(0.044715 * scale).add_(scale).mul_(x)
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)
