"""The backend of a choice."""

from __future__ import annotations

from trainyard.attention.base import AttentionBackend, Numerics
from trainyard.attention.choice import Choice


def build_backend(choice: Choice, numerics: Numerics, deterministic: bool) -> AttentionBackend:
    """The backend that was chosen."""
    from trainyard.attention.flash import FlashBackend
    from trainyard.attention.local import LocalBackend
    from trainyard.attention.sdpa import SdpaBackend
    from trainyard.attention.te import TransformerEngineBackend

    if choice.backend == "local":
        return LocalBackend(numerics)
    if choice.backend == "flash":
        return FlashBackend(int(choice.kernel.removeprefix("flash")), deterministic)
    if choice.backend == "te":
        return TransformerEngineBackend()
    return SdpaBackend(choice.kernel, choice.strict)
