"""Embedding of chunks: beside transformers' BertModel on a CPU, and as a share of a GPU's peak.

Random weights, which take as long as trained ones. CPU: the shape of all-MiniLM-L6-v2, fp32, texts
of real chunks, tokenizing included on both sides. Both embed the same texts in turn in one process;
seconds of wall and of CPU time, since other work on the machine slows the first. The peer is
sentence-transformers where it is installed, else transformers in its way: texts sorted by length,
padded to the longest of a batch, pooled with a mask.

GPU: the shape of BERT-large, bf16, every text of 256 tokens; no data files are needed."""

from __future__ import annotations

import importlib.util
import json
import statistics
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


# --- beside transformers, on a CPU --------------------------------------------------------------


def on_cpu(setting: Setting) -> None:
    """Texts of real chunks, beside transformers with the same weights and batch."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    texts = chunk_texts(setting)
    vocab = setting.vocab("bert/bert-base-uncased-vocab.txt")
    folder = setting.scratch / "minilm"
    torch.manual_seed(1)
    model = transformers.BertModel(transformers.BertConfig(**MINILM), add_pooling_layer=False)
    model.eval().save_pretrained(folder)
    words = transformers.BertTokenizerFast(vocab, do_lower_case=True)
    config = EmbeddingConfig(pooling="mean-all", normalize=True, retro_bert_batch_size=BATCH)
    mine = embedder_of(folder, vocab, config)
    _, num_tokens = mine.prepare(texts)
    words.save_pretrained(folder)
    peer, encode = peer_of(folder, model, words)
    found = in_turn(
        {
            "ours": lambda: mine.embed(mine.prepare(texts)[0]),
            "theirs": lambda: encode(texts, BATCH),
            "smaller": lambda: encode(texts, OTHER_BATCH),
        },
        setting.runs,
    )
    (wall, cpu), (their_wall, their_cpu), (other_wall, other_cpu) = found.values()
    figures = (
        f"{num_tokens / wall:,.0f} tok/s, {len(texts) / wall:,.0f} chunks/s, "
        f"{num_tokens / cpu:,.0f} tok per CPU s; batch {BATCH}: {their_wall / wall:.2f}x "
        f"{peer} ({num_tokens / their_wall:,.0f} tok/s), {their_cpu / cpu:.2f}x by CPU time; "
        f"its batch {OTHER_BATCH}: {other_wall / wall:.2f}x, {other_cpu / cpu:.2f}x"
    )
    name = f"embed {len(texts):,} chunks, MiniLM shape, fp32, {available_cores()} cores"
    report(name, figures, f"{BAR}x by CPU time, batch {BATCH}", their_cpu / cpu >= BAR)


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


def peer_of(
    folder: Path, model: Any, words: Any
) -> tuple[str, Callable[[list[str], int], Vectors]]:
    """The peer's name, and how it embeds texts in batches of a size."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return "transformers", lambda texts, batch: theirs(model, words, texts, batch)
    from sentence_transformers import SentenceTransformer, models  # type: ignore[import-not-found]

    layers = models.Transformer(str(folder), max_seq_length=LENGTH)
    pooling = models.Pooling(model.config.hidden_size, pooling_mode="mean")
    sentences = SentenceTransformer(modules=[layers, pooling, models.Normalize()], device="cpu")
    return "sentence-transformers", lambda texts, batch: sentences.encode(texts, batch_size=batch)


def theirs(model: Any, words: Any, texts: list[str], batch: int) -> Vectors:
    """Vectors by transformers, as sentence-transformers uses it."""
    order = np.argsort([-len(text) for text in texts])
    found = np.empty((len(texts), model.config.hidden_size), np.float32)
    with torch.inference_mode():
        for first in range(0, len(texts), batch):
            some = order[first : first + batch]
            tokens = words(
                [texts[number] for number in some],
                padding=True,
                truncation=True,
                max_length=LENGTH,
                return_tensors="pt",
            )
            hidden = model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1).float()
            means = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            found[some] = torch.nn.functional.normalize(means, dim=1).numpy()
    return found


def in_turn(works: dict[str, Callable[[], Vectors]], runs: int) -> dict[str, tuple[float, float]]:
    """Least seconds (wall, CPU) of each, as other work on the machine only adds to them, after one
    run of each that is not counted and whose vectors are compared."""
    first = [work() for work in works.values()]
    assert all(np.abs(other - first[0]).max() < SAME for other in first[1:]), "other vectors"
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(runs):
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
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
