"""lm-evaluation-harness with checkpoints of any kind as `--model trainyard`.

    python -m stages.lm_eval --model trainyard --model_args load=CHECKPOINT --tasks hellaswag ...
    torchrun ... -m stages.lm_eval --model_args load=...,tensor_model_parallel_size=2 ...

All options are those of lm-eval, which the extra `lm-eval` installs. Under torchrun every rank has
the same answers, and rank 0 alone prints and writes them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from stages.runtime.failure import report_failure
from trainyard import logging as our_logging
from trainyard.errors import ConfigError, TrainyardError

WRITING = ("--output_path",)
"""Options with which the harness writes files."""
TRUSTING = "--trust_remote_code"


def main(words: Sequence[str]) -> int:
    """Run the harness. Returns the exit status."""
    our_logging.configure()
    try:
        try:
            from lm_eval.__main__ import cli_evaluate

            from trainyard.evaluation import harness  # noqa: F401  # registers the model
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "lm_eval":
                raise
            raise ConfigError(
                "lm-eval is not installed; install trainyard with its extra `lm-eval`"
            ) from None
        sys.argv = ["lm_eval", *arguments(words)]
        if os.environ.get("RANK", "0") != "0":
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
        cli_evaluate()
    except TrainyardError as error:
        return report_failure("lm_eval", error, debug=False)
    return 0


def arguments(words: Sequence[str]) -> list[str]:
    """The options for lm-eval: `--model trainyard` unless a model is named, and on ranks other than
    0 none that writes. ConfigError for one that trusts programs of others."""
    kept = list(words)
    if kept and kept[0] not in ("run", "ls", "validate") and "--model" not in kept:
        kept = ["--model", "trainyard", *kept]
    if TRUSTING in kept and "trainyard" in kept:
        raise ConfigError(
            f"{TRUSTING} runs Python that comes with a model or a data set, and no checkpoint of "
            "trainyard has any; leave it out"
        )
    if os.environ.get("RANK", "0") == "0":
        return kept
    found = []
    skip = False
    for word in kept:
        if not skip and word not in WRITING and not word.startswith("--output_path="):
            found.append(word)
        skip = word in WRITING
    return [word for word in found if word not in ("--log_samples", "-s")]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
