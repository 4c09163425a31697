"""Whose kernels a run computes with: chosen and refused before anything is built, and told."""

from __future__ import annotations

import torch

from trainyard.models.attention import choose_attention
from trainyard.models.norms.select import report_norm
from trainyard.optim.build import params_dtype
from trainyard.optim.kernels import report_optimizer
from trainyard.parallel.model import ModelParallel
from trainyard.training.loop.compiled import should_compile
from trainyard.training.options.pretrain import PretrainConfig


def report_kernels(
    config: PretrainConfig,
    parallel: ModelParallel,
    device: torch.device,
    *,
    is_built_in: bool,
    say: bool,
) -> None:
    """Attention, norms and optimizer; ConfigError for what cannot be had here. say: one line for
    each in the log, with why; on one rank. A model of another kind chooses its own but for the
    optimizer."""
    if is_built_in:
        dtype, data = params_dtype(config.precision), config.data
        choose_attention(
            config.model,
            parallel,
            device,
            dtype,
            documents=data.reset_attention_mask or data.dataloader_inter_document_masking,
            report=say,
        )
        compiled = should_compile(config.training.compile_layers, device)
        report_norm(config.model, device, dtype, compiled=compiled, say=say)
    report_optimizer(config.optimizer, device, say=say)
