"""Speed and memory from collected text to a clean corpus, each figure beside its peer's.

    python -m benchmarks.collect --peer-python PEER/bin/python                 every row, full size
    python -m benchmarks.collect clean near --peer-python ... --scale 0.05     some rows, smaller

PEER is a virtual environment with datatrove[processing], datasketch, wikiextractor and orjson. All
programs run with one worker, ours and the peer's in turn, and are compared by processor time, which
other work on the machine hardly changes. Ours are whole commands with digests and manifest, a
peer's time is that of its inner loop. `decontaminate` also runs with the default number of workers,
beside reading by wall time, both whole commands. Data: --data (default ../shared/data) with
corpora/corpus_en.jsonl; what is made lies in --scratch."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure import Figure, Prepare, measure
from trainyard.testing.wiki_dump import Plan, write_dump

CORPUS_BYTES = 560_000_000
DOCUMENTS = 1_000_000
ITEMS = 10_000
PLANTED, PLANTED_EVERY = "planted", 100
"""Key of a document in which an item was put, and how many items there are for each that was."""
DUMP_BYTES = 500_000_000
WORDS, VOCABULARY = 300, 50_000
CHANGED = 6
"""Words that a planted copy changes: of 296 shingles of five 266 stay, a Jaccard index of 0.816."""
PAIR_SHARE = 0.05
COPY = "c"
"""Ends the id of a planted copy."""
DUMP_BYTES_AN_ARTICLE = 5_100
"""Of a generated dump, about."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where things lie, how large, and how often to run."""

    data: Path
    scratch: Path
    peer: str
    scale: float
    runs: int

    def corpus(self) -> Path:
        """English text, repeated up to the size."""
        path, left = self.scratch / "corpus.jsonl", int(CORPUS_BYTES * self.scale)
        if not path.exists():
            lines = (self.data / "corpora/corpus_en.jsonl").read_bytes().splitlines(True)
            with path.open("wb") as out:
                number = 0
                while left > 0:
                    left -= out.write(lines[number % len(lines)])
                    number += 1
        return path


def report(row: str, reached: str, bar: str, ok: bool) -> None:
    """One line of the table."""
    print(f"| {row} | {reached} | {bar} | {'yes' if ok else 'NO'} |", flush=True)


def ours(
    setting: Setting, stage: str, *words: str | Path, workers: Sequence[str] = ("--workers", "1")
) -> Prepare:
    """A stage into a fresh folder, by one worker; or the options that say how many."""

    def prepare() -> list[str]:
        out = setting.scratch / f"out-{stage}"
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", f"stages.{stage}", *map(str, words)]
        return ["env", "OMP_NUM_THREADS=1", *command, "--output-dir", str(out), *workers]

    return prepare


def loop(setting: Setting, name: str, path: Path) -> Prepare:
    """A loop of `benchmarks/collect_peers.py`."""
    program = Path(__file__).with_name("collect_peers.py")
    return lambda: ["env", "OMP_NUM_THREADS=1", setting.peer, str(program), name, str(path)]


def seconds_of(figure: Figure) -> float:
    """What a peer's loop took of a processor, the median."""
    return float(np.median([float(run.output.split()[-1]) for run in figure.runs]))


def size_mb(path: Path) -> float:
    """Size in 10^6 bytes."""
    return path.stat().st_size / 1e6


def against(found: Figure, peer_seconds: float) -> tuple[float, str]:
    """How many times faster ours is, and its figures in words."""
    ratio = peer_seconds / found.cpu_seconds
    spent = f"{found.cpu_seconds:.2f} CPU s, {found.wall_seconds:.2f} s ({found.spread})"
    peer = f"{ratio:.2f}x the peer ({peer_seconds:.2f} CPU s)"
    return ratio, f"{spent}, {found.peak_mb:.0f} MB; {peer}"


# --- rows -------------------------------------------------------------------------------------


def row_clean(setting: Setting) -> None:
    """The filters of FineWeb but for the language, whose model datatrove downloads."""
    corpus = setting.corpus()
    rules = ("gopher_repetition", "gopher_quality")
    rules += ("c4:end_marks=false,min_sentences=5,min_words=3", "fineweb")
    mine = ours(setting, "clean", "--input", corpus, "--rules", *rules)
    found = measure({"ours": mine, "peer": loop(setting, "fineweb", corpus)}, setting.runs)
    ratio, text = against(found["ours"], seconds_of(found["peer"]))
    ok = ratio >= 5 and found["ours"].peak_mb < 500
    report(f"clean {size_mb(corpus):.0f} MB, rules of fineweb", text, "5x datatrove, 500 MB", ok)


def row_near(setting: Setting) -> None:
    """Near duplicates of generated documents, some of which are planted copies."""
    path, planted = setting.scratch / "near.jsonl", 0
    with path.open("wb") as out:
        for number, text, is_copy in near_documents(int(DOCUMENTS * setting.scale)):
            name = f"{number}{COPY if is_copy else ''}"
            out.write(json.dumps({"text": text, "id": name}).encode() + b"\n")
            planted += is_copy
    mine = ours(setting, "dedup", "--input", path)
    found = measure({"ours": mine, "peer": loop(setting, "datasketch", path)}, setting.runs, 0)
    ratio, text = against(found["ours"], seconds_of(found["peer"]))
    document = json.loads((setting.scratch / "out-dedup/report.json").read_text())
    pairs = [
        (cluster["kept"]["id"], one["id"])
        for cluster in map(json.loads, (setting.scratch / "out-dedup/clusters.jsonl").open())
        for one in cluster["others"]
    ]
    right = sum(one.rstrip(COPY) == other.rstrip(COPY) for one, other in pairs)
    recall, precision = right / planted, right / max(len(pairs), 1)
    a_document = found["ours"].peak_mb * 1e6 / document["documents"]
    text += f"; recall {recall:.3f}, precision {precision:.3f}; {a_document:.0f} bytes a document"
    ok = ratio >= 3 and recall >= 0.98 and precision == 1 and found["ours"].peak_mb < 2000
    report(f"near dedup of {document['documents']} documents", text, "3x datasketch, 0.98, 1.0", ok)


def near_documents(count: int) -> Iterator[tuple[int, str, bool]]:
    """(number, text, is a copy) of documents of 300 words; a copy of the document before has its
    number and other words in 6 places."""
    random = np.random.default_rng(1234)
    for number in range(int(count / (1 + PAIR_SHARE))):
        words = random.integers(0, VOCABULARY, WORDS)
        yield number, " ".join(f"w{n:x}" for n in words), False
        if random.random() < PAIR_SHARE:
            copy = words.copy()
            places = np.arange(CHANGED) * (WORDS // CHANGED) + 20  # no shingle has two of them
            copy[places] = VOCABULARY + random.integers(0, VOCABULARY, CHANGED)
            yield number, " ".join(f"w{n:x}" for n in copy), True


def row_decontaminate(setting: Setting) -> None:
    """Evaluation items out of books, one in a hundred of which stands in one document each."""
    corpus, items = setting.scratch / "planted.jsonl", setting.scratch / "items.jsonl"
    texts = evaluation_items(setting.data / "corpora/books_en.jsonl")
    items.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    planted = plant(setting.corpus(), corpus, texts[::PLANTED_EVERY])
    given = ("--input", corpus, "--tasks", "mine", "--task-data", items)
    commands = {
        "ours": ours(setting, "decontaminate", *given),
        "read": loop(setting, "read", corpus),
        "default": ours(setting, "decontaminate", *given, workers=()),
    }
    found = measure(commands, setting.runs)
    ratio, text = against(found["ours"], seconds_of(found["read"]))
    default, read_seconds = found["default"], found["read"].wall_seconds
    text += f"; default workers {default.wall_seconds:.2f} s ({default.spread}), "
    text += f"{default.peak_mb:.0f} MB, {default.wall_seconds / read_seconds:.2f}x reading "
    text += f"({read_seconds:.2f} s)"
    dropped = (setting.scratch / "out-decontaminate").glob("dropped-*.jsonl")
    marks = [PLANTED in json.loads(line) for path in dropped for line in path.open()]
    text += f"; {sum(marks)} of {planted} planted found, {len(marks) - sum(marks)} others"
    name = f"decontaminate {size_mb(corpus):.0f} MB, {ITEMS} items"
    is_small = max(found[name].peak_mb for name in ("ours", "default")) < 500
    ok = ratio >= 0.5 and sum(marks) == planted and is_small
    report(name, text, "2x reading with orjson in CPU s, all planted, 500 MB", ok)


def evaluation_items(books: Path) -> list[str]:
    """Pieces of 25 words, none of which has a word in common with another."""
    words = " ".join(json.loads(line)["text"] for line in books.open()).split()
    distance = len(words) // ITEMS
    return [" ".join(words[at : at + 25]) for at in range(0, ITEMS * distance, distance)]


def plant(source: Path, path: Path, texts: Sequence[str]) -> int:
    """Copy a corpus, with each text in the middle of another document, marked as such; how many."""
    count = sum(1 for _ in source.open("rb"))
    places = np.random.default_rng(5).choice(count, len(texts), replace=False).tolist()
    planted = dict(zip(places, texts, strict=True))
    with source.open("rb") as given, path.open("wb") as out:
        for number, line in enumerate(given):
            if number in planted:
                document = json.loads(line)
                words = str(document["text"]).split(" ")
                words.insert(len(words) // 2, planted[number])
                line = json.dumps({**document, "text": " ".join(words), PLANTED: True}).encode()
                line += b"\n"
            out.write(line)
    return len(planted)


def row_wikipedia(setting: Setting) -> None:
    """Extraction of a generated dump, plain XML for both programs."""
    path = setting.scratch / "pages-articles.xml"
    plan = Plan(articles=int(DUMP_BYTES * setting.scale / DUMP_BYTES_AN_ARTICLE))
    write_dump(path, plan)
    out = setting.scratch / "extracted"
    module = ("-m", "wikiextractor.WikiExtractor", "--json", "--processes", "1", "--no-templates")

    def peer() -> list[str]:
        shutil.rmtree(out, ignore_errors=True)
        return [setting.peer, *module, "-o", str(out), str(path)]

    mine = ours(setting, "collect", "--source", "wikipedia", "--input", path)
    found = measure({"ours": mine, "peer": peer}, setting.runs, 0)
    # WikiExtractor has processes for reading and writing beside its worker: processor time.
    ratio = found["peer"].cpu_seconds / found["ours"].cpu_seconds
    figures = (
        f"{found['ours'].cpu_seconds:.2f} CPU s, {found['ours'].peak_mb:.0f} MB; {ratio:.2f}x "
        f"WikiExtractor ({found['peer'].cpu_seconds:.2f} CPU s)"
    )
    report(f"Wikipedia, {size_mb(path):.0f} MB of XML", figures, "2x a core", ratio >= 2)


ROWS: dict[str, Callable[[Setting], None]] = {
    "clean": row_clean,
    "near": row_near,
    "decontaminate": row_decontaminate,
    "wikipedia": row_wikipedia,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the stages of a clean corpus.")
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="default: all")
    parser.add_argument("--peer-python", required=True, help="interpreter with the peers")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--scratch", type=Path, help="default: a temporary folder")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full sizes")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = given.scratch or Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        setting = Setting(given.data, scratch, given.peer_python, given.scale, given.runs)
        print("| what | measured | bar | reached |\n| --- | --- | --- | --- |")
        for name in given.rows or ROWS:
            ROWS[name](setting)


if __name__ == "__main__":
    main()
