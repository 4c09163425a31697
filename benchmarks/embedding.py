"""Embedding of chunks: beside sentence-transformers on a CPU, and as a share of a GPU's peak.

Random weights, which take as long as trained ones. CPU: the shape of all-MiniLM-L6-v2, fp32, texts
of real chunks, tokenizing included on both sides. Both embed the same texts in turn, each in a
process of its own (`benchmarks/embedding_peer.py`), on as many threads; seconds of wall and of CPU
time, since other work on the machine slows the first. `--peer-python` names an interpreter that has
sentence-transformers; with our own, which has it not, the peer is transformers in its way.

GPU: the shape of BERT-large, bf16, every text of 256 tokens; no data files are needed."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.corpus import Setting, report
from benchmarks.shapes import PEAK
from trainyard.embedding.batches import Rows
from trainyard.embedding.config import EmbeddingConfig
from trainyard.embedding.embedder import BertEmbedder
from trainyard.embedding.encoder import Encoder, load_encoder
from trainyard.embedding.ragged import make_ragged
from trainyard.embedding.word_pieces import find_tokenizer
from trainyard.machine import available_cores
from trainyard.models.bert.config import BertConfig
from trainyard.models.bert.model import BertModel
from trainyard.models.init import init_parameters
from trainyard.parallel.device import device_name
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

Vectors = NDArray[np.float32]

Embedded = tuple[Vectors, float, float]
"""With the seconds of wall and of CPU time that it took."""

NUM_CHUNKS = 1000
CHUNK_LENGTH = 64

BATCH = 128
OTHER_BATCH = 32
"""The default of sentence-transformers."""

BAR = 1.3
SAME = 1e-5

VOCAB_SIZE = 30522
MINILM = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}

LENGTH = 256
NUM_TEXTS = 16384
GPU_BAR = 0.4


# --- beside sentence-transformers, on a CPU -----------------------------------------------------


def on_cpu(setting: Setting, peer_python: str) -> None:
    """Texts of real chunks, beside a peer with the same weights and batch."""
    texts = chunk_texts(setting)
    vocab = setting.vocab("bert/bert-base-uncased-vocab.txt")
    folder = setting.scratch / "minilm"
    write_encoder(folder, vocab)
    config = EmbeddingConfig(pooling="mean-all", normalize=True, retro_bert_batch_size=BATCH)
    mine = embedder_of(folder, vocab, config)
    _, num_tokens = mine.prepare(texts)
    with Peer(peer_python, folder, texts, setting.scratch) as peer:
        found = in_turn(
            {
                "ours": lambda: timed(lambda: mine.embed(mine.prepare(texts)[0])),
                "theirs": lambda: peer.embed(BATCH),
                "smaller": lambda: peer.embed(OTHER_BATCH),
            },
            setting.runs,
        )
    (wall, cpu), (their_wall, their_cpu), (other_wall, other_cpu) = found.values()
    figures = (
        f"{num_tokens / wall:,.0f} tok/s, {len(texts) / wall:,.0f} chunks/s, "
        f"{num_tokens / cpu:,.0f} tok per CPU s; batch {BATCH}: {their_wall / wall:.2f}x "
        f"{peer.name} ({num_tokens / their_wall:,.0f} tok/s), {their_cpu / cpu:.2f}x by CPU time; "
        f"its batch {OTHER_BATCH}: {other_wall / wall:.2f}x, {other_cpu / cpu:.2f}x"
    )
    name = f"embed {len(texts):,} chunks, MiniLM shape, fp32, {available_cores()} cores"
    ratio = min(their_wall / wall, their_cpu / cpu)
    report(name, figures, f"{BAR}x by both times, batch {BATCH}", ratio >= BAR)


def write_encoder(folder: Path, vocab: str) -> None:
    """A BERT of random weights with its tokenizer, as a Hugging Face folder."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(1)
    model = transformers.BertModel(transformers.BertConfig(**MINILM), add_pooling_layer=False)
    model.eval().save_pretrained(folder)
    transformers.BertTokenizerFast(vocab, do_lower_case=True).save_pretrained(folder)


def chunk_texts(setting: Setting) -> list[str]:
    """Texts of the first chunks of the corpus."""
    gpt = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=setting.vocab("gpt2/vocab.json"),
            merge_file=setting.vocab("gpt2/merges.txt"),
        )
    )
    texts: list[str] = []
    with setting.corpus.open() as lines:
        for line in lines:
            ids = gpt.encode(json.loads(line)["text"])
            starts = range(0, len(ids), CHUNK_LENGTH)
            texts += [gpt.decode(ids[start : start + CHUNK_LENGTH]) for start in starts]
            if len(texts) >= NUM_CHUNKS:
                break
    return texts[:NUM_CHUNKS]


def embedder_of(folder: Path, vocab: str, config: EmbeddingConfig) -> BertEmbedder:
    """Ours on all cores."""
    encoder = load_encoder(str(folder), torch.device("cpu"), config)
    bert = TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=vocab)
    return BertEmbedder(encoder, find_tokenizer(encoder, bert, folder), config, available_cores())


class Peer:
    """Another program that embeds the same texts, in a process of its own."""

    def __init__(self, python: str, folder: Path, texts: list[str], scratch: Path) -> None:
        self._vectors, given = scratch / "peer.npy", scratch / "texts.json"
        given.write_text(json.dumps(texts))
        program = str(Path(__file__).with_name("embedding_peer.py"))
        files = map(str, (folder, given, self._vectors))
        self._process = subprocess.Popen(
            [python, program, *files, str(available_cores())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = self._line()

    def __enter__(self) -> Peer:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """The program ends with its input."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the peer ended; it says why above"
        return line

    def embed(self, batch: int) -> Embedded:
        """All texts, in batches of a size."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        wall, cpu = json.loads(self._line())
        return np.load(self._vectors), wall, cpu


def timed(work: Callable[[], Vectors]) -> Embedded:
    """What a work gives, with its seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, time.perf_counter() - wall, time.process_time() - cpu


def in_turn(works: dict[str, Callable[[], Embedded]], runs: int) -> dict[str, tuple[float, float]]:
    """Least seconds (wall, CPU) of each, as other work on the machine only adds to them, after one
    run of each that is not counted and whose vectors are compared."""
    first = [work()[0] for work in works.values()]
    assert all(np.abs(other - first[0]).max() < SAME for other in first[1:]), "other vectors"
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(runs):
        for name, work in works.items():
            found[name].append(work()[1:])
    return {
        name: (min(w for w, _ in each), min(c for _, c in each)) for name, each in found.items()
    }


# --- a share of the peak, on a GPU --------------------------------------------------------------


def on_gpu(runs: int) -> None:
    """BERT-large in bf16 on texts of full length, from tokens on the host to vectors there."""
    device = torch.device("cuda")
    shape = BertConfig(
        num_layers=24,
        hidden_size=1024,
        num_attention_heads=16,
        seq_length=512,
        bias_gelu_fusion=False,
        post_layernorm=True,
        bert_binary_head=False,
        num_tokentypes=2,
    )
    with device:
        model = BertModel(shape, VOCAB_SIZE + 6)
    init_parameters(model, 1)
    model.lm_head = model.output_layer = None
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    make_ragged(model)
    encoder = Encoder("random weights", "trainyard", model, VOCAB_SIZE)
    config = EmbeddingConfig(bf16=True, retro_bert_max_chunk_length=LENGTH)
    mine = BertEmbedder(encoder, _no_tokenizer(), config, 1)
    rows = random_rows(NUM_TEXTS)
    mine.embed(random_rows(BATCH * 4))
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        assert np.isfinite(mine.embed(rows)).all()
        seconds.append(time.perf_counter() - began)
    taken = statistics.median(seconds)
    tokens = NUM_TEXTS * LENGTH
    mfu = tokens * operations_per_token(shape) / taken / PEAK
    figures = (
        f"{tokens / taken:,.0f} tok/s, {NUM_TEXTS / taken:,.0f} chunks/s, MFU {100 * mfu:.1f} % of "
        f"{PEAK / 1e12:.0f} TFLOP/s, {torch.cuda.max_memory_allocated() / 1e9:.1f} GB, "
        f"{device_name(device)}, torch {torch.__version__}"
    )
    name = f"embed {NUM_TEXTS:,} texts of {LENGTH} tokens, BERT-large shape, bf16"
    report(name, figures, f"{100 * GPU_BAR:.0f} % MFU", mfu >= GPU_BAR)


def _no_tokenizer() -> Any:
    """Rows are given as tokens."""
    return None


def random_rows(count: int) -> Rows:
    """Texts of random tokens."""
    random = np.random.default_rng(1)
    tokens = random.integers(1000, VOCAB_SIZE, count * LENGTH)
    return Rows(tokens, np.full(count, LENGTH), np.arange(count))


def operations_per_token(shape: BertConfig) -> float:
    """2 for each weight of the layers' matrices, and attention in both directions."""
    h, layers = shape.hidden_size, shape.num_layers
    return 2.0 * layers * (4 * h * h + 2 * h * shape.ffn_size) + 4.0 * layers * LENGTH * h
