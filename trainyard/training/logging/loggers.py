"""Where figures of a run go: the loggers, ours and those of installed packages.

A package brings a logger of its own by an entry point:

    [project.entry-points."trainyard.loggers"]
    in-house = "our_package.logging:make"

where `make(config: LoggingConfig, info: RunInfo) -> Callback | None` returns what is told of
every step, or None where the options do not ask for it; `--loggers in-house` then calls it. A
logger that fails - a full disk, a network that is gone - is warned of once and costs its own lines
only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import entry_points

from trainyard.errors import ConfigError, TrainyardError
from trainyard.training.logging import console, jsonl, tensorboard, wandb
from trainyard.training.logging.run_info import RunInfo
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState
from trainyard.training.options.logging import LoggingConfig

log = logging.getLogger(__name__)

GROUP = "trainyard.loggers"

Factory = Callable[[LoggingConfig, RunInfo], Callback | None]

LOGGERS: dict[str, Factory] = {
    "console": console.make,
    "jsonl": jsonl.make,
    "tensorboard": tensorboard.make,
    "wandb": wandb.make,
}
"""Ours: each is there when its own options ask for it. They are entry points too, so that a
package can replace one."""


def build_sinks(config: LoggingConfig, info: RunInfo) -> list[Guarded]:
    """The loggers that the options ask for; on the one rank that logs.

    Raises ConfigError for a name that no package offers, or a logger whose library is missing."""
    factories = {**LOGGERS, **{name: _installed(name) for name in config.loggers}}
    made = ((name, _made(name, make, config, info)) for name, make in factories.items())
    return [Guarded(name, sink) for name, sink in made if sink is not None]


def _made(name: str, make: Factory, config: LoggingConfig, info: RunInfo) -> Callback | None:
    try:
        return make(config, info)
    except TrainyardError:
        raise
    except Exception as error:  # a plug-in must not cost the run
        log.warning("logger %s could not be set up, the run goes without it: %r", name, error)
        return None


def _installed(name: str) -> Factory:
    """The logger of that name: a package's before ours."""
    found = [point for point in entry_points(group=GROUP) if point.name == name]
    others = [point for point in found if not point.value.startswith("trainyard.")]
    if others:
        try:
            factory: Factory = others[0].load()
        except Exception as error:
            raise ConfigError(
                f"--loggers {name}: {others[0].value} could not be imported: {error!r}"
            ) from error
        return factory
    if name in LOGGERS:
        return LOGGERS[name]
    known = sorted({*LOGGERS, *(point.name for point in entry_points(group=GROUP))})
    raise ConfigError(
        f"--loggers {name}: no installed package has such an entry point in {GROUP}; there are "
        f"{', '.join(known)}"
    )


class Guarded(Callback):
    """A logger that may fail without harm."""

    def __init__(self, name: str, sink: Callback) -> None:
        self.name = name
        self.num_failures = 0
        self._sink = sink
        self._first = ""

    def begin(self, state: TrainState) -> None:
        """Pass it on."""
        self._try(lambda: self._sink.begin(state), state.step)

    def after_step(self, event: StepEvent) -> None:
        """Pass it on."""
        self._try(lambda: self._sink.after_step(event), event.record.step)

    def end(self) -> None:
        """Pass it on, and log the number of failures."""
        self._try(self._sink.end, None)
        self._report()

    def failed(self) -> None:
        """Pass it on, and log the number of failures."""
        self._try(self._sink.failed, None)
        self._report()

    def _try(self, call: Callable[[], None], step: int | None) -> None:
        try:
            call()
        except Exception as error:
            self.num_failures += 1
            if self.num_failures == 1:
                at = "at its end" if step is None else f"at step {step}"
                self._first = f"{at}: {error!r}"
                log.warning(
                    "logger %s failed %s; training continues; further failures are only counted",
                    self.name,
                    self._first,
                )

    def _report(self) -> None:
        if self.num_failures:
            log.warning(
                "logger %s failed %d times, first %s; its record of this run has gaps",
                self.name,
                self.num_failures,
                self._first,
            )
