"""States of Megatron-LM's optimizers, found by the parameter that they are of.

    plain, 16 bits   {"optimizer": {"state": {number: {exp_avg, exp_avg_sq}}, "param_groups"},
                      "fp32_from_fp16_params": [group: [tensor]], "grad_scaler"}
    plain, fp32      {"state", "param_groups"}
    distributed      {"optimizer": {"param_groups"}} and, in a file of its own, one vector of each
                     kind per buffer; before 2024-02 a list of them, one per bucket

Nothing there has a name. A plain optimizer numbers parameters group after group, in each in the
order in which the modules were made, which is also the order of the model dict; groups are those
with weight decay and those without. The distributed one lays them out in the reverse order. Where
that does not come out to the last shape, `Unknown` says why, and the weights go alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainyard.conversion.torch_save.pickles import Noted, TensorRef
from trainyard.optim.groups import is_embedding_or_output

MAIN = "param"
MOMENTS = ("exp_avg", "exp_avg_sq")

UNIT = 64
"""Parameters begin at multiples of this in the buffers of the distributed optimizer."""

HALF = ("float16", "bfloat16")


class Unknown(Exception):  # noqa: N818  # says what happened
    """The states cannot be told apart; the message says why."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of one file, in the order of the file."""

    name: str
    """Ours, in the whole model."""
    ref: TensorRef
    is_copy: bool = False
    """The end of a tied embedding that another stage has as well; its states are not read."""

    @property
    def has_decay(self) -> bool:
        """By Megatron's rule: neither a bias nor a vector."""
        return len(self.ref.shape) != 1 and not self.name.endswith(".bias")


States = dict[str, dict[str, TensorRef]]
"""By kind (param, exp_avg, exp_avg_sq), then by name."""


# --- the plain optimizer ----------------------------------------------------------------------


def plain_states(document: Any, parameters: Sequence[Parameter]) -> States:
    """The states in the `optimizer` of one file. parameters: of all its chunks."""
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
        raise Unknown(f"it is a {type(document).__name__}, of several optimizers or none")
    return document


def _members(
    groups: Sequence[Mapping[str, Any]], parameters: Sequence[Parameter]
) -> list[list[Parameter]]:
    """The parameters of each group."""
    decoupled = any(map(_has_own_rate, groups))
    keys = [_key_of_group(group, groups) for group in groups]
    if len(set(keys)) != len(keys):
        raise Unknown("two of its groups cannot be told apart")
    members: dict[tuple[bool, bool], list[Parameter]] = {key: [] for key in keys}
    for parameter in parameters:
        key = (parameter.has_decay, decoupled and is_embedding_or_output(parameter.name))
        if key not in members:
            raise Unknown(f"no group of it is that of {parameter.name}")
        members[key].append(parameter)
    for key, group in zip(keys, groups, strict=True):
        if not isinstance(group.get("params"), list | tuple):
            raise Unknown("its groups do not say which parameters are theirs")
        if len(group["params"]) != len(members[key]):
            raise Unknown(
                f"a group has {len(group['params'])} parameters, and the model {len(members[key])}"
            )
    return [members[key] for key in keys]


def _key_of_group(
    group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> tuple[bool, bool]:
    """(weight decay, learning rate of its own). Releases before 2022 have two groups, with and
    without weight decay, in this order."""
    if group.get("lr_mult", 1.0) != 1.0 or group.get("is_expert_parallel"):
        raise Unknown("it has groups of other learning rates, or of experts")
    if "wd_mult" in group:
        return bool(group["wd_mult"]), _has_own_rate(group)
    if any(other.get("weight_decay") for other in groups):
        return bool(group.get("weight_decay")), False
    return group is groups[0], False


def _has_own_rate(group: Mapping[str, Any]) -> bool:
    """Of --decoupled-lr. Core 0.16 and later says it by another key."""
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
    if isinstance(value, Noted):
        return f"made by {value.source}, which is no function that makes tensors"
    return str(list(value.shape)) if isinstance(value, TensorRef) else "missing"


def _main_parameters(main: Any, members: list[list[Parameter]]) -> dict[str, TensorRef]:
    """fp32 copies: a list per group, of the 16-bit parameters alone."""
    found: dict[str, TensorRef] = {}
    if not isinstance(main, list) or len(main) != len(members):
        raise Unknown("its fp32 parameters are not in as many groups")
    for refs, group in zip(main, members, strict=True):
        halves = [parameter for parameter in group if parameter.ref.dtype in HALF]
        if len(halves) != len(group):
            raise Unknown("only some of its parameters are of 16 bits")
        if not isinstance(refs, list) or len(refs) != len(halves):
            raise Unknown("its fp32 parameters are not as many as the model's")
        for ref, parameter in zip(refs, halves, strict=True):
            if not isinstance(ref, TensorRef) or ref.shape != parameter.ref.shape:
                raise Unknown(f"its fp32 copy of {parameter.name} has another shape")
            if not parameter.is_copy:
                found[parameter.name] = ref
    return found


def num_updates(document: Any, read: Callable[[TensorRef], Tensor], iteration: int) -> int:
    """Updates made, the t of Adam's bias correction: of the groups (fused kernels), of the states
    (torch; `torch_dist` keeps it once for all), or the iteration where none says it. read: gives
    the values of a tensor."""
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
    """The states in a distrib_optim.pt; chunk by chunk the parameters of the model."""
    if isinstance(tree, list) and len(tree) == 1:
        tree = tree[0]
    if not isinstance(tree, Mapping):
        raise Unknown("it is of several optimizers")
    if any(number not in tree for number in range(len(chunks))) or len(chunks) in tree:
        raise Unknown("its buffers are not one for each chunk of the model")
    states: States = {MAIN: {}, **{kind: {} for kind in MOMENTS}}
    for number, parameters in enumerate(chunks):
        buffers = tree[number]
        if not isinstance(buffers, Mapping) or len(buffers) != 1:
            raise Unknown("it keeps parameters of several types")
        (vectors,) = buffers.values()
        _cut_vectors(states, vectors, parameters)
    if all(p.ref.dtype not in HALF for chunk in chunks for p in chunk):
        del states[MAIN]  # they are the weights themselves
    return states


def _cut_vectors(states: States, vectors: Any, parameters: Sequence[Parameter]) -> None:
    sizes = [parameter.ref.numel for parameter in parameters]
    if any(size % UNIT for size in sizes):
        raise Unknown(
            f"sizes that are no multiples of {UNIT} lie in it at places that depend on its buckets"
        )
    for kind, found in states.items():
        buckets = _buckets(vectors.get(kind) if isinstance(vectors, Mapping) else None)
        if not buckets:
            raise Unknown(f"it has no vector of {kind}")
        total = sum(bucket.numel for bucket in buckets)
        if total != sum(sizes):
            raise Unknown(f"its {kind} has {total} numbers for {sum(sizes)}")
        start, left = 0, list(buckets)
        for parameter in reversed(parameters):
            if start == left[0].numel:
                start = 0
                del left[0]
            if start + parameter.ref.numel > left[0].numel:
                raise Unknown(f"its {kind} of {parameter.name} lies in two buckets")
            if not parameter.is_copy:
                found[parameter.name] = left[0].flat_part(start, parameter.ref.shape)
            start += parameter.ref.numel


def _buckets(vectors: Any) -> list[TensorRef]:
    """One vector, or as before 2024-02 one for each bucket of gradients, in the same order; none
    where it is neither."""
    found = vectors if isinstance(vectors, list) else [vectors]
    sound = [v for v in found if isinstance(v, TensorRef) and v.stride == (1,) and v.numel]
    return sound if len(sound) == len(found) else []
