"""The state of a run that survives a kill, besides tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

OPTIONAL = ("loss_scaler", "unmeasured")
"""Fields that are omitted while they are empty."""


@dataclass(slots=True)
class TrainState:
    """The position of a run."""

    step: int = 0
    """Optimizer steps done."""
    consumed_train_samples: int = 0
    """Samples of these steps: the position in the data."""
    scheduled_samples: int = 0
    """Samples of steps with an update: the position in the learning rate schedule. Steps that
    overflowed in fp16 or were skipped do not count."""
    num_updates: int = 0
    """Updates of the optimizer: the t of Adam's bias correction."""
    ledger_digest: str = ""
    """Digest of all ledger lines so far, each chained to the one before."""
    loss_scaler: dict[str, Any] = field(default_factory=dict)
    """State of the fp16 loss scale; empty if it is constant."""
    unmeasured: dict[str, Any] = field(default_factory=dict)
    """The ledger record of a step whose validation was cut short by a stop; empty if there is
    none. The next start validates and enters it."""

    def state_dict(self) -> dict[str, Any]:
        """The fields as a JSON document, without empty ones."""
        document = asdict(self)
        for name in OPTIONAL:
            if not document[name]:
                del document[name]
        return document

    def load_state_dict(self, document: dict[str, Any]) -> None:
        """Load the fields from `state_dict`; other keys are ignored."""
        for name in asdict(self):
            if name not in OPTIONAL:
                setattr(self, name, type(getattr(self, name))(document[name]))
        for name in OPTIONAL:
            setattr(self, name, dict(document.get(name, {})))
