"""Small runs in several legs, each with its own ranks and layout; some of them die."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.certify.config import CertifyConfig
from stages.certify.run import certify
from stages.runtime.context import StageRun
from trainyard.artifacts.manifest import read_manifest
from trainyard.config import from_dict
from trainyard.testing.kill import Zygote, check_kill_anywhere
from trainyard.testing.pool import RankPool
from trainyard.training.certify.certificate import Certificate
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.ledger import parse_ledger
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.pretrain import pretrain

Options = dict[str, Any]

RUN: Options = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "attention_dropout": 0.0,
    "init_method_std": 0.1,
    "make_vocab_size_divisible_by": 1,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 1024,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 6,
    "eval_interval": 3,
    "eval_iters": 1,
    "lr": 0.01,
    "adam_eps": 1e-3,
    "split": "90,10,0",
    "num_threads": 1,
    "device": "cpu",
}


class Died(Exception):  # noqa: N818  # it is what happened
    """The end of a process, as far as the process can tell of it."""


@dataclass
class Death(Callback):
    """Ends a leg after a step, without a message and without a save."""

    step: int | None

    def after_step(self, event: StepEvent) -> None:
        if event.record.step == self.step:
            raise Died


def leg(options: Options, dies_after: int | None = None) -> str:
    """One attempt at a run, on every rank; how it ended."""
    config = from_dict(PretrainConfig, options)
    try:
        return pretrain(None, None, config, callbacks=[Death(dies_after)]).outcome
    except Died:
        return "died"


def go(
    tokens: str,
    save: Path,
    ranks: RankPool | None = None,
    world_size: int = 1,
    dies_after: int | None = None,
    **options: Any,
) -> str:
    """A leg of the run in a folder, on so many ranks, or here where that is one."""
    document = {**RUN, "data_path": [tokens], "save": str(save), **options}
    if world_size == 1:
        return leg(document, dies_after)
    assert ranks is not None
    (outcome, *others) = ranks.run(leg, world_size, document, dies_after)
    assert set(others) == {outcome}
    return str(outcome)


def ledger(save: Path) -> list[dict[str, Any]]:
    """Of a finished run."""
    return parse_ledger((save / "ledger.jsonl").read_bytes())


def digest(save: Path) -> str:
    """Of all that a finished run made."""
    found = read_manifest(str(save / "manifest.json"))
    assert found is not None
    return found[0].output_digest


def certificate(save: Path, **options: Any) -> Certificate:
    """What certify finds, every file read."""
    config = from_dict(CertifyConfig, {"run": str(save), "check_digests": True, **options})
    return certify(config, StageRun("certify", {}, None))


COMPUTED = ("lm_loss", "validation_loss", "grad_norm")
"""What sums make; all else in a ledger is exact."""


def exact(lines: list[dict[str, Any]], leave_out: Mapping[str, object]) -> list[dict[str, Any]]:
    """A ledger without what is computed."""
    gone = {*COMPUTED, *leave_out}
    return [{name: v for name, v in line.items() if name not in gone} for line in lines]


def check_kills(folder: Path, arguments_of: Callable[[str], list[str]], points: int) -> None:
    """Kill the pretraining stage before so many operations of the store; each rerun finishes."""
    with Zygote("stages.pretrain.run") as zygote:
        kills = check_kill_anywhere(
            zygote,
            "stages.pretrain",
            arguments_of,
            lambda name: str(folder / name / "manifest.json"),
            points=points,
        )
    assert kills == points
