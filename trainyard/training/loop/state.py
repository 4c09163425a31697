"""What must survive a kill, besides tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

OPTIONAL = ("loss_scaler", "unmeasured")
"""Fields that are left out while they are empty."""


@dataclass(slots=True)
class TrainState:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps done."""
    consumed_train_samples: int = 0
    """Samples served to them: the position in the data."""
    scheduled_samples: int = 0
    """Those of steps that were taken: the position in the schedules of the rates. Steps that
    overflowed in fp16, or were passed over, do not count."""
    num_updates: int = 0
    """Updates that the optimizer's moments hold: the t of Adam's bias correction."""
    ledger_digest: str = ""
    """Digest of every ledger line so far, each chained to the one before."""
    loss_scaler: dict[str, Any] = field(default_factory=dict)
    """State of the scale of the loss in fp16; empty where it is constant."""
    unmeasured: dict[str, Any] = field(default_factory=dict)
    """What the ledger will say of the step, once the measurement is made that was abandoned when
    the run was stopped; empty where none was."""

    def state_dict(self) -> dict[str, Any]:
        """The fields, JSON-able, without what is empty."""
        document = asdict(self)
        for name in OPTIONAL:
            if not document[name]:
                del document[name]
        return document

    def load_state_dict(self, document: dict[str, Any]) -> None:
        """Take the fields over from `state_dict`; other keys are passed over."""
        for name in asdict(self):
            if name not in OPTIONAL:
                setattr(self, name, type(getattr(self, name))(document[name]))
        for name in OPTIONAL:
            setattr(self, name, dict(document.get(name, {})))
