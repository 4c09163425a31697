"""Which kind each layer of a hybrid model is: the letters of --hybrid-layer-pattern, or an even
spread by the ratios, as Megatron-LM computes it. Standard library only."""

from __future__ import annotations

import functools

from trainyard.errors import ConfigError

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"

KINDS = {
    MAMBA: "Mamba-2",
    ATTENTION: "self-attention",
    MLP: "an MLP",
    EXPERTS: "a mixture of experts",
}
"""What each letter stands for; every layer is one of them, with its norm and residual."""

OF_MAIN = {
    "G": "a gated delta net",
    "D": "DeepSeek's sparse attention",
    "+": "latent attention",
}
"""Letters of Megatron-LM's main that are layers we do not have."""

STAGE, PREDICTION = "|", "/"
"""Letters of newer releases that are no layers: the end of a pipeline stage, and the beginning of
the layers of multi-token prediction."""


def check_pattern(pattern: str) -> None:
    """Raise ConfigError for letters that are no layers."""
    option = f"--hybrid-layer-pattern {pattern}"
    if STAGE in pattern:
        raise ConfigError(
            f"{option}: {STAGE} ends a pipeline stage; leave it out, and give the layers of each "
            "stage with --pipeline-model-parallel-layout"
        )
    if PREDICTION in pattern:
        raise ConfigError(
            f"{option}: {PREDICTION} begins layers of multi-token prediction, which a hybrid model "
            "does not have here; leave it and what follows out"
        )
    for letter in OF_MAIN:
        if letter in pattern:
            raise ConfigError(
                f"{option}: {letter} is {OF_MAIN[letter]}, which hybrid models do not have here; "
                f"known are {_known()}"
            )
    unknown = sorted(set(pattern) - KINDS.keys())
    if unknown or not pattern:
        found = f"{unknown[0]!r} is no kind of layer" if unknown else "it names no layer"
        raise ConfigError(f"{option}: {found}; known are {_known()}")


def _known() -> str:
    return ", ".join(f"{letter} ({kind})" for letter, kind in KINDS.items())


@functools.lru_cache(maxsize=16)  # every layer asks
def spread(num_layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """The letters of this many layers, of which these shares are attention and MLPs.

    Attention is spread evenly between sections of the others, which begin and end the model. MLPs
    then replace Mamba layers evenly, as late as possible."""
    num_attention = round(num_layers * attention_ratio)
    num_mamba = num_layers - num_attention
    letters = _every(MAMBA * num_layers, ATTENTION, num_mamba / (num_attention + 1))
    num_mlp = round(num_layers * mlp_ratio)
    if not num_mlp:
        return letters
    return _every(letters, MLP, (num_mamba - num_mlp) / num_mlp)


def _every(letters: str, letter: str, distance: float) -> str:
    """`letters` with `letter` in place of a Mamba layer after each `distance` of those that
    stay."""
    found, left = [], distance
    for old in letters:
        if old != MAMBA:
            found.append(old)
        elif left < 0.5:
            found.append(letter)
            left += distance
        else:
            found.append(old)
            left -= 1
    return "".join(found)
