"""Errors that need no torch are reported before torch is imported: here its import fails."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.stages.pretrain_runs import arguments
from tests.stages.test_changed_documents import LLAMA
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt, tokenizer_files
from tests.trainyard.datasets.test_gpt import write_pair
from trainyard.corpus.indexed import IndexedWriter
from trainyard.testing.kill import Zygote

pytestmark = pytest.mark.slow

PRELOADED = (
    "stages.runtime.cli",
    "stages.runtime.execute",
    "stages.reshard.run",
    "stages.inspect.run",
)
"""Modules that do without torch; each case is a process of its own that has them."""

IMPORTED = "torch was imported"
STEP = "iter_0000050"
WEIGHTS = f"{STEP}/model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def torchless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Starts stages where importing torch fails."""
    folder = tmp_path_factory.mktemp("sabotaged")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(f"raise ImportError({IMPORTED!r})\n")
    found = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(folder), *([found] if found else [])])
    with (
        mock.patch.dict(os.environ, {"PYTHONPATH": path}),
        Zygote("stages.pretrain.inputs", *PRELOADED) as process,
    ):
        yield process


# --- what is wrong ------------------------------------------------------------------------------


def edited(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A file changed."""

    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return spoil


def without(name: str) -> Callable[[Path], None]:
    """A file gone."""
    return lambda folder: (folder / name).unlink()


def floats(folder: Path) -> None:
    """Tokens that are no whole numbers."""
    with open(folder / "t.bin", "wb") as data, open(folder / "t.idx", "wb") as index:
        writer = IndexedWriter(data, np.float32)
        for _ in range(40):
            writer.add_document([np.ones(60, np.float32)])
        writer.write_index(index)


def nothing(folder: Path) -> None:
    """All is well."""


Case = tuple[Callable[[Path], None], dict[str, object], int, str]

PRETRAIN: dict[str, Case] = {
    "no data": (nothing, {"data_path": "/nowhere/t"}, 1, "--data-path /nowhere/t: no file"),
    "no .idx": (without("t.idx"), {}, 1, r"t\.idx: there is no such file"),
    "no .bin": (without("t.bin"), {}, 1, r"t\.bin: there is no such file"),
    "an empty .idx": (edited("t.idx", lambda d: b""), {}, 1, r"t\.idx is 0 bytes"),
    "a cut .idx": (edited("t.idx", lambda d: d[:-9]), {}, 1, r"t\.idx is \d+ bytes, but its"),
    "a long .idx": (edited("t.idx", lambda d: d + d), {}, 1, r"t\.idx is \d+ bytes, but its"),
    "no .idx at all": (edited("t.idx", lambda d: b"x" * len(d)), {}, 1, "not a Megatron .idx"),
    "odd bounds": (
        edited("t.idx", lambda d: d[:-8] + b"\1" * 8),
        {},
        1,
        r"t\.idx: document bounds run from 0 to \d+",
    ),
    "a cut .bin": (edited("t.bin", lambda d: d[:-2]), {}, 1, r"t\.bin is \d+ bytes, but "),
    "a long .bin": (edited("t.bin", lambda d: d + d), {}, 1, r"t\.bin is \d+ bytes, but "),
    "offsets of another run": (
        edited("t.idx", lambda d: d[: 34 + 4 * 40] + bytes(8 * 40) + d[34 + 12 * 40 :]),
        {},
        1,
        r"t\.idx: sequence 1 does not begin where the one before it ends",
    ),
    "floats": (floats, {}, 1, "the tokens are stored as float32"),
    "a split that is none": (nothing, {"split": "a,b"}, 2, "--split 'a,b' must be"),
    "no document to validate with": (nothing, {"split": "1,0,0"}, 2, "the valid split .* none"),
    "no document to train with": (nothing, {"split": "0,1,0"}, 2, "the train split .* none"),
    "less than a sample": (nothing, {"seq_length": 4096}, 2, "less than one sample"),
    "no validation data": (
        nothing,
        {"train_data_path": "t", "data_path": None},
        2,
        "--valid-data-path is not given, but the run needs valid samples",
    ),
    "a list of nothing": (
        nothing,
        {"data_args_path": "/nowhere/list", "data_path": None},
        2,
        "--data-args-path /nowhere/list: the file does not exist",
    ),
    "a deep list": (
        lambda folder: (folder / "list").write_bytes(b"[" * 100_000) and None,
        {"per_split_data_args_path": "list", "data_path": None},
        2,
        "list is not a JSON document",
    ),
    "no vocabulary": (
        nothing,
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "/no/v", "merge_file": "/no/m"},
        1,
        "--vocab-file /no/v: no file",
    ),
    "a folder as vocabulary": (
        nothing,
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "other", "merge_file": "other/notes"},
        1,
        "--vocab-file: no vocab.json at",
    ),
    "no model": (
        nothing,
        {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/no/model"},
        1,
        "--tokenizer-model /no/model: no file",
    ),
    "a folder without one": (
        nothing,
        {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "other"},
        1,
        r"neither a tokenizer\.json nor a folder with one",
    ),
    "nothing to load": (nothing, {"load": "/no/run"}, 1, "--load /no/run: no file"),
    "no checkpoint": (nothing, {"load": "other"}, 2, "--load .*other: no checkpoint there"),
}
"""Damage to the files, further options, exit status and message."""

STEPS: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "a changed config": (edited(f"{STEP}/config.json", lambda d: d + b" "), 1, r"config\.json: "),
    "a changed state": (edited(f"{STEP}/state.json", lambda d: d + b" "), 1, r"state\.json: "),
    "a changed index": (edited(f"{STEP}/index.json", lambda d: d + b" "), 1, r"index\.json: "),
    "a torn manifest": (edited(f"{STEP}/manifest.json", lambda d: d[:99]), 1, "not a manifest"),
    "an unfinished step": (without(f"{STEP}/manifest.json"), 2, "that save did not finish"),
    "lost weights": (without(WEIGHTS), 1, r"model-.*: missing, manifest\.json says"),
    "cut weights": (edited(WEIGHTS, lambda d: d[:-1]), 1, r"model-.*: \d+ bytes, manifest"),
}

TOKENIZERS: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "a changed tokenizer": (
        edited(f"{STEP}/tokenizer/tokenizer.json", lambda d: d + b" "),
        1,
        r"tokenizer/tokenizer\.json: ",
    ),
    "a lost tokenizer": (
        lambda folder: shutil.rmtree(folder / STEP / "tokenizer"),
        1,
        r"tokenizer/\w+\.json: (there is no such file|missing)",
    ),
}

LOADERS = {
    "pretrain": ("--load", "RUN"),
    "convert": ("--load", "RUN", "--ckpt-convert-format", "torch", "--ckpt-convert-save", "OUT"),
    "evaluate": ("--task", "WIKITEXT103", "--load", "RUN", "--valid-data", "TEXT"),
    "benchmark": ("--load", "RUN", "--prompts", "a"),
    "inspect": ("RUN",),
    "compare": ("RUN", "--diff", "RUN"),
    "reshard": ("--load-dir", "RUN", "--save-dir", "OUT"),
    "export": ("--load-dir", "RUN", "--save-dir", "OUT", "--saver", "hf"),
}
MODULES = {"convert": "pretrain", "compare": "inspect", "export": "reshard"}
READ_TOKENIZERS = ("evaluate", "benchmark", "reshard", "export")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of forty documents, a run, and a folder with something else."""
    folder = tmp_path_factory.mktemp("sound")
    write_pair(folder / "t", [60] * 40)
    save_gpt(str(folder / "run"), random_gpt(LLAMA))
    (folder / "other").mkdir()
    (folder / "other" / "notes").write_text("nothing of use\n")
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    shutil.copytree(sound, tmp_path / "in")
    return tmp_path / "in"


def check_refused(
    torchless: Zygote, module: str, words: list[str], status: int, message: str, out: Path
) -> None:
    found, _, log = torchless.run(f"stages.{module}", words)
    assert IMPORTED not in log
    assert found == status, log
    assert re.search(message, log), log
    assert "Traceback" not in log
    assert not out.exists()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", PRETRAIN)
def test_pretrain_refuses_invalid_data_and_files_without_torch(
    torchless: Zygote, folder: Path, tmp_path: Path, case: str, ranks: int
) -> None:
    spoil, options, status, message = PRETRAIN[case]
    spoil(folder)
    given: dict[str, Any] = {"data_path": "t", "nproc_per_node": ranks, **options}
    if "tokenizer_type" in options:
        given["vocab_size"] = None
    for name, value in given.items():
        if value in ("t", "list") or str(value).startswith("other"):
            given[name] = folder / str(value)
    words = arguments("", tmp_path / "out", **given)
    check_refused(torchless, "pretrain", words, status, message, tmp_path / "out")


@pytest.mark.parametrize("reader", LOADERS)
@pytest.mark.parametrize("case", [*STEPS, *TOKENIZERS])
def test_readers_refuse_an_invalid_checkpoint_without_torch(
    torchless: Zygote, folder: Path, tmp_path: Path, case: str, reader: str
) -> None:
    if case in TOKENIZERS and reader not in READ_TOKENIZERS:
        pytest.skip("does without the tokenizer that the step carries")
    spoil, status, message = {**STEPS, **TOKENIZERS}[case]
    spoil(folder / "run")
    module, out = MODULES.get(reader, reader), tmp_path / "out"
    places = {"RUN": folder / "run", "OUT": out, "TEXT": folder / "other" / "notes"}
    words = [str(places.get(word, word)) for word in LOADERS[reader]]
    if module == "pretrain":
        words += arguments(str(folder / "t"), out if reader == "pretrain" else tmp_path / "save")
    check_refused(torchless, module, words, status, message, out)


def test_inspect_needs_no_torch(torchless: Zygote, folder: Path) -> None:
    status, _, log = torchless.run("stages.inspect", [str(folder / "run")])
    assert status == 0, log
    assert "model.decoder.layers.0.mlp.linear_fc1.weight" in log


def test_a_run_with_its_own_steps_does_not_check_load(torchless: Zygote, tmp_path: Path) -> None:
    """Its own come first, so that what --load names may be gone bad since."""
    write_pair(tmp_path / "t", [60] * 40)
    base, save = tmp_path / "base", tmp_path / "save"
    options: dict[str, Any] = {"train_iters": 2, "save_interval": 1, "nproc_per_node": 1}
    train(arguments(str(tmp_path / "t"), base, **options))
    words = arguments(str(tmp_path / "t"), save, load=base, finetune=True, **options)
    train([*words, "--exit-interval", "1"], status=128 + signal.SIGTERM)
    edited("iter_0000002/config.json", lambda d: d + b" ")(base)
    assert IMPORTED in torchless.run("stages.pretrain", words)[2]


def train(words: list[str], status: int = 0) -> None:
    """Here with torch: without the folder that hides it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = [sys.executable, "-m", "stages.pretrain", *words]
    done = subprocess.run(program, capture_output=True, env=environment)
    assert done.returncode == status, done.stderr.decode()


def test_valid_input_reaches_torch(torchless: Zygote, folder: Path, tmp_path: Path) -> None:
    for name, data in tokenizer_files().items():
        (folder / "other" / name.split("/")[1]).write_bytes(data)
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": folder / "other"}
    cases: list[dict[str, Any]] = [
        {},
        {"split": "1,0,0", "eval_iters": 0},
        {"split": "98,2,0"},
        {"load": folder / "run"},
        {"mock_data": True, "data_path": None},
        {**tokenizer, "vocab_size": None},
    ]
    for options in cases:
        words = arguments(str(folder / "t"), tmp_path / "out", **options)
        status, _, log = torchless.run("stages.pretrain", words)
        assert IMPORTED in log, log
        assert status != 0


@pytest.mark.parametrize("reader", ["evaluate", "benchmark", "generate"])
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (("--tensor-model-parallel-size", "3"), r"--num-attention-heads \(\d\) must be divisible"),
        (("--pipeline-model-parallel-size", "9"), "is more than the 2 layers of the model"),
    ],
)
def test_a_layout_that_the_model_does_not_fit_is_refused_before_ranks_start(
    torchless: Zygote,
    sound: Path,
    tmp_path: Path,
    reader: str,
    layout: tuple[str, str],
    message: str,
) -> None:
    (tmp_path / "text").write_text("some words")
    places = {"RUN": str(sound / "run"), "TEXT": str(tmp_path / "text")}
    command = LOADERS[{"generate": "benchmark"}.get(reader, reader)]  # both take --prompts
    words = [*(places.get(word, word) for word in command), *layout, "--nproc-per-node", layout[1]]
    check_refused(torchless, reader, words, 2, message, tmp_path / "out")
