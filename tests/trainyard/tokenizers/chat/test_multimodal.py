"""MultimodalTokenizer: text as transformers renders it, targets as Megatron-LM masks them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainyard.tokenizers.chat.chats import NAMED, pair, read_chats, render, write_folder
from tests.trainyard.tokenizers.kinds import carried
from trainyard.errors import ConfigError, DataError
from trainyard.tokenizers.chat.multimodal import (
    IMAGE_INDEX,
    MultimodalTokenizer,
    place_images,
    tile_tags,
)
from trainyard.tokenizers.chat.prompt_formats import MULTIMODAL_FORMATS, QWEN_SYSTEM
from trainyard.tokenizers.chat.sft import IGNORED
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

CHATML = """{% for turn in messages %}
    {{- '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA3 = """{{- bos_token }}{% for turn in messages %}
    {{- '<|start_header_id|>' + turn.role + '<|end_header_id|>\\n\\n' }}
    {{- turn.content | trim + '<|eot_id|>' }}
{%- endfor %}{% if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
TEMPLATES = {
    "mistral": """{{ bos_token }}{% for turn in messages %}
    {%- if turn.role == 'user' %}{{ '[INST] ' + turn.content + '[/INST]' }}
    {%- elif turn.role == 'assistant' %}{{ ' ' + turn.content + eos_token }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ ' ' }}{% endif %}""",
    "llama3": LLAMA3,
    "llama3p1": LLAMA3,
    "llama3p2": LLAMA3,
    "nvlm-yi-34b": "{{ bos_token }}" + CHATML,
    "chatml": CHATML,
    "qwen2p0": CHATML,
    "qwen2p5": CHATML,
    "nemotron5": "{{ bos_token }}"
    + CHATML.replace("<|im_start|>", "<SPECIAL_14>").replace("<|im_end|>", "<SPECIAL_15>"),
    "nemotron5-aligned": """{{ bos_token }}{% for turn in messages %}
    {{- turn.role | capitalize + '\\n' + turn.content + '\\n[PREFIX]' }}
{%- endfor %}{% if add_generation_prompt %}{{ 'Assistant\\n' }}{% endif %}""",
}
OWN = {"llama3": LLAMA3, "chatml": CHATML}

Find = Callable[[str], str]
Built = dict[str, MultimodalTokenizer]
CHAT = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "<image>\nWhat is <image>?"},
    {"role": "assistant", "content": "A caf\u00e9, \u4f60\u597d."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Hello"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Find:
    root = tmp_path_factory.mktemp("multimodal")
    made: dict[str, str] = {}

    def find(name: str) -> str:
        template = OWN.get(name)
        key = name if template else "none"
        if key not in made:
            settings = {"chat_template": template} if template else {}
            made[key] = write_folder(root / key, **settings)
        return made[key]

    return find


def build(folder: str, name: str, **more: Any) -> MultimodalTokenizer:
    config = TokenizerConfig(
        tokenizer_type="MultimodalTokenizer",
        tokenizer_model=folder,
        tokenizer_prompt_format=name,
        **more,
    )
    tokenizer = build_tokenizer(config)
    assert isinstance(tokenizer, MultimodalTokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def built(folder: Find) -> Built:
    return {name: build(folder(name), name) for name in MULTIMODAL_FORMATS}


@pytest.fixture(scope="module")
def theirs(folder: Find) -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder("none"))
    assert tokenizer.add_tokens(["<image>"], special_tokens=True) == 1
    return tokenizer


# --- conversations ----------------------------------------------------------------------------


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("name", MULTIMODAL_FORMATS)
def test_layout_is_that_of_transformers(built: Built, theirs: Any, name: str) -> None:
    for chat in (CHAT, CHAT[1:3], [{"role": "user", "content": "  a \n"}]):
        for invite in (False, True):
            found = built[name].tokenize_conversation(chat, False, invite)
            assert found.dtype == np.int64
            assert found.tolist() == render(theirs, chat, TEMPLATES[name], invite)


@pytest.mark.parametrize("name", MULTIMODAL_FORMATS)
def test_only_answers_are_learnt(built: Built, theirs: Any, name: str) -> None:
    tokens, targets = built[name].tokenize_conversation(CHAT)
    chat = CHAT[1:] if name == "mistral" else CHAT
    expected: list[int] = []
    for number, turn in enumerate(chat):
        alone = render(theirs, [turn], TEMPLATES[name])
        if theirs.bos_token_id == alone[0] and number:
            alone = alone[1:]
        masked = MULTIMODAL_FORMATS[name].masked_prefix
        if turn["role"] != "assistant":
            masked = len(alone)
        expected += [IGNORED] * masked + alone[masked:]
    assert targets.tolist() == expected
    assert ((targets == tokens) | (targets == IGNORED)).all()


def test_what_is_masked_by_hand(built: Built) -> None:
    learnt = {
        "mistral": [" system</s>"],
        "llama3p1": ["system<|eot_id|>"],
        "qwen2p5": ["system<|im_end|>\n"],
        "nemotron5": ["system<SPECIAL_15>\n"],
        "nemotron5-aligned": ["system\n[PREFIX]"],
    }
    for name, expected in learnt.items():
        tokens, targets = built[name].tokenize_conversation(pair("<image> user", "system"))
        kept = targets[targets != IGNORED]
        text = built[name].decode(kept.tolist())
        # Two line breaks are one token or two: the vocabulary's affair, so the prefix is counted.
        assert text.endswith(expected[0])
        answer = built[name].decode(tokens[-len(kept) :].tolist())
        assert answer == text
        assert name == "llama3p1" or text == expected[0]


def test_the_forced_system_message(folder: Find, theirs: Any) -> None:
    tokenizer = build(folder("qwen2p5"), "qwen2p5", force_system_message=True)
    forced = [{"role": "system", "content": QWEN_SYSTEM}, *CHAT[1:]]
    for chat in (CHAT, CHAT[1:]):
        found = tokenizer.tokenize_conversation(chat, False)
        assert found.tolist() == render(theirs, forced, TEMPLATES["qwen2p5"])
    assert CHAT[0]["content"] == "Answer."  # what is given is not changed
    with pytest.raises(
        ConfigError, match=r"--force-system-message: .* mistral has no system message; qwen2p0"
    ):
        build(folder("mistral"), "mistral", force_system_message=True)


@pytest.mark.parametrize(
    ("name", "chat", "message"),
    [
        ("qwen2p5", pair("", "a"), r"turn 0 \(user\) is empty"),
        ("qwen2p5", pair("a", ""), r"turn 1 \(assistant\) is empty"),
        ("qwen2p5", pair("a", "see <image>"), r"turn 1 \(assistant\) has an <image>"),
        (
            "qwen2p5",
            [CHAT[0] | {"role": "tool"}],
            "turn 0 has the role 'tool'; known are system, user",
        ),
        ("qwen2p5", [], "the conversation has no turns"),
        ("mistral", CHAT[:1], "the conversation has no turns"),
    ],
)
def test_refused_turns(built: Built, name: str, chat: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        built[name].tokenize_conversation(chat)


def test_targets_do_not_go_with_an_invitation(built: Built) -> None:
    with pytest.raises(DataError, match="the turns of a conversation have 12 tokens alone but 15"):
        built["qwen2p5"].tokenize_conversation(pair("user", "user"), True, True)


# --- images -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "written"),
    [("", "<image>"), ("nvlm", "<Image><image></Image>"), ("internvl", "<img><image></img>")],
)
def test_image_tags(folder: Find, theirs: Any, kind: str, written: str) -> None:
    tokenizer = build(folder("qwen2p5"), "qwen2p5", image_tag_type=kind)
    chat = [turn | {"content": turn["content"].replace("<image>", written)} for turn in CHAT]
    found = tokenizer.tokenize_conversation(CHAT, False)
    assert found.tolist() == render(theirs, chat, TEMPLATES["qwen2p5"])
    text = "a <image> b<image>"
    expected = theirs(text.replace("<image>", written)).input_ids
    assert tokenizer.encode(text) == tokenizer.encode_reference(text) == expected
    assert tokenizer.encode_batch([text]) == [expected]
    assert tokenizer.encode_flat([text])[0].tolist() == expected


def test_the_model_knows_images_by_another_id(built: Built) -> None:
    tokenizer = built["qwen2p5"]
    ids = tokenizer.encode("a<image>b<image>")
    assert tokenizer.image_id in ids
    assert tokenizer.vocab_size == tokenizer.image_id + 1
    found = tokenizer.model_ids(ids)
    assert (found == IMAGE_INDEX).sum() == 2
    assert found.dtype == np.int64
    assert found[found >= 0].tolist() == [i for i in ids if i != tokenizer.image_id]


def test_special_tokens_can_be_others(folder: Find) -> None:
    tokens = ("<image>", "<img>", "</img>", "<pad>")
    tokenizer = build(
        folder("chatml"), "chatml", tokenizer_special_tokens=tokens, image_tag_type="internvl"
    )
    assert len(tokenizer.encode("<image>")) == 1 + 3  # after the BOS of the tokenizer
    assert tokenizer.image_id == tokenizer.vocab_size - 3  # <pad> was there
    none = build(folder("chatml"), "chatml", tokenizer_special_tokens=("<x>",))
    assert none.image_id is None
    assert none.model_ids([3, 4]).tolist() == [3, 4]


def test_tile_tags() -> None:
    assert tile_tags("mistral", 3) == [
        "<tile_1>",
        "<tile_2>",
        "<tile_3>",
        "<tile_global_thumbnail>",
    ]
    assert tile_tags("nvlm-yi-34b", 1) == ["<tile_1>", "<tile_global>"]
    assert tile_tags("nemotron5", 1) == ["<tile_01>", "<tile_global_thumbnail>"]
    many = [f"<tile_{i:02d}>" for i in range(1, 13)]
    assert tile_tags("qwen2p5", 12) == [*many, "<tile_global_thumbnail0>"]
    assert tile_tags("llama3p1", 12) == [*many, "<tile_global_thumbnail>"]
    assert tile_tags("nemotron5-aligned", 12) == [*many, "<tile_global_thumbnail>"]
    assert tile_tags("nvlm-yi-34b", 10) == [*many[:10], "<tile_global0>"]
    for count in (0, 13):
        with pytest.raises(ConfigError, match=f"--max-num-tiles must be 1 to 12 .*got {count}"):
            tile_tags("mistral", count)


def test_tile_tags_as_ids(built: Built, theirs: Any) -> None:
    found = built["nemotron5"].tile_tag_ids(2)
    tags = ["<tile_01>", "<tile_02>", "<tile_global_thumbnail>"]
    assert found == [theirs(tag, add_special_tokens=False).input_ids for tag in tags]


def user(*contents: str) -> list[dict[str, str]]:
    return [turn for content in contents for turn in pair(content, "<image-1> <video> yes")]


@pytest.mark.parametrize(
    ("contents", "num_images", "video", "expected", "order"),
    [
        (["a <image> b"], 1, False, ["a <image> b"], [0]),
        (
            ["a <image-2>", "<image-1><image-2>"],
            2,
            False,
            ["a <image>", "<image><image>"],
            [1, 0, 1],
        ),
        (["a", "<image>"], 3, False, ["<image><image>\na", "<image>"], [0, 1, 2]),
        (["<image> <image>"], 1, False, ["<image> <image>"], [0, 0]),
        (["a <image> <video>"], 0, False, ["a  <video>"], []),
        (["a <video>"], 1, True, ["a <image>"], [0]),
        (["a"], 1, True, ["<image>\na"], [0]),
        (["<image-3>"], 3, False, ["<image>"], [2]),
    ],
)
def test_images_find_their_places(
    contents: list[str], num_images: int, video: bool, expected: list[str], order: list[int]
) -> None:
    given = user(*contents)
    turns, found = place_images(given, num_images, video=video)
    assert [turn["content"] for turn in turns if turn["role"] == "user"] == expected
    assert found == order
    assert all(turn["content"].startswith("<image-1>") for turn in turns[1::2])
    assert given == user(*contents)


@pytest.mark.parametrize(
    ("contents", "num_images", "video", "message"),
    [
        (["<image-3>"], 2, False, "names <image-3>, but has 2 images"),
        (["<image-0>"], 2, False, "names <image-0>, but has 2 images"),
        (["<image> <image> <image>"], 2, False, "has 3 <image> in turns of the user for 2"),
        (["<video> <video>"], 1, True, "has 2 <image> in turns of the user for 1"),
        ([], 1, False, "has 0 <image> in turns of the user for 1"),
    ],
)
def test_misplaced_images(contents: list[str], num_images: int, video: bool, message: str) -> None:
    with pytest.raises(DataError, match=message):
        place_images(user(*contents), num_images, video=video)


# --- the rest ---------------------------------------------------------------------------------


def test_pads_are_those_of_the_format(built: Built) -> None:
    names = dict.fromkeys(MULTIMODAL_FORMATS, "<pad>") | {"mistral": "<unk>"}
    names |= {"llama3": "<|end_of_text|>", "nemotron5": "<SPECIAL_233>"}
    names |= dict.fromkeys(("llama3p1", "llama3p2"), "<|finetune_right_pad_id|>")
    names |= {"nemotron5-aligned": "<SPECIAL_233>"}
    for name, token in names.items():
        assert built[name].decode([built[name].pad]) == token
        assert built[name].decode([built[name].eod]) == "</s>"


@pytest.mark.parametrize("name", ["mistral", "chatml"])
def test_round_trip_of_files(folder: Find, tmp_path: Path, name: str) -> None:
    tokenizer = build(
        folder(name), name, tokenizer_special_tokens=("<image>", "<x>"), image_tag_type="nvlm"
    )
    again = carried(tokenizer, tmp_path)
    assert isinstance(again, MultimodalTokenizer)
    assert again.files() == tokenizer.files()
    for name in ("vocab_size", "pad", "image_id"):
        assert getattr(again, name) == getattr(tokenizer, name)
    found, expected = (one.tokenize_conversation(CHAT) for one in (again, tokenizer))
    assert np.array_equal(found, expected)


def test_contradicting_options_are_refused(folder: Find, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenizer-prompt-format x: known are mistral"):
        build(folder("mistral"), "x")
    with pytest.raises(ConfigError, match="--image-tag-type x: known are ''"):
        build(folder("mistral"), "mistral", image_tag_type="x")
    named = {role: token for role, token in NAMED.items() if role != "bos_token"}
    bare = write_folder(tmp_path, named)
    with pytest.raises(ConfigError, match="mistral begins with the BOS token, but"):
        build(bare, "mistral")
    with pytest.raises(ConfigError, match="give one with --chat-template"):
        build(folder("mistral"), "llama3")


@pytest.mark.slow
def test_real_conversations(built: Built, theirs: Any, shared: Path) -> None:
    for path in sorted((shared / "data/sft").glob("*.jsonl")):
        for chat in read_chats(path)[::60]:
            turns = [turn for turn in chat if turn["role"] in ("user", "assistant")]
            for name in ("llama3p1", "qwen2p5", "nemotron5-aligned", "mistral"):
                tokens = built[name].tokenize_conversation(turns, False, True)
                assert tokens.tolist() == render(theirs, turns, TEMPLATES[name], True)
