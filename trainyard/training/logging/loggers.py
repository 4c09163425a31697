"""The loggers of a run: built-in ones, and those of installed packages.

A package adds a logger by an entry point:

    [project.entry-points."trainyard.loggers"]
    in-house = "our_package.logging:make"

`--loggers in-house` then calls `make(config: LoggingConfig, info: RunInfo) -> Callback | None`. The
callback receives every step; None: the options do not enable it. A failure of a logger, such as a
full disk or a lost network, is logged once; only the lines of that logger are lost."""

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
"""Built-in loggers, each enabled by its own options. They are entry points too, so that a package
can replace one."""


def build_loggers(config: LoggingConfig, info: RunInfo) -> list[Guarded]:
    """The loggers that the options enable; called on rank 0.

    Raises ConfigError for a name that no package offers, or a logger whose library is missing."""
    factories = {**LOGGERS, **{name: _installed(name) for name in config.loggers}}
    made = ((name, _made(name, make, config, info)) for name, make in factories.items())
    return [Guarded(name, sink) for name, sink in made if sink is not None]


def _made(name: str, make: Factory, config: LoggingConfig, info: RunInfo) -> Callback | None:
    try:
        return make(config, info)
    except TrainyardError:
        raise
    except Exception as error:  # a plug-in must not end the run
        log.warning("cannot set up logger %s, the run continues without it: %r", name, error)
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
        f"--loggers {name}: no installed package has an entry point of this name in {GROUP}; "
        f"known: {', '.join(known)}"
    )


class Guarded(Callback):
    """A logger whose errors are logged and do not end the run."""

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
