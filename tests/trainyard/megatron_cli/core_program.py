"""Megatron core itself, of any release: how it cuts, blends and counts what a run asks for.

    python core_program.py OUT

A program of its own: megatron-core patches much of torch. OUT: gets what it found, as JSON; its
token files lie beside. The cases need numpy alone; the tests give the same ones to our own code."""

from __future__ import annotations

import hashlib
import json
import sys
import typing
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEQ_LENGTH, SEED, EOD, VOCAB_SIZE = 16, 1234, 999, 1000

DOCUMENTS = [*range(1, 301), 1000, 4095, 99_999]

Bounds = Callable[[str], list[tuple[float, float] | None]]
"""--split as a part of [0, 1] for training, validation and testing, None for one without any."""

# --- splits -----------------------------------------------------------------------------------


def splits() -> list[str]:
    """As people write them: parts of 1 in twentieths, and parts that must be normalised."""
    twentieths = [(a, b, 20 - a - b) for a in range(21) for b in range(21 - a)]
    whole = [(969, 30, 1), (949, 50, 1), (99, 1, 0), (98, 1, 1), (1, 1, 1), (3, 3, 1), (7, 2, 1)]
    some = product((0.7, 0.1, 0.3, 0.999), (0.2, 0.05), (0.1, 0.001, 0.7))
    texts = [",".join(f"{part / 20:g}" for part in parts) for parts in twentieths]
    return texts + [", ".join(map(str, parts)) for parts in (*whole, *some)]


def cuts(split: str, bounds: Bounds) -> Iterator[list[list[int] | None]]:
    """Of every number of documents the first and the last + 1 of each part."""
    parts = bounds(split)
    for count in DOCUMENTS:
        yield [p and [round(bound * float(count)) for bound in p] for p in parts]


def split_digests(bounds: Bounds) -> dict[str, str]:
    return {split: digest(json.dumps(list(cuts(split, bounds)))) for split in splits()}


def digest(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()[:12]


# --- batches that grow ------------------------------------------------------------------------


def ramps() -> list[tuple[int, int, int, int, int]]:
    """(start, increment, ramp samples, global batch size, train samples); half end in the ramp."""
    random, found = Random(5), []
    for number in range(400):
        start, increment = random.choice([2, 8, 16, 32]), random.choice([2, 8, 16])
        samples = random.randint(10, 3000)
        final = start + increment * random.randint(1, 12)
        total = random.randint(final, max(final, samples) if number % 2 else 20_000)
        found.append((start, increment, samples, final, total))
    return found


def ramp_steps(batch_at: Callable[[int], int], ramp_samples: int, final: int, total: int) -> int:
    """Steps of a run of `total` samples, as the last Megatron-LM with a ramp counts them."""
    steps = consumed = 0
    while consumed <= ramp_samples and consumed <= total:
        consumed += batch_at(consumed)
        steps += 1
    return steps + max(0, total - consumed) // final


def tables() -> list[tuple[str, int, int]]:
    """(table, sequence length, train samples), as people write them."""
    random, found = Random(7), []
    for number in range(400):
        length = random.choice([16, 100, 1000, 1024, 2048, 4096])
        at = sorted(random.sample(range(1, 4000), random.randint(0, 4)))
        tokens = [0, *(place * length + random.choice([0, 1, length // 2, -1]) for place in at)]
        entries = [
            f"{written(count, random)}:{random.choice([1, 8, 24, 100, 512, '1K', '1.5k'])}"
            for count in tokens
        ]
        if number % 10 == 0:
            random.shuffle(entries)
        found.append((random.choice([" ", ","]).join(entries), length, random.randint(1, 6000)))
    return found


def written(tokens: int, random: Random) -> str:
    """Rounded by the suffix, most of the time."""
    size, suffix, digits = random.choice(
        [(1, "", 0), (1000, "K", 3), (1000, "k", 1), (1_000_000, "M", 5), (10**9, "B", 9)]
    )
    return f"{tokens / size:.{digits}f}{suffix}"


def odd_tables() -> list[str]:
    """What its parser takes, or does not, besides; with a sequence length of 100."""
    tables = ["", " ", "0", "8", "0:", ":8", "0:8", "0: 8", "0:8:16", "0-8", "0:0", "0:-8", "0:0.5"]
    tables += ["0:1.9", "5:8", "99:8", "-5:8", "-0:8", "-0.5:8", "0:8 0:16", "0:8 99:16", "0.9:8"]
    tables += ["0:8,1K:16", "0:8, 1K:16", "0:8,,1K:16", "1K:16 0:8", "0:8\n1K:16", "0:8;1K:16"]
    numbers = ["1K", "1k", "1.5K", ".5K", "5.K", ".K", "K", "1KK", "1KB", "1 K", "1G", "1e3", "1E3"]
    numbers += ["1e3K", "1e-3M", "1e", "1e400", "1e308T", "inf", "infinity", "nan", "-1K", "+1K"]
    numbers += ["1_000", "1__000", "0x100", "1,000", "1t", "0.29K", "1.005K", "100.7", "2.3M"]
    numbers += ["123456789012345678901", "0.1B", "1b", "1K:", "x", "1/2K", "0.001T", "1000.0000001"]
    return tables + [f"0:8 {number}:16" for number in numbers] + [f"0:{n}" for n in numbers]


# --- samples ----------------------------------------------------------------------------------

FILES = {
    "a": [42, 7, 130, 64, 3, 88, 91, 15, 200, 33, 58, 76, 9, 112, 47, 29, 61, 150, 5, 83] * 3,
    "b": [77, 21, 140, 18, 96, 54, 8, 37, 121, 66] * 3,
    "c": [300, 11, 45],
}
"""Lengths of documents."""


def token_files() -> dict[str, list[NDArray[np.int64]]]:
    """Documents by the name of their file; each token file begins elsewhere."""
    found = {}
    for first, (name, lengths) in enumerate(FILES.items()):
        tokens = (301 * first + np.arange(sum(lengths))) % EOD
        found[name] = np.split(tokens, np.cumsum(lengths)[:-1])
    return found


def datasets() -> dict[str, dict[str, Any]]:
    """Options and the numbers of samples that are asked for: (training, validation, test)."""
    apart = {"train_data_path": ["a"], "valid_data_path": ["b"], "test_data_path": ["a", "b", "c"]}
    weighted = ["0.7", "a", "0.2", "b", "0.1", "c"]
    thirds = {"split": "0.6,0.2,0.2"}
    cases = {
        "one file": {"data_path": ["a"], "split": "0.7,0.2,0.1"},
        "one file in hundredths": {"data_path": ["a"], "split": "80, 10, 10"},
        "a blend by size": {"data_path": ["a", "b"], **thirds},
        "three files by size": {"data_path": ["b", "a", "a"], **thirds},
        "a file for each split": {**apart, "test_data_path": ["c"]},
        "a test blend by size": apart,
        "a test blend by weight": {**apart, "test_data_path": weighted},
        "a validation blend by size": {**apart, "valid_data_path": ["a", "b"]},
        "validation sets": {
            **apart,
            "valid_data_path": ["b", "a", "c"],
            "test_data_path": ["c"],
            "multiple_validation_sets": True,
        },
    }
    asked = [
        {**options, "full_validation": True, "sizes": sizes}
        for options in cases.values()
        for sizes in ((20, 8, 8), (60, 40, 100), (61, 400, 1432))
    ]
    names = [f"{name}, {size}" for name in cases for size in ("few", "some", "many")]
    return dict(zip(names, asked, strict=True)) | {
        "weights without full validation": {
            "data_path": weighted[:4],
            "split": "0.7,0.2,0.1",
            "full_validation": False,
            "sizes": (100, 40, 30),
        }
    }


def served(rows: list[NDArray[np.int64]]) -> list[Any]:
    """How many samples a set has, and their tokens in the order in which they are served."""
    return [len(rows), digest(np.stack(rows).astype("<i8").tobytes())]


# --- of Megatron core -------------------------------------------------------------------------


def record(folder: Path) -> dict[str, Any]:
    """All of it, as Megatron core does it."""
    from megatron.core import num_microbatches_calculator
    from megatron.core.datasets import blended_megatron_dataset_config as config

    def bounds(split: str) -> list[tuple[float, float] | None]:
        found: list[tuple[float, float] | None]
        found = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
        return found

    write_files(folder)
    found = {
        "splits": split_digests(bounds),
        "datasets": {name: datasets_of_core(folder, **case) for name, case in datasets().items()},
    }
    if find_spec("megatron.training") is None:
        return found
    if hasattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator"):
        found["ramps"] = [ramp_of_core(*case) for case in ramps()]
    if hasattr(num_microbatches_calculator, "StepBatchsizeNumMicroBatchesCalculator"):
        found["tables"] = [table_of_core(*case) for case in tables()]
        found["odd tables"] = [table_of_core(text, 100, 5000) for text in odd_tables()]
    return found


def ramp_of_core(start: int, increment: int, samples: int, final: int, total: int) -> int:
    ramp = [start, increment, samples]
    return steps_of_core(total, final, rampup_batch_size=ramp)


def table_of_core(text: str, seq_length: int, total: int) -> list[Any] | None:
    """Where each size begins, and the steps of the run; None where the table is refused."""
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    try:
        table = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, text, seq_length)
    except (AssertionError, ValueError, OverflowError):
        return None
    options = {"step_batch_size_schedule": text, "seq_length": seq_length}
    return [table.schedule, steps_of_core(total, 1, **options)]


def steps_of_core(train_samples: int, global_batch_size: int, **options: Any) -> int:
    """--train-iters as its training program sets it."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.training.training import update_train_iters

    args = Namespace(train_iters=None, train_samples=train_samples, **options)
    args.global_batch_size = global_batch_size
    args.step_batch_size_schedule = options.get("step_batch_size_schedule")
    calculator.init_num_microbatches_calculator(
        rank=1,
        global_batch_size=global_batch_size,
        micro_batch_size=1,
        data_parallel_size=1,
        **options,
    )
    update_train_iters(args)
    calculator.unset_num_microbatches_calculator()
    steps: int = args.train_iters
    return steps


def write_files(folder: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for name, documents in token_files().items():
        builder = IndexedDatasetBuilder(f"{folder / name}.bin", dtype=np.uint16)
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(f"{folder / name}.idx")


class Tokenizer:
    """What GPTDataset asks of one."""

    vocab_size, eod, pad = VOCAB_SIZE, EOD, -1
    unique_identifiers: dict[str, Any] = {}  # noqa: RUF012


def datasets_of_core(
    folder: Path, sizes: tuple[int, int, int], full_validation: bool, **options: Any
) -> dict[str, Any]:
    """Of each split its sets. The numbers that it is asked for are those of Megatron-LM's
    get_train_valid_test_num_samples: with full validation None for validation, and for no other."""
    from megatron.core.datasets import gpt_dataset
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.utils import get_blend_from_list

    def blend(words: list[str]) -> Any:
        return get_blend_from_list(
            [str(folder / word) if word in FILES else word for word in words]
        )

    if "data_path" in options:
        where = {"blend": blend(options["data_path"]), "split": options["split"]}
    else:
        kinds = ("train_data_path", "valid_data_path", "test_data_path")
        where = {"blend_per_split": [blend(options[kind]) for kind in kinds]}
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LENGTH,
        tokenizer=Tokenizer(),
        path_to_cache=None,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        full_validation=full_validation,
        multiple_validation_sets=options.get("multiple_validation_sets", False),
        **where,
    )
    asked = [sizes[0], None if full_validation else sizes[1], sizes[2]]
    built = BlendedMegatronDatasetBuilder(
        gpt_dataset.GPTDataset, asked, lambda: True, config
    ).build()
    lists = [one if isinstance(one, list) else [one] for one in built]
    return {
        split: [served([one[i]["tokens"].numpy() for i in range(len(one))]) for one in sets]
        for split, sets in zip(("train", "valid", "test"), lists, strict=True)
    }


if __name__ == "__main__":
    if not hasattr(typing, "override"):  # it is of Python 3.12, and runs in 3.11 but for this name
        typing.override = lambda method: method  # type: ignore[attr-defined]
    out = Path(sys.argv[1])
    out.write_text(json.dumps(record(out.parent)))
