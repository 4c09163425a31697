"""Memory of the most loaded device, and the nearest layouts that fit --gpu-memory-gib.

Pure functions. A device counts as full at nine tenths: kernel workspaces, communication buffers and
fragmentation need the rest, and no formula counts them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.plan.config import PlanConfig
from trainyard.errors import ConfigError
from trainyard.models.costs.memory import ActivationMemory, activation_memory, count_parameters
from trainyard.models.costs.memory_detail import DetailedMemory, detailed_memory
from trainyard.models.parallel_layout import BYTES_OF, MOMENT_BYTES, ParameterBytes

GIBIBYTE = 2**30
USABLE = 0.9
"""Share of a device's memory for everything that the formulas count."""

MAX_TENSOR_PARALLEL = 8
"""Devices of one machine: alternatives shard a layer over no more, unless the config does."""

MAX_ALTERNATIVES = 3

MAX_DOUBLINGS = 6
"""How often the search doubles the number of devices."""

MODEL_RANKS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A layout that fits."""

    changes: dict[str, Any]
    """Options that differ from the config."""
    bytes: float
    distance: float
    """Sum of doublings and halvings; changes that cost speed weigh more."""

    def __str__(self) -> str:
        flags = " ".join(_as_flag(name, value) for name, value in self.changes.items())
        return f"{flags} ({self.bytes / GIBIBYTE:.1f} GiB)"


# --- memory -------------------------------------------------------------------------------------


def memory_bytes(config: PlanConfig) -> dict[str, float]:
    """Memory of the most loaded device by the upstream formulas, kind by kind, and the total."""
    counts = count_parameters(config.model, config.rows, config.layout())
    each = parameter_bytes(config)
    memory = {
        "parameters": counts.most_loaded_shard * each.weight,
        "gradients": counts.most_loaded_shard * each.gradient,
        "optimizer": counts.most_loaded_shard * each.state,
        "activations": activations_of(config).total,
    }
    return {**memory, "total": sum(memory.values())}


def parameter_bytes(config: PlanConfig) -> ParameterBytes:
    """Bytes of a parameter on a device, with gradients and moments in the formats that are asked
    for. Context-parallel ranks hold the same weights, so these are sharded over them too."""
    layout, each = config.layout(), BYTES_OF[config.number_format]
    shards = layout.shards(layout.dp * layout.cp)
    state = (each.state - MOMENT_BYTES + layout.moment_bytes) * (1 - layout.offloaded)
    return ParameterBytes(
        each.weight / shards.parameters,
        min(each.gradient, layout.gradient_bytes) / shards.gradients,
        state / shards.optimizer,
    )


def activations_of(config: PlanConfig) -> ActivationMemory:
    """Activations by the upstream formulas, which lack context parallelism: a device holds its part
    of every sequence."""
    whole = activation_memory(config.model, config.rows, config.layout())
    cp = config.context_parallel_size
    return dataclasses.replace(whole, per_layer=whole.per_layer / cp, total=whole.total / cp)


def detail_of(config: PlanConfig) -> DetailedMemory | None:
    """Memory tensor by tensor, as trainyard allocates it; None with FP8, which it lacks."""
    if config.fp8_format is not None:
        return None
    layout = config.layout()
    if config.precision().keeps_gradients(
        config.optimizer,
        num_microbatches=config.num_microbatches,
        world_size=config.num_devices,
    ):
        width = 4 if config.number_format == "fp32" else 2
        layout = dataclasses.replace(layout, gradient_bytes=width)
    return detailed_memory(config.model, config.rows, layout)


def device_bytes(config: PlanConfig) -> float:
    """Memory of the most loaded device: tensor by tensor, or by the upstream formulas."""
    detail = detail_of(config)
    return memory_bytes(config)["total"] if detail is None else detail.total


# --- alternatives -------------------------------------------------------------------------------


def check_fit(config: PlanConfig) -> None:
    """Refuse a layout that needs more than `gpu_memory_gib`, and name the nearest that fit."""
    if config.gpu_memory_gib is None:
        return
    usable = USABLE * config.gpu_memory_gib * GIBIBYTE
    needed = device_bytes(config)
    if needed <= usable:
        return
    found = nearest_that_fit(config, usable)
    hint = "; or ".join(map(str, found))
    nearest = f"the nearest that fit on as many devices: {hint}"
    advice = nearest if found else _more_devices(config, usable)
    raise ConfigError(
        f"this layout needs {needed / GIBIBYTE:.1f} GiB on its most loaded device, and "
        f"--gpu-memory-gib {config.gpu_memory_gib:g} leaves {usable / GIBIBYTE:.1f} GiB; {advice}"
    )


def _more_devices(config: PlanConfig, usable: float) -> str:
    """Advice: the fewest devices, by doubling, on which some layout fits."""
    for doublings in range(1, MAX_DOUBLINGS + 1):
        num_devices = config.num_devices << doublings
        if found := nearest_that_fit(config, usable, 1, num_devices):
            return f"none fits on as many devices; the nearest on more: {found[0]}"
    return f"none fits on up to {config.num_devices << MAX_DOUBLINGS} devices"


def nearest_that_fit(
    config: PlanConfig, usable: float, most: int = MAX_ALTERNATIVES, num_devices: int | None = None
) -> list[Alternative]:
    """Layouts over the same number of devices, or over `num_devices`, with the same global batch,
    by distance."""
    devices = num_devices or config.num_devices
    fitting: list[Alternative] = []
    for changes, distance in sorted(_changes(config, devices), key=lambda found: found[1]):
        if len(fitting) == most:
            break
        if any(_contains(changes, known.changes) for known in fitting):
            continue  # a simpler change fits already
        try:
            other = _changed(config, changes)
            needed = device_bytes(other)
        except ConfigError:
            continue
        if needed <= usable:
            fitting.append(Alternative(changes=changes, bytes=needed, distance=distance))
    return fitting


def _changes(config: PlanConfig, devices: int) -> Iterator[tuple[dict[str, Any], float]]:
    """Every set of changes over that many devices, with its distance."""
    tp = config.tensor_model_parallel_size
    sizes = {
        "tensor_model_parallel_size": _powers(max(tp, min(MAX_TENSOR_PARALLEL, devices))),
        "pipeline_model_parallel_size": _powers(min(devices, config.model.all_layers)),
        "context_parallel_size": _powers(devices),
        "micro_batch_size": _halves(config.micro_batch_size),
    }
    switches = {
        "use_distributed_optimizer": (config.use_distributed_optimizer, True),
        "recompute_granularity": (config.model.recompute, "full"),
    }
    for values in itertools.product(*sizes.values(), *map(dict.fromkeys, switches.values())):
        wanted: dict[str, Any] = dict(zip((*sizes, *switches), values, strict=True))
        ranks = math.prod(wanted[name] for name in MODEL_RANKS)
        if ranks > devices or devices % ranks:
            continue
        changes, distance = _difference(config, wanted)
        if devices != config.num_devices:
            changes = {"world_size": devices, **changes}
        if changes:
            yield changes, distance


COST = {
    "tensor_model_parallel_size": 1.0,
    "pipeline_model_parallel_size": 1.1,
    "context_parallel_size": 1.2,
    "micro_batch_size": 0.6,
    "use_distributed_optimizer": 0.2,  # as fast, with the same weights
    "recompute_granularity": 1.5,  # a third more arithmetic
}


def _difference(config: PlanConfig, wanted: dict[str, Any]) -> tuple[dict[str, Any], float]:
    changes: dict[str, Any] = {}
    distance = 0.0
    for name, value in wanted.items():
        given = config.model.recompute if name == "recompute_granularity" else getattr(config, name)
        if value == given:
            continue
        changes[name] = value
        is_size = isinstance(value, int) and not isinstance(value, bool)
        distance += COST[name] * (abs(math.log2(value / given)) if is_size else 1)
    return changes, distance


def _changed(config: PlanConfig, changes: dict[str, Any]) -> PlanConfig:
    """The config with the changes. Raises ConfigError if the model does not allow the layout."""
    own = {name: value for name, value in changes.items() if name != "recompute_granularity"}
    own.setdefault("world_size", config.num_devices)
    model = config.model
    if "recompute_granularity" in changes:
        model = dataclasses.replace(
            model,
            recompute_activations=False,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        )
    tensor_parallel = changes.get("tensor_model_parallel_size", config.tensor_model_parallel_size)
    if changes.get("pipeline_model_parallel_size") == 1:  # no schedule to interleave
        own["num_layers_per_virtual_pipeline_stage"] = None
        own["num_virtual_stages_per_pipeline_rank"] = None
        own["microbatch_group_size_per_virtual_pipeline_stage"] = None
    return dataclasses.replace(
        config,
        model=model,
        data_parallel_size=None,
        global_batch_size=config.global_batch,
        sequence_parallel=config.sequence_parallel and tensor_parallel > 1,
        **own,
    )


def _contains(changes: dict[str, Any], simpler: dict[str, Any]) -> bool:
    return all(changes.get(name) == value for name, value in simpler.items())


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())]


def _halves(size: int) -> list[int]:
    return sorted({max(1, size >> shift) for shift in range(size.bit_length())})


def _as_flag(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return flag
    extra = " --recompute-method uniform --recompute-num-layers 1" if value == "full" else ""
    return f"{flag} {value}{extra}"
