"""Speed and memory of retrieval databases, each figure beside its peer's in the same run.

    python -m benchmarks.retro                     every row, medians of 5
    python -m benchmarks.retro chunks --runs 1     one row, a quick look
    python -m benchmarks.retro embed --device cuda on a GPU, without data files
    python -m benchmarks.retro embed --peer-python PEER/bin/python
                                                   beside sentence-transformers

Prints a table row as each is done, and whether it reaches the bar. Data: --data (default
../shared/data) with corpora/corpus_en.jsonl and vocab/; what is made lies in --scratch."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.corpus import TIMES, Setting, gpt2, loop_seconds, peer, report, stage, tokenize
from benchmarks.measure import Prepare, measure, run_once

CHUNK_LENGTH = 64
MEMORY_MB = 500


def token_files(setting: Setting, corpus: Path) -> str:
    """The prefix of the corpus in GPT-2's tokens; made once."""
    prefix = str(setting.scratch / corpus.stem)
    if not Path(f"{prefix}.manifest.json").exists():
        run_once(tokenize(setting, corpus, gpt2(setting), prefix, forget=False)())
    return f"{prefix}_text_document"


def build(setting: Setting, prefix: str) -> Prepare:
    """`stages.retro_db` of a corpus into a fresh folder."""

    def prepare() -> list[str]:
        out = setting.scratch / "db"
        shutil.rmtree(out, ignore_errors=True)
        command = stage("stages.retro_db", "--data-path", prefix, "--output-dir", str(out))
        command += [flag for flag in gpt2(setting) if flag != "--append-eod"]
        command += ["--retro-bert-tokenizer-type", "BertWordPieceLowerCase"]
        command += ["--retro-bert-vocab-file", setting.vocab("bert/bert-base-uncased-vocab.txt")]
        return [*command, "--retro-index-ntrain", "50000", "--force"]

    return prepare


def write_chunks(setting: Setting, prefix: str) -> tuple[Path, int]:
    """The texts of all chunks of a corpus, as JSONL for the peer; and their number."""
    from trainyard.corpus.indexed import IndexedDataset
    from trainyard.tokenizers.config import TokenizerConfig
    from trainyard.tokenizers.registry import build_tokenizer

    gpt = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=setting.vocab("gpt2/vocab.json"),
            merge_file=setting.vocab("gpt2/merges.txt"),
            use_gigatoken=False,
        )
    )
    path, count = setting.scratch / "chunks.jsonl", 0
    with path.open("w") as out:
        for sequences in IndexedDataset(prefix).documents():
            for tokens in (sequence[:-1].tolist() for sequence in sequences):
                for start in range(0, len(tokens), CHUNK_LENGTH):
                    text = gpt.decode(tokens[start : start + CHUNK_LENGTH])
                    out.write(json.dumps({"text": text}) + "\n")
                    count += 1
    return path, count


# --- rows -------------------------------------------------------------------------------------


def row_chunks(setting: Setting) -> None:
    """Chunk database of 56 MB, whole command, beside the BERT tokenizer's loop on two threads."""
    prefix = token_files(setting, setting.corpus)
    chunks, count = write_chunks(setting, prefix)
    vocab = setting.vocab("bert/bert-base-uncased-vocab.txt")
    found = measure(
        {
            "ours": build(setting, prefix),
            "loop": peer("huggingface_bert_chunks", chunks, vocab, threads=2),
        },
        setting.runs,
        0,
    )
    ours, seconds = found["ours"], loop_seconds(found["loop"])
    ratio = seconds / ours.wall_seconds
    figures = (
        f"{ours.wall_seconds:.1f} s ({ours.spread}), {ours.cpu_seconds:.1f} CPU s, "
        f"{count / ours.wall_seconds * 60:,.0f} chunks a minute, {ours.peak_mb:.0f} MB; "
        f"{ratio:.2f}x encode_batch_fast ({seconds:.1f} s, "
        f"{found['loop'].cpu_seconds:.1f} CPU s with its reading)"
    )
    ok = ratio >= 0.75 and ours.peak_mb < MEMORY_MB
    report(f"chunk database, {count:,} chunks", figures, f"0.75x, {MEMORY_MB} MB", ok)


def row_chunks_large(setting: Setting) -> None:
    """Ten times the corpus, beside the corpus."""
    small, large = (token_files(setting, path) for path in (setting.corpus, setting.large))
    found = measure(
        {"small": build(setting, small), "large": build(setting, large)}, setting.runs, 0
    )
    one, ten = found["small"], found["large"]
    growth = ten.wall_seconds / one.wall_seconds
    figures = (
        f"{ten.wall_seconds:.0f} s, {ten.cpu_seconds:.0f} CPU s, {ten.peak_mb:.0f} MB; "
        f"{growth:.1f} times the time and {ten.cpu_seconds / one.cpu_seconds:.1f} times the CPU "
        f"time of one corpus ({one.wall_seconds:.1f} s, {one.peak_mb:.0f} MB)"
    )
    ok = growth <= TIMES * 1.1 and ten.peak_mb < MEMORY_MB
    report("chunk database of 10 times as many", figures, f"11 times, {MEMORY_MB} MB", ok)


def row_embed(setting: Setting) -> None:
    """Embedding on a CPU, beside sentence-transformers."""
    from benchmarks.embedding import on_cpu

    on_cpu(setting, setting.peer_python)


def row_embed_on_gpu(setting: Setting) -> None:
    """Embedding on a GPU."""
    from benchmarks.embedding import on_gpu

    on_gpu(setting.runs)


def row_memory(setting: Setting) -> None:
    """Memory of adding to an index and of joining shares."""
    from benchmarks.retro_memory import compare

    compare(setting)


def row_index(setting: Setting) -> None:
    """Adding and searching, beside plain calls of faiss; recall of the default index."""
    from benchmarks.retro_index import compare

    compare(setting)


ROWS: dict[str, Callable[[Setting], None]] = {
    "chunks": row_chunks,
    "chunks_large": row_chunks_large,
    "embed": row_embed,
    "index": row_index,
    "memory": row_memory,
}

ON_GPU: dict[str, Callable[[Setting], None]] = {"embed": row_embed_on_gpu}
"""Rows of --device cuda."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; all if none")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--scratch", type=Path)
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        help="interpreter that has sentence-transformers, for embed; else its peer is transformers",
    )
    args = parser.parse_args()
    rows = ON_GPU if args.device == "cuda" else ROWS
    if unknown := [row for row in args.rows if row not in rows]:
        parser.error(f"no row {unknown[0]!r} on {args.device}; there are {', '.join(rows)}")
    scratch = args.scratch or Path(tempfile.mkdtemp(prefix="trainyard-bench-"))
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        print("| what | measured | bar | reached |\n| --- | --- | --- | --- |")
        for row in args.rows or rows:
            rows[row](Setting(args.data.resolve(), scratch.resolve(), args.runs, args.peer_python))
    finally:
        if args.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
