"""A small tokenizer that knows the marks of every prompt format, for the tests of conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

MARKS = (
    *("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>", "[PREFIX]"),
    *("<|finetune_right_pad_id|>", *(f"<SPECIAL_{i}>" for i in (10, 11, 12, 14, 15, 233))),
)
NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
LINES = ["system\nuser\nassistant\nSystem\nUser\nAssistant\n", "Hello, what is the weather?\n"] * 9


def write_folder(folder: Path, named: dict[str, str] = NAMED, **settings: Any) -> str:
    """A folder of a Hugging Face tokenizer that puts a BOS before a text."""
    engine = Tokenizer(BPE())
    engine.pre_tokenizer = ByteLevel(add_prefix_space=False)
    engine.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=list(MARKS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(LINES, trainer)
    engine.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    engine.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    document = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(document))
    return str(folder)


def render(theirs: Any, chat: Sequence[Any], template: str, invite: bool = False) -> list[int]:
    """The ids that transformers makes of a conversation."""
    ids: list[int] = theirs.apply_chat_template(
        list(chat), chat_template=template, add_generation_prompt=invite, return_dict=False
    )
    return ids


def read_chats(path: Path) -> list[list[dict[str, str]]]:
    """The conversations of one of the shared files, in any of their formats."""
    chats = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "messages" in record:
            chats.append(record["messages"])
        elif "prompt" in record and isinstance(record["prompt"], list):
            answer = record["chosen"]
            text = answer if isinstance(answer, str) else answer["content"]
            chats.append([*record["prompt"], {"role": "assistant", "content": text}])
        elif "instruction" in record:
            asked = "\n".join(filter(None, (record["instruction"], record["input"])))
            chats.append(pair(asked, record["output"]))
        elif "prompt" in record:
            chats.append(pair(record["prompt"], record["response"]))
        else:
            chats.append([turn for text in record["turns"] for turn in pair(text, "As you say.")])
    return chats


def pair(asked: str, answered: str) -> list[dict[str, str]]:
    """A question and its answer."""
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
