"""Mistakes of a user who knows Megatron-LM, and the one line that answers each before any work.

Each row is a command line of `python -m stages.STAGE` with its exit status and the words of its
answer. Files are those of the fixture; {0} is its folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stages.directly import run_program
from tests.test_docs import ROOT
from tests.trainyard.datasets.test_gpt import write_pair

SIZES = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16"
TRAIN = (
    f"pretrain {SIZES} --micro-batch-size 2 --global-batch-size 4 --train-iters 8 --lr 0.01 "
    "--tokenizer-type NullTokenizer --vocab-size 1000 --save {0}/run --mock-data"
)
DATA = TRAIN.replace("--mock-data", "")
TOKENIZE = "tokenize --input {0}/a.jsonl --output-prefix {0}/out"
EVALUATE = "evaluate --task WIKITEXT103 --valid-data {0}/notes/a --load {0}/"
LEARN = "train_tokenizer --input {0}/a.jsonl --output-dir {0}/o"
CLEAN = "clean --input {0}/a.jsonl --output-dir {0}/o"
INDEX = "index --data-path {0}/c_text_document --seq-length 16 --output-dir {0}/i"

FLAGS = {
    "--lerning-rate 1": "--lerning-rate is not an option: did you mean --learning-rate",
    "--learning-rate 1": "--lr and --learning-rate are names of one option; give one",
    "--hiden-size 3": "--hiden-size is not an option: did you mean --hidden-size?",
    "-lr 3": "'-lr' is neither an option nor the value of one: did you mean --lr?",
    "--lr 1e-3x": "--lr must be a number, got '1e-3x'",
    "--lr nan": "--lr must be a finite number, got nan",
    "--clip-grad -inf": "--clip-grad must be a finite number, got -inf",
    "--lr": "--lr takes one value, got none",
    "--lr 1 2": "--lr takes one value, got 1 2",
    "--bf16 true": "--bf16 takes no value, got 'true': --bf16 turns it on, --no-bf16 off",
    "--no-async-save 0": "--no-async-save takes no value, got '0': --async-save turns it on",
    "--train-samples 1e6": "--train-samples must be a whole number, got '1e6': write 1000000",
    "--train-iters 1,000": "--train-iters must be a whole number, got '1,000': write 1000",
    "--train-iters 8.5": "--train-iters must be a whole number, got '8.5'$",
    "--normalization rmsnorm": "--normalization is 'rmsnorm'; .*: did you mean 'RMSNorm'",
    "--tokenizer-type Llama3": "--tokenizer-type is 'Llama3'; choose one of",
    "--train-iters -8": "--train-iters must be at least 1, got -8",
    f"--train-iters {10**30}": "--train-iters must be at most 9223372036854775807, got 1",
    f"--train-iters {10**12}": "--train-iters must be at most 100000000, got 1000000000000",
    f"--hidden-size {2**40}": "--hidden-size must be at most 2147483647",
    "--nproc-per-node 99999": "--nproc-per-node must be at most 1024, got 99999",
    "--tensor-model-parallel-size 3": "--num-attention-heads",
    "--micro-batch-size 3": "--global-batch-size",
    "--lr-warmup-iters 9": "--lr-warmup-iters",
    "--data-path x": "--data-path and --mock-data exclude each other",
    "--yaml-cfg {0}/deep.yaml": "deep.yaml is not well-formed YAML",
    "--config {0}/deep.yaml": "deep.yaml is (nested too deeply|not well-formed)",
    "--config {0}/none.toml": "--config: .*none.toml",
    "--config {0}/notes": "--config: .*notes.*folder",
    "--save /proc/run": "/proc/run: this folder cannot be created .*; choose another place",
    "--save {0}/a.jsonl": "a.jsonl: this is a file; the output is a folder, choose another",
    "--load {0}/none": "1 --load .*/none: no file matches; .*; a checkpoint is the folder of",
    "--load {0}/notes": "--load .*/notes: no checkpoint there; found a; no step folder iter_",
}
"""Added to a command of pretrain that is right without; 2 is the status unless a number is here."""

LINES = {
    f"{DATA} --data-path {{0}}/c": r"1 --data-path .*/c: .*the nearest name is .*/c_text_document$",
    f"{DATA} --data-path {{0}}/e": r"1 .*e.idx: .*the nearest name is .*/e_text_document",
    f"{DATA} --data-path {{0}}/loop": r"1 .*loop.bin: a link to loop.bin, which leads back to it",
    f"{DATA} --data-path {{0}}/c_text_document.bin": "[12] ",
    "pretrain lr 3": "'lr' is neither an option nor the value of one: did you mean --lr?",
    "tokenize": "--input, --output-prefix, --tokenizer-type are required and not given: add flags",
    f"{TOKENIZE} --tokenizer-typ x": "--tokenizer-typ is not an option: did you mean --tokenizer-",
    f"{TOKENIZE} --tokenizer-type NullTokenizer --vocab-size 9 --workers -2": "--workers must be",
    f"{TOKENIZE} --tokenizer-type GPT2BPETokenizer": "--vocab-file",
    f"{TOKENIZE} --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta/x": "1 .*on a hub ",
    "tokenize --inpt a": r"--inpt is not an option: did you mean --input\?",
    f"{EVALUATE}notes": "--load .*/notes: no checkpoint there; found a; no step folder",
    f"{EVALUATE}tracker": "it has Megatron-LM's latest_checkpointed_iteration.txt but not the weig",
    f"{EVALUATE}empty": "1 --load .*/empty: no file matches; the folder is empty; a checkpoint is",
    f"{EVALUATE}notes --tokenizer-type GPT2BPETokenizer": (
        "--tokenizer-type GPT2BPETokenizer needs --vocab-file; or leave it out: the checkpoint"
    ),
    f"{EVALUATE}notes --num-layer 2": r"--num-layer is not an option: did you mean --num-layers",
    f"{EVALUATE}notes --taks x": r"--taks is not an option: did you mean --task\?",
    "evaluate --task WIKITEXT": "--task is 'WIKITEXT'; .*: did you mean 'WIKITEXT103'",
    "evaluate --task WIKITEXT103": "--load, --valid-data are required and not given",
    "benchmark --load {0}/notes": "one of --prompts .* and --num-input-tokens .* is needed",
    "benchmark --load {0}/notes --prompts a --tensor-parallel 2": "--tensor-model-parallel-size",
    "reshard --load-dir {0}/tracker --save-dir {0}/o": "copy the folder iter_XXXXXXX .or release",
    "reshard --load-dir {0}/empty --save-dir {0}/o": "1 .*folder is empty; a checkpoint is the fol",
    "reshard --load-dir {0}/notes --save-dir {0}/o --loader core": "--loader core reads Mega",
    "reshard --target-tensor-paralel-size 2": "did you mean --target-tensor-parallel-size or",
    "reshard --load-dir {0}/notes --save-dir {0}/notes/o": "must not be the same folder or one",
    f"plan {SIZES} --fp16 --bf16": "--bf16 and --fp16 exclude each other; give one",
    f"plan {SIZES} --tokenizer-type Llama2Tokenizer": "Llama2Tokenizer needs --tokenizer-model",
    f"plan {SIZES} --vocab-file {{0}}/none": "1 .*none",
    f"plan {SIZES} --padded-vocab-size 9 --vocab-size 10": "must be at least --vocab-size",
    "merge --input {0}/none --output-prefix {0}/o": "1 .*none",
    "merge --input {0}/notes --output-prefix {0}/o": "1 .*notes/a is not half of a .bin/.idx pair",
    f"{INDEX} --train-iters 2": "--global-batch-size",
    f"{INDEX} --global-batch-size 4 --train-iters {10**12}": "--train-iters must be at most",
    f"{TOKENIZE} --tokenizer-type NullTokenizer --vocab-size 9 --rank 2 --world-size 2": (
        "--rank 2: shares of --world-size 2 are 0 to 1"
    ),
    "retro_explore --retro-project-dir {0}/none": "1 .*none/config.json is missing: not the folder",
    "blame --load {0}/notes --step 1 --rank -1": "--rank must be at least 0, got -1",
    "inspect": "--checkpoint is required and not given",
    "inspect {0}/none": "1 --checkpoint .*/none: no checkpoint there; the nearest name is .*/notes",
    "certify {0}/empty": "1 .*empty",
    "verify {0}/none": "1 .*none",
    "report --checkpoint {0}/none --output-prefix {0}/o": "1 --checkpoint .*none: no file matches",
    "collect --output-dir /proc/x": "/proc/x: this folder cannot be created",
    "train_tokenizer --input {0}/none --output-dir {0}/o --vocab-size 300": "1 --input .*: no file",
    f"{LEARN} --vocab-size {2**31}": " train_tokenizer: --vocab-size must be at most 10000000",
    f"{TOKENIZE} --tokenizer-type TikTokenizer --tokenizer-model {{0}}/a.jsonl "
    f"--tiktoken-num-special-tokens {2**40}": "--tiktoken-num-special-tokens must be at most",
    "classify": " classify: --num-layers.* are required and not given",
    "classify --taks MNLI": r" classify: --taks is not an option: did you mean --task\?$",
    "classify --task MNLY": " classify: --task is 'MNLY'; .*: did you mean 'MNLI'",
    "finetune": " finetune: --load is required: the checkpoint to tune",
    "finetune --load {0}/note": r"1 finetune: --load \(or --pretrained-.*\) .*name is .*/notes",
    "parity --load {0}/notes --num-prompts 1000000000": "--num-prompts must be at most 100000",
    f"parity --load {{0}}/notes --num-input-tokens {2**62}": "--num-input-tokens must be at most",
    "generate --load {0}/notes --promts a": "did you mean --prompts",
    "serve --load {0}/notes --port 99999999": "--port must be at most 65535, got 99999999",
    "quantize --load {0}/notes --save-dir {0}/o": r"--load is not an option: .* --load-dir\?",
    "dedup --input {0}/a.jsonl --output-dir {0}/o --jaccard-treshold 1": "--jaccard-threshold",
    "decontaminate --input {0}/a.jsonl --tasks squad": "--output-dir, --task-data are required",
    "score --input {0}/a.jsonl --output-dir {0}/o": "--classifier is required and not given",
    "mix --input {0}/a.jsonl --sources a b --output-dir {0}/o": "--sources has 2 names and --inp",
    "clean --input {0}/a.jsonl --output-dir {0}/o --preset C4": "did you mean 'c4'",
    f"{CLEAN} --rules min_chars:limt=9": "min_chars has no 'limt'; did you mean 'limit'",
    f"{CLEAN} --rules min_char": "no rule 'min_char'; did you mean 'min_chars'",
    "collect --source wikipdia --output-dir {0}/o": "did you mean 'wikipedia'",
    "datasheet --documents {0}/notes --output-prefix {0}/o": "--documents: .*/notes/a must end",
    "faiss_add --index {0}/notes --embeddings {0}/notes --output-dir {0}/o": (
        "1 --index .*/notes: no index.json there; give the output of faiss_train"
    ),
    "retro_embed --retro-db {0}/notes": "--data-path, --tokenizer-type, --output-dir are requ",
    "retro_explore {0}/notes": "1 .*/notes/config.json is missing: not the folder of a Retro",
}

LAUNCHED = {
    "RANK=0 WORLD_SIZE=abc": "the variable WORLD_SIZE='abc' is not a whole number: torchrun sets",
    "RANK=x WORLD_SIZE=2": "the variable RANK='x' is not a whole number",
    "RANK=-1 WORLD_SIZE=2": "the variable RANK='-1' is not a whole number",
    "RANK=5 WORLD_SIZE=2": "the variable RANK=5 must be below WORLD_SIZE=2, as ranks count from 0",
    "RANK=0 WORLD_SIZE=0": "the variable WORLD_SIZE=0 must be at least 1",
    "RANK=0 WORLD_SIZE=2 LOCAL_RANK=3 LOCAL_WORLD_SIZE=2": "LOCAL_RANK=3 must be below LOCAL_WORLD",
    "RANK=0 WORLD_SIZE=2": "MASTER_ADDR and MASTER_PORT not set",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=99999999": "MASTER_PORT=99999999 is not a port",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=x": "MASTER_PORT='x' is not a whole number",
}


def test_the_wrong_python_names_the_right_command() -> None:
    for module in ("stages.plan", "flows.gc", "flows"):
        command = [sys.executable, "-S", "-m", module, "--help"]  # without installed packages
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        assert re.fullmatch(
            f"error: {sys.executable} has no module blake3, which trainyard needs: run "
            f".*`{ROOT}/.venv/bin/python -m {module} ...`, or `. {ROOT}/.venv/bin/activate` fi.*\n",
            done.stderr,
        ), done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files, a line of text, and folders without a checkpoint."""
    root = tmp_path_factory.mktemp("mistakes")
    write_pair(root / "c_text_document", [30] * 9)
    words = ("--input", str(root / "e.jsonl"), "--output-prefix", str(root / "e"))
    (root / "e.jsonl").write_text('{"text": "some words"}\n')
    run_program("stages.tokenize", *words, "--tokenizer-type", "ByteLevelTokenizer", expect=0)
    shutil.copy(root / "c_text_document.idx", root / "loop.idx")
    (root / "loop.bin").symlink_to("loop.bin")
    for name in ("empty", "notes", "tracker"):
        (root / name).mkdir()
    (root / "a.jsonl").write_text('{"text": "1 2"}\n')
    (root / "notes" / "a").write_text("nothing of use\n")
    (root / "tracker" / "latest_checkpointed_iteration.txt").write_text("50")
    (root / "deep.yaml").write_text("a: " + "{a: " * 100_000)
    return root


def check_answer(line: str, folder: Path, answer: str) -> None:
    """One line on stderr says what is wrong, with the right exit status, and nothing is made."""
    status, _, words = answer.partition(" ") if answer[:1] in "1[" else ("2", "", answer)
    before = sorted(folder.iterdir())
    stage, *arguments = line.format(folder).split()
    done = run_program(f"stages.{stage}", *arguments)
    said = [text for text in done.err.splitlines() if " error " in text]
    assert re.fullmatch(status, str(done.status)), done.err
    assert len(said) == 1, done.err
    assert re.search(words, said[0]), said[0]
    assert done.out == ""
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("flags", FLAGS)
def test_a_mistake_in_a_training_is_answered(folder: Path, flags: str) -> None:
    check_answer(f"{TRAIN} {flags}", folder, FLAGS[flags])


@pytest.mark.parametrize("line", LINES)
def test_a_mistake_is_answered(folder: Path, line: str) -> None:
    check_answer(line, folder, LINES[line])


@pytest.mark.parametrize("variables", LAUNCHED)
def test_variables_that_no_launcher_sets_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variables: str
) -> None:
    # With torch loaded, one rank of several would end this process.
    monkeypatch.setattr("stages.runtime.cli.is_one_of_several", lambda: False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    check_answer(TRAIN, folder, LAUNCHED[variables])
