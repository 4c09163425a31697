"""Fully sharded data parallelism: weights, gradients and state over the ranks (ZeRO-2 and 3), by
torch's `fully_shard` (FSDP2).

Each rank keeps some rows of each parameter, in fp32. A module that is a unit gathers its own in the
number format of the run before its forward pass and frees them after it (optim_grads_params), or
after the step's last backward pass (optim_grads). Each backward pass adds the sum of its gradients
over the ranks to the rank's rows. So the fp32 rows are the main parameters of a 16-bit run: what
the model sees is their rounded copy.

A gradient is summed over the ranks in every micro-batch, then over micro-batches; `DataParallel`
does it the other way round. Over two ranks and one micro-batch both have the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from trainyard.parallel.data.buffers import Member
from trainyard.parallel.shard_groups import ShardGroups
from trainyard.parallel.sharding import HeldRows, copy_marks, held_part, mark_rows

if TYPE_CHECKING:  # a second that every training would take to start, and few shard so
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSharding:
    """How modules are sharded."""

    params_dtype: torch.dtype
    """Number format of the weights that the model computes with."""
    grads_dtype: torch.dtype
    """Number format in which gradients of a micro-batch are summed over the ranks."""
    reshard_after_forward: bool
    """Free gathered weights after the forward pass of a unit, and gather them again for its
    backward pass."""
    device: torch.device

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """These number formats for torch."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(
            param_dtype=self.params_dtype,
            reduce_dtype=self.grads_dtype,
            cast_forward_inputs=False,
        )


class FullyShardedModel:
    """A model whose units `fully_shard` took over. Shared by its parts (`FullyShardedPart`), which
    a step calls; each call here may come once from each of them."""

    def __init__(self, model: nn.Module, sharding: FullSharding) -> None:
        self._model = model
        self.sharding = sharding
        self._modules: list[FSDPModule] = []

    def shard(
        self, units: Sequence[nn.Module], groups: ShardGroups, ignored: Iterable[nn.Parameter] = ()
    ) -> list[Member]:
        """Make these modules units, the innermost first. Returns the parameters that they took,
        sharded, in the order of the model; those that are frozen are left out. ignored: parameters
        that stay whole."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        staying = set(ignored)
        whole = dict(self._model.named_parameters())
        before = {name: p for name, p in whole.items() if p not in staying}
        mesh = mesh_of(groups, self.sharding.device)
        for unit in units:
            self._widen(unit, staying)
            fully_shard(
                unit,
                mesh=mesh,
                # None: but for the outermost unit, which backward needs at once.
                reshard_after_forward=None if self.sharding.reshard_after_forward else False,
                mp_policy=self.sharding.policy,
                ignored_params=staying,
            )
            assert isinstance(unit, FSDPModule)
            self._arrange(unit)
        after = dict(self._model.named_parameters())
        members = []
        for name, parameter in before.items():
            if (sharded := after[name]) is not parameter:
                copy_marks(parameter, sharded)
                _mark_rows(sharded, groups, self.sharding.params_dtype)
                if sharded.requires_grad:
                    members.append(Member(name, sharded))
        return members

    def _widen(self, unit: nn.Module, staying: set[nn.Parameter]) -> None:
        """Move what a unit is about to take to the device, in fp32."""
        for parameter in unit.parameters():
            if parameter not in staying and not hasattr(parameter, "to_local"):
                parameter.data = parameter.data.to(self.sharding.device, torch.float32)

    def _arrange(self, unit: FSDPModule) -> None:
        """Plain sums: the caller scales the losses."""
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        self._modules.append(unit)

    def finish_building(self) -> None:
        """All units are made: let stages run, which call `forward_step`."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        step = getattr(self._model, "forward_step", None)
        if step is None:
            return

        @wraps(step)
        def forward_step(*args: Any, **named: Any) -> Any:
            output = step(*args, **named)
            # Torch has a hook on what comes out, which is lost where a view is changed in place.
            return output.clone() if isinstance(output, Tensor) else output

        self._model.forward_step = forward_step  # type: ignore[assignment]
        register_fsdp_forward_method(self._model, "forward_step")

    def arrange_backward(self, *, is_last: bool) -> None:
        """For the backward passes to come: whether the next is the step's last."""
        for module in self._modules:
            module.set_requires_all_reduce(is_last, recurse=False)
            frees = is_last or self.sharding.reshard_after_forward
            module.set_reshard_after_backward(frees, recurse=False)

    def reshard(self) -> None:
        """Free gathered weights: parameters are the rank's rows again."""
        for module in self._modules:
            module.reshard()


class FullyShardedPart:
    """The parameters of a fully sharded model that one set of ranks shards: to the optimizer what
    `DataParallel` is."""

    is_sharded = True

    def __init__(
        self,
        model: FullyShardedModel,
        members: Sequence[Member],
        groups: ShardGroups,
        *,
        of_experts: bool = False,
    ) -> None:
        """of_experts: the parameters are those of routed experts."""
        self.members = list(members)
        self.shard_group, self.of_experts = groups.shard, of_experts
        self.params_dtype = model.sharding.params_dtype
        self.gather = _Freed(model)
        self._model = model

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        for member in self.members:
            member.parameter.grad = None
        self._model.arrange_backward(is_last=False)

    def sync_on_next_backward(self) -> None:
        """The backward pass that comes next is the step's last through these parameters."""
        self._model.arrange_backward(is_last=True)

    def finish(self) -> None:
        """Backward has summed all; free what the step kept."""
        self._model.reshard()

    def grad_of(self, parameter: nn.Parameter) -> Tensor:
        """The gradient of this rank's rows; zeros if the last step did not reach it."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad.to_local()  # type: ignore[attr-defined,no-any-return]


class _Freed:
    """Stands in for ParameterGather: units gather themselves."""

    is_rounded = False
    """No weight was sent in 8 bits."""

    def __init__(self, model: FullyShardedModel) -> None:
        self._model = model

    def install(self, model: nn.Module, units: Iterable[nn.Module] | None = None) -> None:
        """Do nothing: `fully_shard` has its own hooks."""

    def begin(self) -> None:
        """Parameters were updated: nothing gathered may be used again."""
        self._model.reshard()

    def finish(self) -> None:
        """Let others read this rank's rows."""
        self._model.reshard()

    def finish_exactly(self) -> None:
        """Do nothing: weights are sent in their own format."""


def mesh_of(groups: ShardGroups, device: torch.device) -> DeviceMesh:
    """The ranks as torch's mesh: those that share the rows; before them, those with copies."""
    assert groups.shard is not None
    if groups.copies is None:
        return DeviceMesh.from_group(groups.shard, device.type)
    mesh = torch.tensor(groups.instances)
    both: list[ProcessGroup] = [groups.copies, groups.shard]
    return DeviceMesh.from_group(both, device.type, mesh, mesh_dim_names=("copies", "shard"))


def _mark_rows(parameter: nn.Parameter, groups: ShardGroups, dtype: torch.dtype) -> None:
    """Torch cuts rows as `torch.chunk` does: all pieces but the last as long as the first."""
    rows = -(-parameter.shape[0] // groups.num_shards)
    first = min(groups.shard_rank * rows, parameter.shape[0])
    stop = min(first + rows, parameter.shape[0])
    mark_rows(parameter, HeldRows(first, stop, dtype))
    local, _ = held_part(parameter)
    assert local.shape[0] == stop - first, (local.shape, first, stop)
