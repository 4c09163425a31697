"""What a training step makes the host and the device do, counted on a CPU.

The run is that of `trainyard.training.pretrain` with compiled layers. The compiler goes its whole
way except for the last part: its kernels are written and counted, not built, and torch's operators
compute in their place. So no C++ compiler is needed, and the counts are those of any machine: they
depend on the model, our code and the release of torch. A GPU gets other kernels, out of the same
graphs."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.pretrain import pretrain

ROOT = Path(__file__).resolve().parents[3]
WARMUP = 2
"""Steps before the one that is counted: the first compiles, the second may compile again."""

WAITS = {
    *("_local_scalar_dense", "equal"),  # a number for the host: item(), float(), if tensor
    *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
}
"""Operators after which the host knows something that the device computed."""
METHODS = ("tolist", "numpy", "cpu")
"""Methods that wait for a device, and on a CPU call no operator."""


@dataclass
class StepCounts:
    """Counts of one step, and of all that was compiled up to its end."""

    graph_breaks: Counter[str] = field(default_factory=Counter)
    """Reasons, over the run."""
    graphs: int = 0
    """Compiled graphs of the run, forward and backward each."""
    kernels: int = 0
    """Loops that compiled graphs run, as the compiler fused them."""
    products: int = 0
    """Operators that compiled graphs call as they are: matrix products, attention."""
    operators: Counter[str] = field(default_factory=Counter)
    """Operators outside of compiled graphs that are no views, by file."""
    waits: Counter[str] = field(default_factory=Counter)
    """Where the host asks for a number, as `file function operator`. Some are of tensors that are
    on the host on a GPU machine, too."""

    def document(self) -> dict[str, int | dict[str, int]]:
        """As it is pinned."""
        return {
            "graph_breaks": dict(self.graph_breaks),
            "graphs": self.graphs,
            "kernels": self.kernels,
            "products": self.products,
            "operators": dict(sorted(self.operators.items())),
            "waits": dict(sorted(self.waits.items())),
        }


def place() -> str:
    """The file and function of the source that runs, whatever it has called in torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = Path(frame.f_code.co_filename)
        if file != Path(__file__) and file.is_relative_to(ROOT) and ".venv" not in file.parts:
            return f"{file.relative_to(ROOT)} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


class Watch(TorchDispatchMode):
    """Counts the operators that run outside of compiled graphs."""

    def __init__(self, counts: StepCounts) -> None:
        super().__init__()
        self._counts = counts

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled graphs stay compiled."""
        return True

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count an operator."""
        name = func._schema.name.split("::")[1]
        if name in WAITS or chooses_by_mask(name, args):
            self._counts.waits[f"{place()} {name}"] += 1
        elif not func.is_view:
            self._counts.operators[place().split()[0]] += 1
        return func(*args, **(kwargs or {}))


def chooses_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask: how many it chooses is only known on the device."""
    if name not in ("index", "repeat_interleave"):
        return False
    if name == "repeat_interleave":
        return True
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])


class Compiler:
    """Takes the place of the last part of inductor: counts kernels, and computes without them."""

    def __init__(self, counts: StepCounts) -> None:
        self._counts = counts
        self.is_counting = False

    def compile(self, gm: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        """A compiled graph, by torch's operators."""
        from torch._dynamo.utils import counters
        from torch._inductor import metrics
        from torch._inductor.compile_fx import compile_fx_inner

        plain = copy.deepcopy(gm)
        kernels, products = metrics.generated_kernel_count, counters["inductor"]["extern_calls"]
        compile_fx_inner(gm, inputs, **options)
        kernels = metrics.generated_kernel_count - kernels
        products = counters["inductor"]["extern_calls"] - products
        self._counts.graphs += 1

        def run(args: list[Any]) -> Any:
            if self.is_counting:
                self._counts.kernels += kernels
                self._counts.products += products
            own = list(args)
            args.clear()
            with _disable_current_modes():
                return plain(*own)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


@contextmanager
def patched_compiler(compiler: Compiler) -> Iterator[None]:
    """torch.compile with that compiler, without caches and without a build of any kernel."""
    from torch._inductor import async_compile, compile_fx, config, cpp_builder, cpu_vec_isa

    alone = partial(compile_fx.compile_fx, inner_compile=compiler.compile)
    settings = {"force_disable_caches": True, "cpp.threads": 1}
    torch._dynamo.reset()
    with (
        config.patch(settings),
        torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit),
        mock.patch.object(compile_fx, "compile_fx", alone),
        mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", return_value=None),
        # These look for a compiler, which need not be there.
        mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", return_value=[]),
        mock.patch.object(cpp_builder, "is_msvc_cl", return_value=False),
        mock.patch.object(cpp_builder, "is_gcc", return_value=False),
    ):
        yield
    torch._dynamo.reset()


class OneStep(Callback):
    """Counts one step of a run, from the end of the step before it to its own."""

    def __init__(self, counts: StepCounts, compiler: Compiler) -> None:
        self._counts, self._compiler = counts, compiler
        self._stack = ExitStack()

    def after_step(self, event: StepEvent) -> None:
        """Begin or end."""
        if event.record.step == WARMUP:
            for name in METHODS:
                method = self._counted(name, getattr(Tensor, name))
                self._stack.enter_context(mock.patch.object(Tensor, name, method))
            self._stack.enter_context(Watch(self._counts))
        if event.record.step == WARMUP + 1:
            self._stack.close()
        self._compiler.is_counting = event.record.step == WARMUP

    def failed(self) -> None:
        """End."""
        self._stack.close()

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
            self._counts.waits[f"{place()} {name}"] += 1
            return method(tensor, *args, **options)

        return counted


def count_step(config: PretrainConfig) -> StepCounts:
    """The counts of the step after WARMUP of a run."""
    from torch._dynamo.utils import counters

    counts = StepCounts()
    compiler = Compiler(counts)
    with patched_compiler(compiler):
        counters.clear()
        pretrain(None, None, config, callbacks=[OneStep(counts, compiler)])
        for reason, number in counters["graph_break"].items():
            counts.graph_breaks[reason.split("\n")[0]] += number
    return counts
