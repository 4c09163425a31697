"""The loss of GPT-345M in FP8 beside bf16, over some hundred steps of real text on one GPU.

    python -m benchmarks.fp8_curve --data-path PREFIX --out FOLDER
    python -m benchmarks.fp8_curve --data-path PREFIX --out FOLDER --recipes delayed \
        --fp8-amax-history-len 1024 --fp8-amax-compute-algo max

Options that it does not have itself go to the runs in FP8.
PREFIX: token files of GPT-2's tokenizer; 300 steps take 4.9 million tokens. Every run has the same
samples, initial weights and rates. One more run in bf16 has half the micro-batch and twice as many
of them: it differs by the order of sums alone, so it says how far apart two runs in bf16 are.
FOLDER/curves.json gets the loss of every step."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shapes import SHAPES
from trainyard.training.loop.ledger import parse_ledger

STEPS = 300
BATCH = 16
WINDOW = 20
"""Steps of which a smoothed loss is the mean."""
BAR = 0.005
"""Of the loss in bf16."""
FORMATS = {"blockwise": "e4m3"}
"""Number formats by recipe; all others `hybrid`."""
BF16, OTHER_SUMS = "bf16", "bf16, other order of sums"

OPTIONS = (
    "--bf16 --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 30"
    " --weight-decay 0.01 --clip-grad 1.0 --split 100,0,0 --eval-iters 0 --log-interval 50"
    " --tokenizer-type NullTokenizer --vocab-size 50257 --num-workers 2 --no-save-optim"
    " --nproc-per-node 1"
)


def relative_differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """|loss / reference - 1| of each step."""
    return [abs(ours / right - 1) for ours, right in zip(losses, reference, strict=True)]


def smoothed(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """The mean of each `window` steps that follow each other; as many fewer as it is wide."""
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    return [(end - begin) / window for begin, end in zip(sums, sums[window:], strict=False)]


def train(save: Path, prefix: str, steps: int, words: Sequence[str]) -> list[float]:
    """The loss of every step."""
    options = ["--data-path", prefix, "--save", str(save), "--train-iters", str(steps)]
    options += ["--global-batch-size", str(BATCH), *words]
    done = subprocess.run(
        [sys.executable, "-m", "stages.pretrain", *OPTIONS.split(), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout[-4000:])
    return [step["lm_loss"] for step in parse_ledger((save / "ledger.jsonl").read_bytes())]


def runs_of(recipes: Sequence[str], shape: str, extra: Sequence[str]) -> dict[str, list[str]]:
    """Options of each run, by what the table calls it; the first is the reference."""

    def flags(micro_batch_size: int) -> list[str]:
        return [*SHAPES[shape].flags(), "--micro-batch-size", str(micro_batch_size)]

    runs = {BF16: flags(BATCH), OTHER_SUMS: flags(BATCH // 2)}
    for recipe in recipes:
        words = ["--fp8-format", FORMATS.get(recipe, "hybrid"), "--fp8-recipe", recipe]
        runs[f"fp8 {recipe}"] = [*flags(BATCH), *words, *extra]
    return runs


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", default=["tensorwise", "blockwise"])
    parser.add_argument("--shape", default="gpt-345m")
    parser.add_argument("--train-iters", type=int, default=STEPS)
    args, extra = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[float]] = {}
    print("| run | first, last loss | largest difference of a step | of means of 20 | reached |")
    print("| --- | --- | --- | --- | --- |")
    for number, (name, words) in enumerate(runs_of(args.recipes, args.shape, extra).items()):
        curves[name] = train(args.out / f"run{number}", args.data_path, args.train_iters, words)
        (args.out / "curves.json").write_text(json.dumps(curves))
        print(row(name, curves[name], curves[BF16]), flush=True)


def row(name: str, losses: Sequence[float], reference: Sequence[float]) -> str:
    """A line of the table."""
    of_steps = max(relative_differences(losses, reference))
    of_means = max(relative_differences(smoothed(losses), smoothed(reference)))
    reached = "yes" if of_means <= BAR else "no"
    ends = f"{losses[0]:.4f}, {losses[-1]:.4f}"
    return f"| {name} | {ends} | {of_steps:.2%} | {of_means:.2%} | {reached} |"


if __name__ == "__main__":
    main()
