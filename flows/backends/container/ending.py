"""What the end of a container means, from the engine's word on it and what is in its run folder."""

from __future__ import annotations

from pathlib import Path

from flows.backends.ending import Evidence, classify_exit
from flows.backends.outcome import Kind, Outcome, read_failure, read_outcome, read_tail
from flows.backends.run_folder import LOG
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError

LOST = 255
"""Exit code that an engine gives containers which it finds dead when it comes up again."""

NOT_RUN = (126, 127)
"""What the first process of a container says of a program that it cannot start."""


def judge_container(
    spec: LaunchSpec,
    name: str,
    exit_code: int | None,
    was_out_of_memory: bool,
    words: str,
    ended_by_us: Kind | None,
) -> Outcome:
    """The outcome of a container.

    exit_code: None when the engine does not know the container any more.
    was_out_of_memory: something in it was killed for its memory, not always what ended it.
    words: the engine's own, for people."""
    failure = read_failure(spec.run_directory)
    if exit_code is None and failure is None and read_outcome(spec.run_directory) is not None:
        exit_code = 0  # written last, by a stage that ended well
    if exit_code in NOT_RUN and failure is None:
        message = f"image {spec.image} has no program {_program(spec)} that can be run"
        status = ConfigError.exit_status
        return Outcome(name=spec.name, kind=Kind.CONFIG, exit_status=status, message=message)
    verdict = None
    if exit_code and was_out_of_memory:
        verdict = Kind.OUT_OF_MEMORY
    elif exit_code == LOST:
        verdict = Kind.NODE_FAILURE
        words = words or "the engine or its machine was started anew"
    ended = "" if exit_code is None else f"exit status {exit_code}"
    told = ", ".join(filter(None, (f"container {name}", ended, words)))
    return classify_exit(
        spec.name,
        Evidence(
            failure=failure,
            verdict=verdict,
            words=told,
            exit_code=exit_code,
            is_of_launcher=spec.has_ranks,
            ended_by_us=ended_by_us,
            log_tail=read_tail(Path(spec.run_directory, LOG)),
        ),
    )


def _program(spec: LaunchSpec) -> str:
    return (spec.rank_launcher if spec.has_ranks else spec.command)[0]
