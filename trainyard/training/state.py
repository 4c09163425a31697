"""What must survive a kill, besides tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class TrainState:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps done."""
    consumed_train_samples: int = 0
    """Samples served to them: the position in the data."""
    num_updates: int = 0
    """Updates that the optimizer's moments hold: the t of Adam's bias correction."""
    ledger_digest: str = ""
    """Digest of every ledger line so far, each chained to the one before."""
    unmeasured: dict[str, Any] = field(default_factory=dict)
    """What the ledger will say of the step, once the measurement is made that was abandoned when
    the run was stopped; empty where none was."""

    def state_dict(self) -> dict[str, Any]:
        """The fields, JSON-able, without an empty `unmeasured`."""
        document = asdict(self)
        if not self.unmeasured:
            del document["unmeasured"]
        return document

    def load_state_dict(self, document: dict[str, Any]) -> None:
        """Take the fields over from `state_dict`; other keys are passed over."""
        for name in asdict(self):
            if name != "unmeasured":
                setattr(self, name, type(getattr(self, name))(document[name]))
        self.unmeasured = dict(document.get("unmeasured", {}))
