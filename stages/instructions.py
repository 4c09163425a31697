"""Converts instruction data to a data set of InstructRetro, for tokenizers without a format of
conversations.

    python -m stages.instructions chats.jsonl alpaca.json --name open_inst --data-folder D

Reads conversations, pairs of instruction and answer, and questions (docs/finetune.md), the latter
also as SQuAD, TriviaQA and DPR write them. Writes D/NAME/NAME_QA_train.json, NAME_QA_dev.json and
test.json, whose names stages.finetune and stages.evaluate understand."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from typing import Any

from stages.runtime.failure import report_failure
from trainyard import logging as our_logging
from trainyard.arguments import Parser
from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.datasets.config import parse_split
from trainyard.datasets.fine_tuning.conversations import ConversationFile
from trainyard.datasets.fine_tuning.instruct_retro import Converted, converted
from trainyard.datasets.fine_tuning.squad import squad_records
from trainyard.datasets.splits import split_documents
from trainyard.errors import ConfigError, DataError, TrainyardError
from trainyard.logging import one_line

FILES = ("{}_QA_train.json", "{}_QA_dev.json", "test.json")


def main(words: Sequence[str]) -> int:
    """Convert, and print what was written. Returns the exit status."""
    parser = Parser(prog="python -m stages.instructions", description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", help=".jsonl or .json files or URLs")
    parser.add_argument("--name", required=True, help="of the data set; it decides the prompts")
    parser.add_argument("--data-folder", required=True, help="folder or URL of all data sets")
    parser.add_argument("--split", default="98,2,0", help="training, validation, test")
    parser.add_argument("--seed", type=int, default=1234, help="of the order of records")
    options = parser.parse_args(list(words))
    our_logging.configure()
    try:
        parts = divided(read(options.files, options.name), options.split, options.seed)
        folder = join(options.data_folder, options.name)
        names = [file.format(options.name) for file in FILES]
        refuse_leftovers(folder, [n for n, part in zip(names, parts, strict=True) if not part])
        for name, records in zip(names, parts, strict=True):
            if records:
                url = join(folder, name)
                store.write_bytes(url, as_json(records))
                print(one_line(f"{len(records):,} records in {url}"))
    except TrainyardError as error:
        return report_failure("instructions", error, debug=False)
    return 0


def read(urls: Sequence[str], name: str) -> list[Converted]:
    """What each record of the files becomes. DataError names one that cannot be converted."""
    found: list[Converted] = []
    for url in urls:
        records = squad_records(url)
        file = ConversationFile(url) if records is None else None
        for number in range(len(records or file or ())):
            record = records[number] if file is None and records else _record(file, number)
            where = f"{url}: question {number}, from 0" if file is None else file.where(number)
            try:
                found.append(converted(record, name))
            except ValueError as fault:
                raise DataError(f"{where}: {fault}") from None
    return found


def _record(file: ConversationFile | None, number: int) -> dict[str, Any]:
    assert file is not None
    return file.record(number)


def divided(found: list[Converted], split: str, seed: int) -> list[Converted]:
    """The records of training, validation and test; those of a conversation stay together."""
    random.Random(seed).shuffle(found)
    parts = [split_documents(len(found), bounds) for bounds in parse_split(split)]
    return [[one for number in part for one in found[number]] for part in parts]


def refuse_leftovers(folder: str, names: Sequence[str]) -> None:
    """Raise ConfigError for files of parts without records: those of an earlier call with another
    --split may have records of this call's training, and tunings would read them."""
    if found := store.existing(folder, names):
        raise ConfigError(
            f"{folder} has {' and '.join(found)}, for which --split leaves no records; delete it, "
            "or give another --name or --data-folder"
        )


def as_json(records: Converted) -> bytes:
    """A list, as InstructRetro reads it, with a record on each line."""
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    return f"[\n{lines}\n]\n".encode(errors="surrogatepass")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
