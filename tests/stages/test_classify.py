"""stages.classify: a tiny BERT learns a planted rule from the published layouts of MNLI, QQP and
RACE."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.stages.directly import Done, run_process, run_program
from tests.trainyard.corpus.token_files import write_tokens
from trainyard.artifacts.manifest import read_manifest
from trainyard.checkpoint.load import open_checkpoint
from trainyard.evaluation.passport import read_results

pytestmark = pytest.mark.slow

WORDS = [f"w{n}" for n in range(40)]
SIGNS = {"MNLI": ("red", "green", "blue"), "QQP": ("red", "green"), "RACE": ("red", "green")}
MODEL = (
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "24", "--max-position-embeddings", "32", "--hidden-dropout", "0.1"),
    *("--tokenizer-type", "BertWordPieceLowerCase"),
)
TRAINING = (
    *("--micro-batch-size", "8", "--lr", "3e-3", "--lr-decay-style", "linear"),
    *("--lr-warmup-fraction", "0.1", "--device", "cpu", "--init-method-std", "0.1"),
)


def vocabulary(folder: Path) -> str:
    file = folder / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "?", "_", "."]
    file.write_text("\n".join([*special, "red", "green", "blue", *WORDS]) + "\n")
    return str(file)


def sentence(generator: np.random.Generator, *signs: str) -> str:
    words = [*generator.choice(WORDS, 4).tolist(), *signs]
    return " ".join(generator.permutation(words).tolist())


def mnli(file: Path, count: int, seed: int) -> str:
    """The class is the colour in the second sentence."""
    generator, names = np.random.default_rng(seed), ("contradiction", "entailment", "neutral")
    lines = ["\t".join(["index", *"abcdefg", "sentence1", "sentence2", "label1", "gold_label"])]
    for number in range(count):
        label = number % 3
        second = sentence(generator, SIGNS["MNLI"][label])
        gold = [names[label]] * 2
        lines.append("\t".join([str(number), *"abcdefg", sentence(generator), second, *gold]))
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def qqp(file: Path, count: int, seed: int) -> str:
    """Two questions are duplicates if the second is green."""
    generator = np.random.default_rng(seed)
    lines = ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"]
    for number in range(count):
        second = sentence(generator, SIGNS["QQP"][number % 2])
        row = [str(number), "1", "2", sentence(generator), second, str(number % 2)]
        lines.append("\t".join(row))
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def race(folder: Path, count: int, seed: int) -> str:
    """The right option is the green one."""
    generator = np.random.default_rng(seed)
    folder.mkdir()
    for number in range(count):
        right = int(generator.integers(4))
        options = [sentence(generator, SIGNS["RACE"][n == right]) for n in range(4)]
        article = {
            "article": sentence(generator),
            "questions": ["which ?"],
            "options": [options],
            "answers": ["ABCD"[right]],
            "id": str(number),
        }
        (folder / f"{number}.txt").write_text(json.dumps(article))
    return str(folder)


MAKERS = {"MNLI": mnli, "QQP": qqp, "RACE": race}


def classify(tmp_path: Path, task: str, *words: str, expect: int | None = 0) -> Done:
    return run_program(
        "stages.megatron",
        *("tasks/main.py", "--task", task, *MODEL, *TRAINING),
        *("--vocab-file", vocabulary(tmp_path), "--save", str(tmp_path / "run"), *words),
        expect=expect,
    )


def accuracy(printed: str, epoch: int, name: str) -> tuple[int, int]:
    """Correct and total, of the line that users of Megatron-LM's tasks grep for."""
    line = rf" > \|epoch: {epoch}\| metrics for {name}: correct / total = (\d+) / (\d+) = [\d.]+ %"
    found = re.search(line, printed)
    assert found is not None, printed
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("task", MAKERS)
def test_a_planted_rule_is_learnt(task: Any, tmp_path: Path) -> None:
    make = MAKERS[task]
    train = make(tmp_path / "train", 250, 1)
    dev = [make(tmp_path / f"dev{n}", 51, 2 + n) for n in range(2)]
    done = classify(tmp_path, task, "--train-data", train, "--valid-data", *dev, "--epochs", "8")
    for name in ("dev0", "dev1"):
        right, total = accuracy(done.out, 7, name)
        assert total == 51
        assert right >= 49
    assert " >> |epoch: 7| overall: correct / total = " in done.out
    run = tmp_path / "run"
    steps = sorted(path.name for path in run.glob("iter_*"))
    assert steps == [f"iter_{epoch * 31:07d}" for epoch in range(1, 9)]  # 250 // 8 a epoch
    found = read_manifest(str(run / "manifest.json"))
    assert found is not None
    metrics = found[0].metrics
    assert metrics["best_accuracy"] >= metrics["accuracy"] > 0.95
    assert run.joinpath(f"iter_{metrics['best_step']:07d}").is_dir()
    one, _ = read_results(str(run))
    assert one.passport["figures"]["accuracy"]["value"] == accuracy(done.out, 7, "dev0")[0] / 51
    assert len(one.rows()[0]["probabilities"]) == {"MNLI": 3, "QQP": 2, "RACE": 4}[task]


def test_a_classifier_is_measured_without_a_training(tmp_path: Path) -> None:
    train, dev = qqp(tmp_path / "train.tsv", 64, 1), qqp(tmp_path / "dev.tsv", 50, 2)
    data = ("--train-data", train, "--valid-data", dev)
    classify(tmp_path, "QQP", *data, "--epochs", "6", "--save", str(tmp_path / "first"))
    done = classify(
        tmp_path, "QQP", *data, "--skip-train", "--load", str(tmp_path / "first"), "--no-finetune"
    )
    first = read_results(str(tmp_path / "first"))[0].passport["figures"]["accuracy"]["value"]
    assert accuracy(done.out, -1, "dev.tsv") == (round(first * 50), 50)


def test_weights_come_from_a_bert_of_a_pretraining(tmp_path: Path) -> None:
    base, vocab = tmp_path / "bert", vocabulary(tmp_path)
    write_tokens(tmp_path / "text", [[[*range(8, 40)], [*range(11, 30)]]] * 20)
    run_program(
        "stages.pretrain",
        *("--model-type", "bert", *MODEL, *TRAINING, "--vocab-file", vocab),
        *("--data-path", str(tmp_path / "text"), "--train-iters", "1", "--eval-iters", "0"),
        *("--save", str(base), "--lr-warmup-fraction", "0"),
        expect=0,
    )
    train = qqp(tmp_path / "train.tsv", 16, 1)
    data = ("--train-data", train, "--valid-data", train, "--epochs", "1", "--lr", "1e-9")
    done = classify(tmp_path, "QQP", *data, "--pretrained-checkpoint", str(base))
    assert "not in the checkpoint: initialised" in done.err
    assert "classification_head" in done.err
    with (
        open_checkpoint(str(base)) as before,
        open_checkpoint(str(tmp_path / "run")) as after,
    ):
        name = "model.encoder.layers.0.self_attention.linear_qkv.weight"
        assert torch.allclose(before.read(name), after.read(name), atol=1e-6)
        assert "model.classification_head.weight" in after.names()
        assert not after.names("model.lm_head")


def test_the_last_batch_counts_once_if_it_is_kept(tmp_path: Path) -> None:
    train, dev = qqp(tmp_path / "train.tsv", 20, 1), qqp(tmp_path / "dev.tsv", 6, 2)
    data = ("--train-data", train, "--valid-data", dev, "--epochs", "2")
    classify(tmp_path, "QQP", *data, "--keep-last")
    assert {path.name for path in (tmp_path / "run").glob("iter_*")} == {
        "iter_0000003",  # 20 examples in three batches of 8
        "iter_0000006",
    }


@pytest.mark.distributed
def test_ranks_measure_what_one_process_does(tmp_path: Path) -> None:
    train, dev = mnli(tmp_path / "train.tsv", 64, 1), mnli(tmp_path / "dev.tsv", 37, 2)
    words = ("--train-data", train, "--valid-data", dev, "--epochs", "2", "--hidden-dropout", "0")
    words += ("--attention-dropout", "0", "--global-batch-size", "16", "--num-layers", "2")
    classify(tmp_path, "MNLI", *words, "--save", str(tmp_path / "alone"))
    found = {}
    for name, layout in (
        ("dp", ("--nproc-per-node", "2")),
        ("tp", ("--nproc-per-node", "2", "--tensor-model-parallel-size", "2")),
        ("pp", ("--nproc-per-node", "2", "--pipeline-model-parallel-size", "2")),
    ):
        run_process(
            "stages.classify",
            *("--task", "MNLI", *MODEL, *TRAINING, *words, *layout),
            *("--vocab-file", vocabulary(tmp_path), "--save", str(tmp_path / name)),
        )
        found[name] = read_results(str(tmp_path / name))[0].rows()
    alone = read_results(str(tmp_path / "alone"))[0].rows()
    for rows in found.values():
        assert [row["example"] for row in rows] == list(range(37))
        theirs, ours = ([row["probabilities"] for row in some] for some in (rows, alone))
        assert np.allclose(theirs, ours, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--epochs 1 --model-type gpt", "--model-type gpt: QQP is a task for a bert"),
        ("--epochs 1 --micro-batch-size 99", "--train-data has 20 examples, fewer than the 99 of"),
        ("--train-iters 3", "--epochs is required: how often to pass over --train-data"),
        ("--epochs 1 --data-path x", "named by --train-data and --valid-data; leave it out"),
    ],
)
def test_what_is_no_fine_tuning_is_refused(tmp_path: Path, words: str, message: str) -> None:
    train = qqp(tmp_path / "train.tsv", 20, 1)
    data = ("--train-data", train, "--valid-data", train)
    assert message in classify(tmp_path, "QQP", *data, *words.split(), expect=2).err
