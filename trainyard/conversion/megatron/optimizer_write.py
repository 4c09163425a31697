"""The `optimizer` of a file of Megatron-LM, in the layout of its plain (not distributed) optimizer:
groups with and without weight decay, parameters numbered group after group.

Megatron-LM loads groups by their place. Core 0.16 and later puts that with weight decay first;
0.7 to 0.15, and the legacy models of these, that of the parameter which is met first. The two
differ where a stage begins with a norm, that is without an embedding and with norms that are
modules of their own (`local`), and where the embedding has a learning rate of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainyard.conversion.megatron.model import WholeModel
from trainyard.conversion.megatron.optimizer import MAIN, MOMENTS
from trainyard.conversion.torch_save.write import LazyTensor
from trainyard.models.gpt.checkpoint_names import EMBEDDING
from trainyard.optim.groups import is_embedding_or_output

HALF = ("F16", "BF16")

OPTIONS = ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
"""Options of the run that the groups of Megatron's optimizer hold."""


@dataclass(frozen=True, slots=True)
class Written:
    """A parameter of a file."""

    path: str
    """In its model dict, dotted."""
    name: str
    """Ours, in the whole model."""


def why_no_optimizer(model: WholeModel) -> str | None:
    """Why the states of the optimizer cannot be written; None where they can."""
    names = [name.removeprefix("model.") for name in model.specs if name.startswith("model.")]
    wanted = [f"optimizer.{kind}.{name}" for kind in MOMENTS for name in names]
    if any(name.startswith("model.") and spec.dtype in HALF for name, spec in model.specs.items()):
        wanted += [f"optimizer.{MAIN}.{name}" for name in names]
    missing = [name for name in wanted if name not in model.specs]
    if missing:
        return f"the source has no {missing[0]}, nor {len(missing) - 1} more"
    lacking = [option for option in OPTIONS if type(model.options.get(option)) not in (int, float)]
    if lacking:
        return f"the source does not say --{lacking[0].replace('_', '-')}"
    return None if model.num_updates else "it has not been used yet"


def optimizer_document(
    model: WholeModel,
    parameters: Sequence[Written],
    lazy: Callable[[str], LazyTensor],
    as_met: bool = False,
) -> dict[str, Any]:
    """Of one file. lazy: this rank's part of a tensor by its full name of ours. as_met: groups in
    the order in which their parameters are met, as for legacy models."""
    groups = _groups(model, parameters)
    if not as_met and model.options.get("decoupled_lr") is None:
        groups = dict(sorted(groups.items(), reverse=True))
    state: dict[int, dict[str, LazyTensor]] = {}
    param_groups: list[dict[str, Any]] = []
    for key, members in groups.items():
        numbers = list(range(len(state), len(state) + len(members)))
        for number, member in zip(numbers, members, strict=True):
            state[number] = {kind: lazy(f"optimizer.{kind}.{member.name}") for kind in MOMENTS}
        param_groups.append(_group(model, *key) | {"params": numbers})
    inner = {"state": state, "param_groups": param_groups}
    if model.specs[f"model.{EMBEDDING}"].dtype not in HALF:
        return inner
    main = [[lazy(f"optimizer.{MAIN}.{m.name}") for m in members] for members in groups.values()]
    document = {"optimizer": inner, "fp32_from_fp16_params": main}
    return document | ({"grad_scaler": scaler_document(model.scaler)} if model.scaler else {})


def groups_document(model: WholeModel, names: Sequence[str]) -> list[dict[str, Any]]:
    """The groups, without the numbers of their parameters. names: those of a stage."""
    parameters = [Written(name, name) for name in names]
    return [_group(model, *key) for key in _groups(model, parameters)]


def _groups(
    model: WholeModel, parameters: Sequence[Written]
) -> dict[tuple[bool, bool], list[Written]]:
    """Parameters by whether weight decays and whether they have a learning rate of their own, in
    the order in which they are met."""
    groups: dict[tuple[bool, bool], list[Written]] = {}
    has_own_rate = model.options.get("decoupled_lr") is not None
    for parameter in parameters:
        shape = model.specs[f"model.{parameter.name}"].shape
        decays = len(shape) != 1 and not parameter.name.endswith(".bias")
        key = (decays, has_own_rate and is_embedding_or_output(parameter.name))
        groups.setdefault(key, []).append(parameter)
    return groups


def _group(model: WholeModel, decays: bool, has_own_rate: bool) -> dict[str, Any]:
    options = model.options
    rate = float(options["decoupled_lr"] if has_own_rate else options["lr"])
    least = options.get("decoupled_min_lr" if has_own_rate else "min_lr") or 0.0
    return {
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": has_own_rate,
        "max_lr": rate,
        "min_lr": float(least),
        "lr": rate,
        "weight_decay": float(options["weight_decay"]) if decays else 0.0,
        "betas": (float(options["adam_beta1"]), float(options["adam_beta2"])),
        "eps": float(options["adam_eps"]),
        "bias_correction": True,
        "step": model.num_updates,
    }


def scaler_document(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of the scale of the loss, from what a checkpoint of ours keeps of it."""
    scale = torch.tensor([float(state["scale"])], dtype=torch.float32)
    return {
        "scale": LazyTensor.of(scale),
        "growth_tracker": int(state["growth_tracker"]),
        "hysteresis_tracker": int(state["hysteresis_tracker"]),
    }
