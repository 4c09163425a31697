"""Each stage that reads an artifact refuses one flipped bit in it, by the file's name, and
publishes nothing. Documents of checkpoints: test_changed_documents."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.stages.directly import run_program
from tests.stages.pretrain_runs import arguments
from tests.stages.test_changed_documents import EVALUATED
from tests.stages.test_reshard import UNTIED
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.embedding.encoders import make as make_encoder
from tests.trainyard.retrieval.embedded import clustered, write_blocks
from trainyard.tokenizers.wordpiece import SPECIAL

pytestmark = pytest.mark.slow

MODEL, OPTIMIZER = "model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"
PUBLISHED = {"manifest.json", "config.json", "params.json", "latest_checkpointed_iteration.txt"}
TOKENIZE = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "learned")

COLLECTED, HELD_OUT = "collected/train-00000.jsonl", "collected/heldout.txt"

TRAINED = (
    *("--data-path", "a_text_document", "--seq-length", "32", "--train-iters", "2"),
    *("--global-batch-size", "2", "--split", "1,0,0", "--seed", "1"),
)
LEARNED = (
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--lr", "0.01"),
    *("--eval-iters", "0", "--num-threads", "1", "--micro-batch-size", "2"),
    *("--tokenizer-type", "ByteLevelTokenizer"),
)

READERS: dict[str, tuple[str, ...]] = {
    "reshard": ("--load-dir", "run", "--save-dir", "OUT"),
    "reshard to hf": ("--load-dir", "run", "--save-dir", "OUT", "--saver", "hf"),
    "reshard to meta": (
        *("--load-dir", "run", "--save-dir", "OUT", "--saver", "llama_mistral"),
        *("--saver-checkpoint-type", "meta", "--make-vocab-size-divisible-by", "1"),
    ),
    "reshard to core": ("--load-dir", "run", "--save-dir", "OUT", "--saver", "core"),
    "reshard to torch_dist": ("--load-dir", "run", "--save-dir", "OUT", "--saver", "torch_dist"),
    "evaluate": ("--load", "run", *EVALUATED, "--output-dir", "OUT"),
    "benchmark": ("--load", "run", "--prompts", "a", "--output-dir", "OUT"),
    "generate": (
        *("--load", "run", "--prompts", "a", "--num-tokens-to-generate", "2"),
        *("--output-dir", "OUT"),
    ),
    "parity": (
        *("--load", "run", "--num-prompts", "1", "--num-input-tokens", "4"),
        *("--num-tokens-to-generate", "2", "--output-dir", "OUT"),
    ),
    "quantize": ("--load-dir", "run", "--save-dir", "OUT"),
    "serve": ("--load", "run", "--port", "0"),
    "inspect": ("sound", "--diff", "run"),
    "verify": ("run",),
    "pretrain": (*TRAINED, *LEARNED, "--save", "OUT"),
    "index": (*TRAINED, "--output-dir", "OUT"),
    "blame": (*TRAINED, "--micro-batch-size", "2", "--step", "1"),
    "retro_embed": (
        *TRAINED,
        *("--chunks", "pretraining", "--retro-gpt-chunk-length", "8", "--load", "bert"),
        *("--tokenizer-type", "ByteLevelTokenizer", "--device", "cpu", "--output-dir", "OUT"),
    ),
    "merge": ("--input", "a_text_document", "b_text_document", "--output-prefix", "OUT"),
    "retro_db": (
        *("--data-path", "a_text_document", "--tokenizer-type", "ByteLevelTokenizer"),
        *("--retro-bert-tokenizer-type", "BertWordPieceLowerCase"),
        *("--retro-bert-vocab-file", "vocab.txt", "--retro-index-ntrain", "9"),
        *("--output-dir", "OUT"),
    ),
    "faiss_add": ("--index", "index", "--embeddings", "embeddings", "--output-dir", "OUT"),
    "tokenize": ("--input", "text.jsonl", "--output-prefix", "OUT", *TOKENIZE),
    "tokenize collected": (
        *("--input", COLLECTED, "--output-prefix", "OUT"),
        *("--tokenizer-type", "ByteLevelTokenizer"),
    ),
    "train_tokenizer": ("--input", COLLECTED, "--output-dir", "OUT", "--vocab-size", "300"),
    "evaluate collected": (
        *("--load", "sound", "--task", "WIKITEXT103", "--valid-data", HELD_OUT),
        *("--output-dir", "OUT"),
    ),
    "clean": ("--input", COLLECTED, "--output-dir", "OUT", "--rules", "min_chars:limit=2"),
    "dedup": ("--input", COLLECTED, "--output-dir", "OUT", "--no-near"),
    "decontaminate": (
        *("--input", COLLECTED, "--output-dir", "OUT"),
        *("--tasks", "mine", "--task-data", "text.jsonl"),
    ),
    "mix": ("--input", COLLECTED, "--sources", "a", "--output-dir", "OUT"),
    "score": ("--input", COLLECTED, "--classifier", "annotated", "--output-dir", "OUT"),
    "datasheet": ("--documents", COLLECTED, "--output-prefix", "OUT", "--num-identified", "0"),
}
WEIGHTS = [reader for reader, words in READERS.items() if "run" in words]
STATES = ["reshard", "inspect", "verify"]
TOKEN_FILES = ("a_text_document", "b_text_document")
TOKENS = [f"a_text_document.{ending}" for ending in ("bin", "idx", "docs")]

CASES = [
    *((reader, f"run/iter_0000050/{MODEL}") for reader in WEIGHTS),
    *((reader, f"run/iter_0000050/{OPTIMIZER}") for reader in STATES),
    *(("merge", name) for name in TOKENS),
    *((reader, name) for reader in ("retro_db", "pretrain", "retro_embed") for name in TOKENS[:2]),
    *((reader, TOKENS[1]) for reader in ("index", "blame")),
    *((reader, "a_text_document.sums") for reader in ("pretrain", "retro_db")),
    ("faiss_add", "index/empty.faissindex"),
    ("tokenize", "learned/tokenizer.json"),
    *(
        (reader, COLLECTED)
        for reader in ("tokenize collected", "train_tokenizer", "clean", "dedup", "decontaminate")
    ),
    *((reader, COLLECTED) for reader in ("mix", "score", "datasheet")),
    ("evaluate collected", HELD_OUT),
]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, two pairs of token files, and a tokenizer."""
    folder = tmp_path_factory.mktemp("artifacts")
    save_gpt(str(folder / "run"), random_gpt(replace(UNTIED, hidden_size=32, seq_length=64)))
    shutil.copytree(folder / "run", folder / "sound")
    (folder / "TEXT").write_text("the yard\n")
    make_encoder(folder / "bert")
    (folder / "vocab.txt").write_text("\n".join((*SPECIAL, "the", "yard", "is")) + "\n")
    write_blocks(folder / "embeddings", clustered(400, 8), 100)
    embeddings = ["--embeddings", str(folder / "embeddings"), "--retro-index-str", "IVF8,SQ8"]
    run_program("stages.faiss_train", *embeddings, "--output-dir", str(folder / "index"), expect=0)
    filled = ["--index", str(folder / "index"), "--output-dir", str(folder / "full")]
    run_program("stages.faiss_add", *embeddings[:2], *filled, expect=0)
    rows = [json.dumps({"text": f"the yard {k} is large enough to learn from"}) for k in range(50)]
    (folder / "text.jsonl").write_text("\n".join(rows))
    text = ["--input", str(folder / "text.jsonl")]
    learned = ["--vocab-size", "300", "--output-dir", str(folder / "learned")]
    run_program("stages.train_tokenizer", *text, *learned)
    collected = ["--max-size-mb", "1", "--num-shards", "1"]
    run_program("stages.collect", "--output-dir", str(folder / "collected"), *collected)
    for prefix in "ab":
        words = ["--output-prefix", str(folder / prefix), "--tokenizer-type", "ByteLevelTokenizer"]
        run_program("stages.tokenize", *text, *words)
    return folder


def flip(path: Path, share: float = 0.6) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("reader", "name"), CASES)
def test_a_flipped_bit_is_refused(artifacts: Path, tmp_path: Path, reader: str, name: str) -> None:
    here = tmp_path / "here"
    shutil.copytree(artifacts, here)
    flip(here / name)
    places = {path.name: str(path) for path in here.iterdir()}
    places |= {word: str(here / word) for word in ("OUT", *TOKEN_FILES, COLLECTED, HELD_OUT)}
    words = [places.get(word, word) for word in READERS[reader]]
    done = run_program(f"stages.{reader.split()[0]}", *words, expect=1)
    assert f"{Path(name).name}: " in done.err
    assert "damaged" in done.err or reader == "verify"
    assert "Traceback" not in done.err
    assert not PUBLISHED & {path.name for path in here.glob("OUT*/**/*")}
    assert not (here / "OUT.manifest.json").exists()


@pytest.mark.parametrize("reader", [reader for reader in WEIGHTS if reader != "serve"])
def test_what_is_whole_is_read(artifacts: Path, tmp_path: Path, reader: str) -> None:
    places = {path.name: str(path) for path in artifacts.iterdir()} | {"OUT": str(tmp_path / "out")}
    words = [places.get(word, word) for word in READERS[reader]]
    run_program(f"stages.{reader.split()[0]}", *words)


SHARED = {
    "clean": (("--rules", "min_chars:limit=2"), "report.json"),
    "dedup": (("--no-near",), "fingerprints-*"),
    "decontaminate": (("--tasks", "mine", "--task-data", "leak.jsonl"), "counts-*"),
    "mix": (("--sources", "a"), "sizes-*"),
    "score": (("--classifier", "ngrams", "--classifier-data", "labels.jsonl"), "scores-*"),
}
"""Options of a stage in shares, and a file of a share that the join reads."""


@pytest.mark.parametrize("stage", SHARED)
def test_a_share_with_a_flipped_bit_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"{i} of the trains that come to the yard"}) for i in range(9)]
    for name in ("text.jsonl", "leak.jsonl"):
        Path(name).write_text("\n".join(rows))
    labels = [json.dumps({"text": f"{i} trains", "label": i % 2}) for i in range(9)]
    Path("labels.jsonl").write_text("\n".join(labels))
    options, name = SHARED[stage]
    words = (f"stages.{stage}", "--input", "text.jsonl", "--output-dir", "out", *options)
    run_program(*words, "--rank", "0", "--world-size", "1", expect=0)
    (file,) = tmp_path.glob(f"**/{name}")
    flip(file)
    done = run_program(*words, "--world-size", "1", expect=1)
    assert f"{file.name}: digest" in done.err
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.parametrize("name", ["report.json", "clusters.jsonl"])
def test_a_datasheet_of_a_damaged_report_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text('{"text": "the same words"}\n' * 2)
    run_program("stages.dedup", "--input", "text.jsonl", "--output-dir", "unique", expect=0)
    flip(Path("unique", name))
    words = ("--documents", "text.jsonl", "--folders", "unique", "--output-prefix", "sheet")
    done = run_program("stages.datasheet", *words, expect=1)
    assert f"unique/{name}: digest" in done.err
    assert not Path("sheet.html").exists()


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_training_refuses_damaged_values(
    finished: Path, tokens: str, tmp_path: Path, kind: str
) -> None:
    """Of another run; of its own steps it takes the one before with --verify-checkpoint digests."""
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(finished, run)
    flip(run / "iter_0000008" / f"{kind}-00001-of-00001.safetensors")
    words = arguments(tokens, out, load=run, train_iters=10)
    done = run_program("stages.pretrain", *words, expect=1)
    assert f"{kind}-00001-of-00001.safetensors: tensor '{kind}." in done.err
    assert "is damaged" in done.err
    assert not (out / "manifest.json").exists()
