"""Finds the state of each parameter in Megatron-LM's optimizers, and writes such states.

    plain, 16 bits   {"optimizer": {"state": {number: {exp_avg, exp_avg_sq}}, "param_groups"},
                      "fp32_from_fp16_params": [group: [tensor]], "grad_scaler"}
    plain, fp32      {"state", "param_groups"}
    distributed      {"optimizer": {"param_groups"}} and, in a separate file, one vector of each
                     kind per buffer; before 2024-02 a list of them, one per bucket

States have no names, only positions. A plain optimizer numbers parameters group by group, within a
group in the order in which the modules were registered, which is also the order of the model dict.
The groups are parameters with weight decay and those without. The distributed optimizer stores
parameters in the reverse order. If one shape or size does not match, `Unknown` says why, and only
the weights are converted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainyard.conversion.megatron.model import WholeModel
from trainyard.conversion.torch_save.pickles import Recorded, TensorRef
from trainyard.conversion.torch_save.write import LazyTensor
from trainyard.models.gpt.checkpoint_names import EMBEDDING, EXPERT_BIAS
from trainyard.optim.groups import is_embedding_or_output

MAIN = "param"
log = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")

UNIT = 64
"""Parameters begin at multiples of this many elements in the distributed optimizer's buffers."""

HALF = ("float16", "bfloat16")


class Unknown(Exception):  # noqa: N818  # says what happened
    """States whose parameters cannot be identified; the message says why."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of one file, in the order of the file."""

    name: str
    """Our name, in the whole model."""
    ref: TensorRef
    is_copy: bool = False
    """Whether it is the last stage's copy of a tied embedding; its states are not read."""

    @property
    def has_decay(self) -> bool:
        """Whether weight decay applies. By Megatron-LM's rule: to neither biases nor vectors."""
        return len(self.ref.shape) != 1 and not self.name.endswith(".bias")


States = dict[str, dict[str, TensorRef]]
"""By kind (param, exp_avg, exp_avg_sq), then by name."""


# --- the plain optimizer ----------------------------------------------------------------------


def plain_states(document: Any, parameters: Sequence[Parameter]) -> States:
    """The states in the `optimizer` of one file. parameters: those of all its chunks."""
    document = _single(document)
    inner = document.get("optimizer", document.get("optimizer_state_dict", document))
    if not isinstance(inner, Mapping) or not isinstance(inner.get("state"), Mapping):
        raise Unknown("it has no table of states")
    groups = inner.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise Unknown("it has no groups of parameters")
    members = _members(groups, parameters)
    states: States = {kind: {} for kind in MOMENTS}
    for group, found in zip(groups, members, strict=True):
        for number, parameter in zip(group["params"], found, strict=True):
            _take_moments(states, inner["state"].get(number), parameter)
    main = document.get("fp32_from_fp16_params", document.get("fp32_from_fp16"))
    if main is not None:
        states[MAIN] = _main_parameters(main, members)
    return states


def _single(document: Any) -> Mapping[str, Any]:
    if isinstance(document, list) and len(document) == 1:
        document = document[0]
    if not isinstance(document, Mapping):
        raise Unknown(f"it is a {type(document).__name__}, not the table of one optimizer")
    return document


def _members(
    groups: Sequence[Mapping[str, Any]], parameters: Sequence[Parameter]
) -> list[list[Parameter]]:
    """The parameters of each group, in the order of the file."""
    decoupled = any(map(_has_own_rate, groups))
    keys = [_key_of_group(group, groups) for group in groups]
    if len(set(keys)) != len(keys):
        raise Unknown("two of its groups cannot be distinguished")
    members: dict[tuple[bool, bool], list[Parameter]] = {key: [] for key in keys}
    for parameter in parameters:
        key = (parameter.has_decay, decoupled and is_embedding_or_output(parameter.name))
        if key not in members:
            raise Unknown(f"it has no group for {parameter.name}")
        members[key].append(parameter)
    for key, group in zip(keys, groups, strict=True):
        if not isinstance(group.get("params"), list | tuple):
            raise Unknown("its groups do not list their parameters")
        if len(group["params"]) != len(members[key]):
            raise Unknown(
                f"a group has {len(group['params'])} parameters, but the model has "
                f"{len(members[key])} for it"
            )
    return [members[key] for key in keys]


def _key_of_group(
    group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> tuple[bool, bool]:
    """(has weight decay, has a separate learning rate). Releases before 2022 have two groups: first
    with weight decay, then without."""
    if group.get("lr_mult", 1.0) != 1.0 or group.get("is_expert_parallel"):
        raise Unknown("it has groups with other learning rates, or of experts")
    if "wd_mult" in group:
        return bool(group["wd_mult"]), _has_own_rate(group)
    if any(other.get("weight_decay") for other in groups):
        return bool(group.get("weight_decay")), False
    return group is groups[0], False


def _has_own_rate(group: Mapping[str, Any]) -> bool:
    """Whether the group has --decoupled-lr. Core 0.16 and later uses another key for it."""
    return bool(group.get("is_decoupled_lr")) or group.get("default_config") is False


def _take_moments(states: States, state: Any, parameter: Parameter) -> None:
    if not isinstance(state, Mapping):
        raise Unknown(f"it has no state of {parameter.name}")
    for kind in MOMENTS:
        ref = state.get(kind)
        if not isinstance(ref, TensorRef) or ref.shape != parameter.ref.shape:
            raise Unknown(f"its {kind} of {parameter.name} is {_shape_or_maker(ref)}")
        if not parameter.is_copy:
            states[kind][parameter.name] = ref


def _shape_or_maker(value: Any) -> str:
    if isinstance(value, Recorded):
        return f"made by {value.source}, which does not make tensors"
    return str(list(value.shape)) if isinstance(value, TensorRef) else "missing"


def _main_parameters(main: Any, members: list[list[Parameter]]) -> dict[str, TensorRef]:
    """The fp32 copies: a list per group, of 16-bit parameters only."""
    found: dict[str, TensorRef] = {}
    if not isinstance(main, list) or len(main) != len(members):
        raise Unknown(f"its fp32 parameters are not in {len(members)} groups")
    for refs, group in zip(main, members, strict=True):
        halves = [parameter for parameter in group if parameter.ref.dtype in HALF]
        if len(halves) != len(group):
            raise Unknown("only some of its parameters have 16 bits")
        if not isinstance(refs, list) or len(refs) != len(halves):
            raise Unknown(f"a group does not have {len(halves)} fp32 parameters, as the model has")
        for ref, parameter in zip(refs, halves, strict=True):
            if not isinstance(ref, TensorRef) or ref.shape != parameter.ref.shape:
                raise Unknown(f"its fp32 copy of {parameter.name} has another shape")
            if not parameter.is_copy:
                found[parameter.name] = ref
    return found


def num_updates(document: Any, read: Callable[[TensorRef], Tensor], iteration: int) -> int:
    """Updates made so far, the t of Adam's bias correction.

    From the groups (fused kernels) or the states (torch; `torch_dist` stores it once for all),
    otherwise the iteration. read: reads the values of a tensor."""
    try:
        single = _single(document)
    except Unknown:
        return iteration
    inner = single.get("optimizer", single.get("optimizer_state_dict", single))
    groups, state = (
        (inner.get("param_groups"), inner.get("state")) if isinstance(inner, Mapping) else ((), {})
    )
    groups = groups if isinstance(groups, list | tuple) else ()
    state = state if isinstance(state, Mapping) else {}
    tables = [table for table in (*groups, *state.values()) if isinstance(table, Mapping)]
    for step in (state.get("common_step"), *(table.get("step") for table in tables)):
        if isinstance(step, TensorRef) and step.numel == 1:
            step = float(read(step).item())
        if isinstance(step, float) and step.is_integer():
            step = int(step)
        if type(step) is int and step > 0:
            return step
    return iteration


# --- the distributed optimizer ----------------------------------------------------------------


def distributed_states(tree: Any, chunks: Sequence[Sequence[Parameter]]) -> States:
    """The states in a distrib_optim.pt. chunks: the model's parameters, chunk by chunk."""
    if isinstance(tree, list) and len(tree) == 1:
        tree = tree[0]
    if not isinstance(tree, Mapping):
        raise Unknown("it belongs to several optimizers")
    if any(number not in tree for number in range(len(chunks))) or len(chunks) in tree:
        raise Unknown(f"it does not have one buffer for each of the model's {len(chunks)} chunks")
    states: States = {MAIN: {}, **{kind: {} for kind in MOMENTS}}
    for number, parameters in enumerate(chunks):
        buffers = tree[number]
        if not isinstance(buffers, Mapping) or len(buffers) != 1:
            raise Unknown("it has parameters of several types")
        (vectors,) = buffers.values()
        _cut_vectors(states, vectors, parameters)
    if all(p.ref.dtype not in HALF for chunk in chunks for p in chunk):
        del states[MAIN]  # fp32 weights are their own copies
    return states


def _cut_vectors(states: States, vectors: Any, parameters: Sequence[Parameter]) -> None:
    sizes = [parameter.ref.numel for parameter in parameters]
    if any(size % UNIT for size in sizes):
        raise Unknown(
            f"the sizes of its parameters are not all multiples of {UNIT}, so their places depend "
            "on its buckets"
        )
    for kind, found in states.items():
        buckets = _buckets(vectors.get(kind) if isinstance(vectors, Mapping) else None)
        if not buckets:
            raise Unknown(f"it has no vector of {kind}")
        total = sum(bucket.numel for bucket in buckets)
        if total != sum(sizes):
            raise Unknown(f"its {kind} has {total} numbers, but its parameters have {sum(sizes)}")
        start, left = 0, list(buckets)
        for parameter in reversed(parameters):
            if start == left[0].numel:
                start = 0
                del left[0]
            if start + parameter.ref.numel > left[0].numel:
                raise Unknown(f"its {kind} of {parameter.name} would span two buckets")
            if not parameter.is_copy:
                found[parameter.name] = left[0].flat_part(start, parameter.ref.shape)
            start += parameter.ref.numel


def _buckets(vectors: Any) -> list[TensorRef]:
    """One vector, or before 2024-02 one for each bucket of gradients, in the same order; [] if it
    is neither."""
    found = vectors if isinstance(vectors, list) else [vectors]
    sound = [v for v in found if isinstance(v, TensorRef) and v.stride == (1,) and v.numel]
    return sound if len(sound) == len(found) else []


# --- writing ----------------------------------------------------------------------------------


HALF_SPECS = ("F16", "BF16")

OPTIONS = ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
"""Options of the run that the groups of Megatron-LM's optimizer contain."""


@dataclass(frozen=True, slots=True)
class Written:
    """A parameter to write to a file."""

    path: str
    """Its dotted path in the model dict of the file."""
    name: str
    """Our name, in the whole model."""


def has_optimizer(model: WholeModel, *, by_name: bool = False) -> bool:
    """Whether the states of the optimizer can be written; otherwise logs why not. by_name: to
    files that name the parameter of each state.

    A release (step 0) has none, without a message."""
    reason = _why_no_optimizer(model, by_name) if model.step else ""
    if reason:
        log.warning("the optimizer of %s is left out: %s", model.url, reason)
    return reason is None


def _why_no_optimizer(model: WholeModel, by_name: bool) -> str | None:
    config = model.config
    if config.model_type not in (("gpt", "bert", "retro") if by_name else ("gpt",)):
        known = "a GPT, BERT or Retro" if by_name else "a GPT"
        return f"only that of {known} is written"
    depths = config.mtp.mtp_num_layers
    if not by_name and (config.experts.enabled or config.latent.enabled or depths is not None):
        return "with experts, latents or multi-token prediction only --saver torch_dist writes it"
    names = trained_names(model)
    wanted = [f"optimizer.{kind}.{name}" for kind in MOMENTS for name in names]
    if any(
        name.startswith("model.") and spec.dtype in HALF_SPECS for name, spec in model.specs.items()
    ):
        wanted += [f"optimizer.{MAIN}.{name}" for name in names]
    missing = [name for name in wanted if name not in model.specs]
    if missing:
        return f"the source has no {missing[0]} and lacks {len(missing) - 1} more tensors"
    lacking = [option for option in OPTIONS if type(model.options.get(option)) not in (int, float)]
    if lacking:
        return f"the source does not have the run's --{lacking[0].replace('_', '-')}"
    return None if model.num_updates else "it has made no update yet"


def trained_names(model: WholeModel) -> list[str]:
    """The names of all parameters; the bias of a router's choice is none."""
    names = (name.removeprefix("model.") for name in model.specs if name.startswith("model."))
    return [name for name in names if not name.endswith(EXPERT_BIAS)]


def optimizer_document(
    model: WholeModel,
    parameters: Sequence[Written],
    lazy: Callable[[str], LazyTensor],
    in_model_order: bool = False,
) -> dict[str, Any]:
    """The `optimizer` of one file. lazy: this rank's part of a tensor, by our full name.
    in_model_order: order groups by their first parameter in the model, as for legacy models."""
    groups = _groups(model, parameters)
    if not in_model_order and model.options.get("decoupled_lr") is None:
        groups = dict(sorted(groups.items(), reverse=True))
    state: dict[int, dict[str, LazyTensor]] = {}
    param_groups: list[dict[str, Any]] = []
    for key, members in groups.items():
        numbers = list(range(len(state), len(state) + len(members)))
        for number, member in zip(numbers, members, strict=True):
            state[number] = {kind: lazy(f"optimizer.{kind}.{member.name}") for kind in MOMENTS}
        param_groups.append(_group(model, *key) | {"params": numbers})
    inner = {"state": state, "param_groups": param_groups}
    if model.specs[f"model.{EMBEDDING}"].dtype not in HALF_SPECS:
        return inner
    main = [[lazy(f"optimizer.{MAIN}.{m.name}") for m in members] for members in groups.values()]
    document = {"optimizer": inner, "fp32_from_fp16_params": main}
    return document | ({"grad_scaler": scaler_document(model.scaler)} if model.scaler else {})


def groups_document(
    model: WholeModel, names: Sequence[str], *, are_experts: bool = False
) -> list[dict[str, Any]]:
    """The groups, without the numbers of their parameters. names: the parameters of a stage.
    are_experts: those that expert-parallel ranks share."""
    parameters = [Written(name, name) for name in names]
    groups = [_group(model, *key) for key in _groups(model, parameters)]
    return [group | {"is_expert_parallel": are_experts} for group in groups]


def _groups(
    model: WholeModel, parameters: Sequence[Written]
) -> dict[tuple[bool, bool], list[Written]]:
    """Parameters by (has weight decay, has a separate learning rate), in the order of `parameters`;
    groups in the order of their first one."""
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
    """The loss scale for a file of Megatron-LM. state: `loss_scaler` of a trainyard checkpoint."""
    scale = torch.tensor([float(state["scale"])], dtype=torch.float32)
    return {
        "scale": LazyTensor.of(scale),
        "growth_tracker": int(state["growth_tracker"]),
        "hysteresis_tracker": int(state["hysteresis_tracker"]),
    }
