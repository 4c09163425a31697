"""Speed and memory of preparing a corpus, each figure beside its peer's in the same run.

    python -m benchmarks.corpus                    every row, medians of 5: about 40 minutes
    python -m benchmarks.corpus tokenize merge     some rows
    python -m benchmarks.corpus --runs 1           a quick look
    python -m benchmarks.corpus s3                 needs an S3 store: see benchmarks/README.md

Prints a table row as each is done, and whether it reaches the bar. Data: --data (default
../shared/data) with corpora/corpus_en.jsonl and vocab/; what is made lies in --scratch."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure import Figure, Prepare, measure, run_once

PARTS = 8
PART_BYTES = 250_000_000
DOCUMENTS_A_PART = 125_000
TIMES = 10


@dataclass(frozen=True, slots=True)
class Setting:
    """Where things lie, and how often to run."""

    data: Path
    scratch: Path
    runs: int
    peer_python: str = sys.executable
    """Interpreter of a peer that needs packages of its own."""

    @property
    def corpus(self) -> Path:
        """56 MB of English: 22,119 documents."""
        return self.data / "corpora/corpus_en.jsonl"

    @property
    def large(self) -> Path:
        """The same ten times over."""
        path = self.scratch / "corpus_en_x10.jsonl"
        if not path.exists():
            with path.open("wb") as out:
                for _ in range(TIMES):
                    out.write(self.corpus.read_bytes())
        return path

    def vocab(self, name: str) -> str:
        """A file of a vocabulary."""
        return str(self.data / "vocab" / name)


def report(row: str, reached: str, bar: str, ok: bool) -> None:
    """One line of the table."""
    print(f"| {row} | {reached} | {bar} | {'yes' if ok else 'NO'} |", flush=True)


def stage(*arguments: str) -> list[str]:
    """A stage's command."""
    return [sys.executable, "-m", *arguments]


def gpt2(setting: Setting) -> list[str]:
    """Flags of GPT-2's tokenizer."""
    files = ("--vocab-file", setting.vocab("gpt2/vocab.json"))
    files += ("--merge-file", setting.vocab("gpt2/merges.txt"))
    return ["--tokenizer-type", "GPT2BPETokenizer", *files, "--append-eod"]


def tokenize(
    setting: Setting, corpus: str | Path, flags: Sequence[str], out: str = "", forget: bool = True
) -> Prepare:
    """`stages.tokenize` of a file into a fresh folder."""

    def prepare() -> list[str]:
        folder = setting.scratch / "tokens"
        if forget:
            shutil.rmtree(folder, ignore_errors=True)
        prefix = out or str(folder / "corpus")
        command = stage("stages.tokenize", "--input", str(corpus), "--output-prefix", prefix)
        return [*command, *flags, "--force"]

    return prepare


def peer(name: str, *arguments: str | Path, threads: int = 1) -> Prepare:
    """A loop of `benchmarks.peers`."""
    limit = ["env", f"RAYON_NUM_THREADS={threads}"]
    return lambda: [*limit, *stage("benchmarks.peers", name), *map(str, arguments)]


def loop_seconds(figure: Figure) -> float:
    """What a peer printed, the median."""
    return float(np.median([float(run.output.split()[-1]) for run in figure.runs]))


def megabytes(path: Path) -> float:
    """Size in 10^6 bytes."""
    return path.stat().st_size / 1e6


# --- rows -------------------------------------------------------------------------------------


def row_tokenize(setting: Setting) -> None:
    """56 MB, GPT-2, whole command, beside Hugging Face's loop on two threads."""
    vocab = (setting.vocab("gpt2/vocab.json"), setting.vocab("gpt2/merges.txt"))
    found = measure(
        {
            "ours": tokenize(setting, setting.corpus, gpt2(setting)),
            "loop": peer("huggingface_gpt2", setting.corpus, *vocab, threads=2),
            "bare": peer("bare_gpt2", setting.corpus, gpt2_json(setting)),
        },
        setting.runs,
    )
    ours, seconds = found["ours"], loop_seconds(found["loop"])
    ratio = seconds / ours.wall_seconds
    bare, times = beside_bare(ours, found["bare"])
    figures = (
        f"{ours.wall_seconds:.2f} s ({ours.spread}), {ours.cpu_seconds:.2f} CPU s, "
        f"{ours.peak_mb:.0f} MB; {bare}; {ratio:.1f}x Hugging Face's loop ({seconds:.1f} s)"
    )
    ok = times <= 1.4 and ours.peak_mb < 500 and ratio >= 7
    report("tokenize 56 MB, GPT-2, EOD", figures, "1.4x bare, 500 MB, 7x", ok)


def beside_bare(ours: Figure, bare: Figure) -> tuple[str, float]:
    """The bare pipeline in words, and how many times as long ours takes, both from their start."""
    times = ours.wall_seconds / bare.wall_seconds
    spent = f"{bare.wall_seconds:.2f} s, {bare.cpu_seconds:.2f} CPU s"
    return f"{times:.2f}x a bare pipeline ({spent})", times


def row_tokenize_large(setting: Setting) -> None:
    """560 MB, beside gigatoken's own reader in a fresh process, and the loop's rate on 56 MB."""
    vocab = (setting.vocab("gpt2/vocab.json"), setting.vocab("gpt2/merges.txt"))
    loop = measure({"loop": peer("huggingface_gpt2", setting.corpus, *vocab, threads=2)}, 1, 0)
    rate = megabytes(setting.corpus) / loop_seconds(loop["loop"])
    tokenizer = gpt2_json(setting)
    found = measure(
        {
            "ours": tokenize(setting, setting.large, gpt2(setting)),
            "giga": peer("gigatoken_files", setting.large, tokenizer, threads=2),
            "bare": peer("bare_gpt2", setting.large, tokenizer),
        },
        setting.runs,
    )
    ours, giga = found["ours"], found["giga"]
    ours_rate = megabytes(setting.large) / ours.wall_seconds
    giga_rate = megabytes(setting.large) / loop_seconds(giga)
    bare, times = beside_bare(ours, found["bare"])
    figures = (
        f"{ours.wall_seconds:.2f} s ({ours.spread}), {ours.peak_mb:.0f} MB; {bare}; "
        f"{ours_rate / rate:.0f}x"
        f" Hugging Face's loop ({rate:.1f} MB/s); {100 * ours_rate / giga_rate:.0f} % of"
        f" gigatoken's encode_files ({giga_rate:.0f} MB/s, {giga.peak_mb:.0f} MB)"
    )
    ok = times <= 1.22 and ours.peak_mb < 700
    ok = ok and ours_rate >= 15 * rate and ours_rate >= 0.25 * giga_rate
    report("tokenize 560 MB, GPT-2, EOD", figures, "1.22x bare, 700 MB, 15x, 25 %", ok)


def gpt2_json(setting: Setting) -> Path:
    """GPT-2's files as one tokenizer.json, for the peers."""
    from tokenizers import ByteLevelBPETokenizer

    path = setting.scratch / "gpt2.json"
    vocab = (setting.vocab("gpt2/vocab.json"), setting.vocab("gpt2/merges.txt"))
    ByteLevelBPETokenizer(*vocab).save(str(path))
    return path


def row_sentencepiece(setting: Setting) -> None:
    """Llama-2's SentencePiece, whole command, beside the library on one thread."""
    model = setting.vocab("llama2/tokenizer.model")
    flags = ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", model, "--append-eod"]
    ours_to_peer(
        setting,
        "SentencePiece (Llama-2), 56 MB",
        flags,
        peer("sentencepiece", setting.corpus, model),
        3,
    )


def row_wordpiece(setting: Setting) -> None:
    """BERT's WordPiece, whole command, beside `encode_batch` on one thread."""
    vocab = setting.vocab("bert/bert-base-uncased-vocab.txt")
    flags = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocab]
    other = peer("huggingface_bert", setting.corpus, vocab)
    ours_to_peer(setting, "WordPiece (BERT uncased), 56 MB", flags, other, 1.6)


def ours_to_peer(
    setting: Setting, row: str, flags: Sequence[str], other: Prepare, bar: float
) -> None:
    """A whole command against the inner loop of a library."""
    ours = tokenize(setting, setting.corpus, flags)
    found = measure({"ours": ours, "peer": other}, setting.runs, 0)
    seconds = loop_seconds(found["peer"])
    ratio = seconds / found["ours"].wall_seconds
    figures = (
        f"{found['ours'].wall_seconds:.2f} s, {found['ours'].peak_mb:.0f} MB; {ratio:.1f}x one "
        f"thread of the reference library ({seconds:.1f} s)"
    )
    report(row, figures, f"{bar}x", ratio >= bar)


def row_workers(setting: Setting) -> None:
    """Many more workers than cores."""
    found = measure(
        {
            str(n): tokenize(setting, setting.corpus, [*gpt2(setting), "--workers", str(n)])
            for n in (2, 32)
        },
        setting.runs,
    )
    two, many = found["2"].wall_seconds, found["32"].wall_seconds
    figures = f"{many:.2f} s with 32, {two:.2f} s with 2: {many / two:.2f}"
    report("32 workers on 2 cores", figures, "1.10", many <= 1.1 * two)


def row_merge(setting: Setting) -> None:
    """8 pairs of 250 MB, beside `cat` of the same files."""
    parts = make_parts(setting)
    out = setting.scratch / "merged"

    def ours() -> list[str]:
        shutil.rmtree(out, ignore_errors=True)
        return stage("stages.merge", "--input", str(parts), "--output-prefix", str(out / "all"))

    def cat() -> list[str]:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        return ["sh", "-c", f"cat {parts}/*.bin > {out}/all.bin"]

    found = measure({"ours": ours, "cat": cat}, setting.runs)
    merge, copy = found["ours"], found["cat"]
    ratio = merge.wall_seconds / copy.wall_seconds
    figures = (
        f"{merge.wall_seconds:.2f} s ({merge.spread}), {merge.peak_mb:.0f} MB; {ratio:.2f}x cat "
        f"({copy.wall_seconds:.2f} s)"
    )
    report("merge 8 x 250 MB", figures, "1.5x cat, 150 MB", ratio <= 1.5 and merge.peak_mb < 150)
    shutil.rmtree(out)


def make_parts(setting: Setting) -> Path:
    """Pairs of 125,000 documents of 1,000 tokens each."""
    from trainyard.corpus.indexed import IndexedWriter

    folder = setting.scratch / "parts"
    if folder.exists():
        return folder
    folder.mkdir()
    random = np.random.default_rng(1)
    length = PART_BYTES // 2 // DOCUMENTS_A_PART
    for part in range(PARTS):
        with (
            (folder / f"p{part}.bin").open("wb") as out,
            (folder / f"p{part}.idx").open("wb") as idx,
        ):
            writer = IndexedWriter(out, np.uint16)
            for _ in range(DOCUMENTS_A_PART // 1000):
                tokens = random.integers(0, 50257, (1000, length), dtype=np.uint16)
                for document in tokens:
                    writer.add_document([document])
            writer.write_index(idx)
    return folder


def row_s3(setting: Setting) -> None:
    """Object store to object store, beside the same from disk to disk and the store's own reads."""
    from benchmarks.s3 import bucket_url, read_seconds, upload

    url = upload(setting.large)
    prefixes = iter(range(10_000))

    def remote() -> list[str]:
        return tokenize(
            setting, url, gpt2(setting), f"{bucket_url()}/tokens-{next(prefixes)}/corpus", False
        )()

    found = measure(
        {"local": tokenize(setting, setting.large, gpt2(setting)), "s3": remote}, setting.runs
    )
    local, far = found["local"].wall_seconds, found["s3"].wall_seconds
    size = megabytes(setting.large)
    store = size / read_seconds(url)
    bar = min(0.6 * size / local, store)
    figures = (
        f"{size / far:.0f} MB/s ({far:.2f} s, {found['s3'].peak_mb:.0f} MB); "
        f"{100 * local / far:.0f} % of the local {size / local:.0f} MB/s; the store alone reads at "
        f"{store:.0f} MB/s"
    )
    report("tokenize 560 MB, S3 to S3", figures, "60 % of local, or the store's", size / far >= bar)


def inside(setting: Setting, name: str) -> list[float]:
    """What `benchmarks.inside NAME` prints: numbers measured within a fresh process."""
    command = [*stage("benchmarks.inside", name, str(setting.scratch), str(setting.runs))]
    return [float(word) for word in run_once(command).output.split()]


def row_index(setting: Setting) -> None:
    """Document, sample and shuffle index of 1 M documents, 1 B tokens, sequences of 2048."""
    (seconds,) = inside(setting, "index")
    report("index of 1 M documents, 1 B tokens", f"{seconds:.3f} s", "0.10 s", seconds < 0.1)


def row_index_large(setting: Setting) -> None:
    """The same of 100 M documents."""
    seconds, extra = inside(setting, "index_large")
    figures = f"{seconds:.1f} s, {extra:.1f} bytes a document beyond the index"
    report("index of 100 M documents", figures, "60 s, 12 bytes", seconds < 60 and extra < 12)


def row_fetch(setting: Setting) -> None:
    """Random samples of 2048 tokens in one process."""
    (rate,) = inside(setting, "fetch")
    report("random samples, seq 2048", f"{rate:,.0f} /s", "50,000 /s", rate >= 50_000)


def row_fetch_bounds(setting: Setting) -> None:
    """The same with document bounds and positions that begin again."""
    (rate,) = inside(setting, "fetch_bounds")
    report("with document bounds and positions", f"{rate:,.0f} /s", "30,000 /s", rate >= 30_000)


ROWS: dict[str, Callable[[Setting], None]] = {
    "tokenize": row_tokenize,
    "tokenize_large": row_tokenize_large,
    "sentencepiece": row_sentencepiece,
    "wordpiece": row_wordpiece,
    "workers": row_workers,
    "merge": row_merge,
    "index": row_index,
    "index_large": row_index_large,
    "fetch": row_fetch,
    "fetch_bounds": row_fetch_bounds,
    "s3": row_s3,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; all but s3 if none")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--scratch", type=Path)
    args = parser.parse_args()
    rows = args.rows or [row for row in ROWS if row != "s3"]
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    scratch = args.scratch or Path(tempfile.mkdtemp(prefix="trainyard-bench-"))
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        print("| what | measured | bar | reached |\n| --- | --- | --- | --- |")
        for row in rows:
            ROWS[row](Setting(args.data.resolve(), scratch.resolve(), args.runs))
    finally:
        if args.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
