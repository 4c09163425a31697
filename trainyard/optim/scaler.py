"""The scale of the loss that keeps small fp16 gradients from vanishing (arXiv:1710.03740).

Plain numbers: the same decisions on every rank follow from the same overflows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trainyard.optim.precision import PrecisionConfig

GROWTH = 2.0
BACKOFF = 0.5


class LossScaler(Protocol):
    """What the loss is multiplied by, and what an overflow does to that."""

    @property
    def scale(self) -> float:
        """The factor of the next step."""

    @property
    def expects_overflow(self) -> bool:
        """Whether a gradient that is not finite is part of the method, and its step skipped."""

    def update(self, found_inf: bool) -> None:
        """Learn whether some gradient of a step was not finite."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a kill; JSON-able."""

    def load_state_dict(self, document: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""


class ConstantScaler:
    """Always the same; 1 where no scale is needed."""

    def __init__(self, scale: float = 1.0, *, expects_overflow: bool = False) -> None:
        self.scale = scale
        self.expects_overflow = expects_overflow

    def update(self, found_inf: bool) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: there is no state."""
        return {}

    def load_state_dict(self, document: Mapping[str, Any]) -> None:
        """Ignored: there is no state."""


class DynamicScaler:
    """Megatron-LM's rule. Each overflow uses up one of `hysteresis` lives; with none left, each
    halves the scale. `window` steps without overflow double it and give the lives back."""

    expects_overflow = True

    def __init__(self, initial: float, minimum: float, window: int, hysteresis: int) -> None:
        self.scale = initial
        self._minimum = minimum
        self._window = window
        self._hysteresis = hysteresis
        self._growth_tracker = 0
        self._hysteresis_tracker = hysteresis

    def update(self, found_inf: bool) -> None:
        """Learn whether some gradient of a step was not finite."""
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.scale = max(self.scale * BACKOFF, self._minimum)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self._window:
            self._growth_tracker = 0
            self._hysteresis_tracker = self._hysteresis
            self.scale *= GROWTH

    def state_dict(self) -> dict[str, Any]:
        """Under Megatron-LM's names."""
        return {
            "scale": self.scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, document: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; one of a run without a scale leaves everything as it is."""
        if document:
            self.scale = float(document["scale"])
            self._growth_tracker = int(document["growth_tracker"])
            self._hysteresis_tracker = int(document["hysteresis_tracker"])


def build_scaler(config: PrecisionConfig) -> LossScaler:
    """The scaler that the options ask for."""
    if not config.fp16:
        return ConstantScaler()
    if config.loss_scale is not None:
        return ConstantScaler(config.loss_scale, expects_overflow=True)
    return DynamicScaler(
        config.initial_loss_scale,
        config.min_loss_scale,
        config.loss_scale_window,
        config.hysteresis,
    )
