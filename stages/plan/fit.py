"""Whether a layout fits the memory of its devices, and the nearest ones that do.

Pure; the arithmetic is that of the plan. A device is taken as full at nine tenths: workspaces of
kernels, communication buffers and fragmentation are counted nowhere and need the rest."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.plan.config import PlanConfig
from trainyard.errors import ConfigError
from trainyard.models.gpt.memory import activation_memory, count_parameters
from trainyard.models.gpt.memory_detail import detailed_memory
from trainyard.models.layout import GRADIENT_BYTES, PARAMETER_BYTES

GIBIBYTE = 2**30
USABLE = 0.9
"""Of a device's memory, for what can be counted."""

MOST_TENSOR_PARALLEL = 8
"""Further than the devices of one machine a layer is not cut unless it was asked for."""

NAMED = 3

MOST_DOUBLINGS = 6
"""Of the devices there are, in search of a number on which something fits."""

MODEL_RANKS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A layout that fits."""

    changes: dict[str, Any]
    """Options that differ from what was asked for."""
    bytes: float
    distance: float
    """Doublings and halvings, with what costs speed counted higher."""

    def __str__(self) -> str:
        flags = " ".join(_as_flag(name, value) for name, value in self.changes.items())
        return f"{flags} ({self.bytes / GIBIBYTE:.1f} GiB)"


def device_bytes(config: PlanConfig) -> float:
    """Of the most loaded device: tensor by tensor, or by the formulas that know experts."""
    model, vocab, layout = config.model, config.padded_vocab_size, config.layout()
    if not config.moe.enabled:
        return detailed_memory(model, vocab, layout).total
    shard = count_parameters(model, vocab, layout, config.moe).most_loaded_shard
    optimizer = dataclasses.replace(layout, dp=layout.dp * layout.cp).optimizer_bytes_per_parameter
    activations = activation_memory(model, vocab, layout).total / config.context_parallel_size
    return shard * (PARAMETER_BYTES + GRADIENT_BYTES + optimizer) + activations


def check_fit(config: PlanConfig) -> None:
    """Refuse a layout that needs more than `gpu_memory_gib`, naming the nearest that do not."""
    if config.gpu_memory_gib is None:
        return
    usable = USABLE * config.gpu_memory_gib * GIBIBYTE
    needed = device_bytes(config)
    if needed <= usable:
        return
    found = nearest_that_fit(config, usable)
    hint = "; or ".join(map(str, found))
    advice = f"the nearest that fit on as many: {hint}" if found else _more_devices(config, usable)
    raise ConfigError(
        f"this layout needs {needed / GIBIBYTE:.1f} GiB on its most loaded device, and of "
        f"--gpu-memory-gib {config.gpu_memory_gib:g} so many as {usable / GIBIBYTE:.1f} can be "
        f"counted on; {advice}"
    )


def _more_devices(config: PlanConfig, usable: float) -> str:
    """The fewest devices, of the doublings of those there are, on which some layout fits."""
    for doublings in range(1, MOST_DOUBLINGS + 1):
        num_devices = config.num_devices << doublings
        if found := nearest_that_fit(config, usable, 1, num_devices):
            return f"none fits on as many; the nearest on more: {found[0]}"
    return f"none fits, nor on any number up to {config.num_devices << MOST_DOUBLINGS} devices"


def nearest_that_fit(
    config: PlanConfig, usable: float, most: int = NAMED, num_devices: int | None = None
) -> list[Alternative]:
    """Layouts over as many devices, or over `num_devices`, with the same samples in a step, in
    order of distance."""
    devices = num_devices or config.num_devices
    fitting: list[Alternative] = []
    for changes, distance in sorted(_changes(config, devices), key=lambda found: found[1]):
        if len(fitting) == most:
            break
        if any(_contains(changes, known.changes) for known in fitting):
            continue  # something simpler did already
        try:
            other = _changed(config, changes)
            needed = device_bytes(other)
        except ConfigError:
            continue
        if needed <= usable:
            fitting.append(Alternative(changes=changes, bytes=needed, distance=distance))
    return fitting


def _changes(config: PlanConfig, devices: int) -> Iterator[tuple[dict[str, Any], float]]:
    """Every set of changes over so many devices, with its distance."""
    tp = config.tensor_model_parallel_size
    sizes = {
        "tensor_model_parallel_size": _powers(max(tp, min(MOST_TENSOR_PARALLEL, devices))),
        "pipeline_model_parallel_size": _powers(min(devices, config.model.num_layers)),
        "context_parallel_size": _powers(devices),
        "micro_batch_size": _halves(config.micro_batch_size),
    }
    switches = {
        "use_distributed_optimizer": (config.use_distributed_optimizer, True),
        "recompute_granularity": (config.model.recompute, "full"),
    }
    for values in itertools.product(*sizes.values(), *map(dict.fromkeys, switches.values())):
        asked: dict[str, Any] = dict(zip((*sizes, *switches), values, strict=True))
        ranks = math.prod(asked[name] for name in MODEL_RANKS)
        if ranks > devices or devices % ranks:
            continue
        changes, distance = _difference(config, asked)
        if devices != config.num_devices:
            changes = {"world_size": devices, **changes}
        if changes:
            yield changes, distance


COST = {
    "tensor_model_parallel_size": 1.0,
    "pipeline_model_parallel_size": 1.1,
    "context_parallel_size": 1.2,
    "micro_batch_size": 0.6,
    "use_distributed_optimizer": 0.2,  # no slower, and the same weights
    "recompute_granularity": 1.5,  # a third more arithmetic
}


def _difference(config: PlanConfig, asked: dict[str, Any]) -> tuple[dict[str, Any], float]:
    changes: dict[str, Any] = {}
    distance = 0.0
    for name, value in asked.items():
        given = config.model.recompute if name == "recompute_granularity" else getattr(config, name)
        if value == given:
            continue
        changes[name] = value
        is_size = isinstance(value, int) and not isinstance(value, bool)
        distance += COST[name] * (abs(math.log2(value / given)) if is_size else 1)
    return changes, distance


def _changed(config: PlanConfig, changes: dict[str, Any]) -> PlanConfig:
    """The configuration with the changes; ConfigError where it cannot be cut so."""
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
    if changes.get("pipeline_model_parallel_size") == 1:  # nothing is interleaved any more
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
