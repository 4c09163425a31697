"""SFTTokenizer: text as transformers renders it, targets as Megatron-LM masks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.tokenizers.chat.chats import MARKS, pair, read_chats, render, write_folder
from tests.trainyard.tokenizers.hostile import HOSTILE
from tests.trainyard.tokenizers.kinds import carried
from trainyard.errors import ConfigError, DataError
from trainyard.tokenizers.chat.prompt_formats import SFT_FORMATS
from trainyard.tokenizers.chat.sft import IGNORED, SFTTokenizer
from trainyard.tokenizers.chat.templates import ChatTemplate
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

TEMPLATES = {
    "nemotron-h-aligned": """
{%- for turn in messages %}
  {%- set said = turn.content.strip() %}
  {%- if turn.role == "system" %}{{ "<SPECIAL_10>System\\n" + said + "\\n" }}
  {%- elif turn.role == "user" %}
    {{- "<SPECIAL_11>User\\n" + said + "\\n<SPECIAL_11>Assistant\\n" }}
  {%- elif turn.role == "assistant" %}{{ said + "\\n" }}{% endif %}
{%- endfor %}""",
    "nemotron-nano-v2": """
{%- for turn in messages %}
  {%- set said = turn.content.replace("/think", "").replace("/no_think", "").strip() %}
  {%- if turn.role == "system" %}{{ "<SPECIAL_10>System\\n" + said + "\\n" }}
  {%- elif turn.role == "user" %}{{ "<SPECIAL_11>User\\n" + said + "\\n" }}
  {%- elif turn.role == "assistant" %}
    {{- "<SPECIAL_11>Assistant\\n" + turn.content.strip() + "\\n<SPECIAL_12>\\n" }}
  {%- endif %}
{%- endfor %}""",
    "identity": "{% for turn in messages %}{{ turn.content }}{% endfor %}",
}
OWN = """{{ bos_token }}{% for turn in messages %}
{% generation %}
    {%- if loop.first and turn.role == 'tool' %}
        {{- raise_exception('a tool begins: ' + turn.content) }}
    {%- endif %}{% endgeneration %}
{% if not turn.content %}{% continue %}{% endif %}
    {{ turn.role | upper }}: {{ turn | tojson }}{{ eos_token }}
{% endfor %}
{% if tools is defined and tools %}{{ tools }}{% endif %}
{% if add_generation_prompt %}ASSISTANT:{% endif %}
"""

FORMATS = TEMPLATES | {"default": OWN}
Built = dict[str, SFTTokenizer]
CHAT = [
    {"role": "system", "content": " Be kind. /no_think "},
    {"role": "user", "content": "What is /think caf\u00e9?\n"},
    {"role": "assistant", "content": " A place </s> to drink.  "},
    {"role": "user", "content": "And \u4f60\u597d?"},
    {"role": "assistant", "content": "Hello <SPECIAL_11>!"},
]
CHATS = [
    CHAT,
    CHAT[1:3],
    [CHAT[1], {"role": "tool", "content": "{'a': 1}"}, CHAT[2]],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(tmp_path_factory.mktemp("chat"), chat_template=OWN)


def build(folder: str | Path, name: str = "nemotron-h-aligned", **more: Any) -> SFTTokenizer:
    config = TokenizerConfig(
        tokenizer_type="SFTTokenizer",
        tokenizer_model=str(folder),
        sft_tokenizer_prompt_format=name,
        **more,
    )
    tokenizer = build_tokenizer(config)
    assert isinstance(tokenizer, SFTTokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def built(folder: str) -> Built:
    return {name: build(folder, name) for name in SFT_FORMATS}


@pytest.fixture(scope="module")
def theirs(folder: str) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


def spans(tokenizer: SFTTokenizer, targets: np.ndarray) -> list[str]:
    """The texts that are learnt."""
    learnt = np.split(targets, np.flatnonzero(np.diff(targets == IGNORED)) + 1)
    return [tokenizer.decode(span.tolist()) for span in learnt if len(span) and span[0] != IGNORED]


# --- text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SFT_FORMATS)
def test_layout_is_that_of_transformers(built: Built, theirs: Any, name: str) -> None:
    for chat in CHATS:
        for invite in (False, True):
            found = built[name].tokenize_conversation(chat, False, invite)
            assert found.dtype == np.int64
            assert found.tolist() == render(theirs, chat, FORMATS[name], invite)


TURNS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "User", "x"]),
            "content": st.text() | st.sampled_from([*HOSTILE[:9], "/think/no_think x", " \n"]),
        }
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=30, deadline=None)
@given(chat=TURNS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_any_layout(built: Built, theirs: Any, name: str, chat: list[dict[str, str]]) -> None:
    found = built[name].tokenize_conversation(chat, False)
    assert found.tolist() == render(theirs, chat, TEMPLATES[name])


def test_text_alone_is_that_of_the_tokenizer(folder: str, theirs: Any) -> None:
    tokenizer = build(folder)
    assert tokenizer.encode_batch(HOSTILE) == theirs(list(HOSTILE)).input_ids
    assert list(map(tokenizer.encode, HOSTILE)) == theirs(list(HOSTILE)).input_ids
    ids, bounds = tokenizer.encode_flat(HOSTILE)
    assert ids[: bounds[1]].tolist() == tokenizer.encode_reference(HOSTILE[0]) == [1]
    assert tokenizer.decode([1, *theirs("Hello").input_ids[1:]]) == "<s>Hello"
    assert (tokenizer.vocab_size, tokenizer.eod) == (len(theirs), theirs.eos_token_id)


# --- targets ----------------------------------------------------------------------------------


def test_only_answers_are_learnt(built: Built) -> None:
    learnt = {
        "nemotron-h-aligned": ["A place </s> to drink.\n", "Hello <SPECIAL_11>!\n"],
        # The prefix is three tokens: the mark, "Assistant" and the line break.
        "nemotron-nano-v2": [
            "A place </s> to drink.\n<SPECIAL_12>\n",
            "Hello <SPECIAL_11>!\n<SPECIAL_12>\n",
        ],
        "identity": [" A place </s> to drink.  ", "Hello <SPECIAL_11>!"],
    }
    for name, expected in learnt.items():
        tokens, targets = built[name].tokenize_conversation(CHAT)
        assert tokens.dtype == targets.dtype == np.int64
        assert len(tokens) == len(targets)
        assert ((targets == tokens) | (targets == IGNORED)).all()
        assert spans(built[name], targets) == expected
    tokens, targets = built["default"].tokenize_conversation(CHAT)
    assert (tokens == targets).all()


def test_a_small_conversation_token_by_token(built: Built) -> None:
    tokenizer = built["nemotron-nano-v2"]
    tokens, targets = tokenizer.tokenize_conversation(pair("user", "system"))
    texts = [tokenizer.decode([i]) for i in tokens.tolist()]
    asked = ["<SPECIAL_11>", "User", "\n", "user", "\n"]
    assert texts == [
        *asked,
        "<SPECIAL_11>",
        "Assistant",
        "\n",
        "system",
        "\n",
        "<SPECIAL_12>",
        "\n",
    ]
    assert targets.tolist() == [IGNORED] * 8 + tokens[8:].tolist()


def test_turns_of_a_tool_are_not_learnt(built: Built) -> None:
    chat = [
        *pair("a", "b"),
        {"role": "tool", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    tokens, targets = built["identity"].tokenize_conversation(chat)
    assert spans(built["identity"], targets) == ["b", "d"]
    tokens, _ = built["nemotron-h-aligned"].tokenize_conversation(chat)
    assert "c" not in built["nemotron-h-aligned"].decode(tokens.tolist())  # it prints nothing


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "the conversation has no turns"),
        ([{"role": "user"}], r"turn 0 \(user\): its content is not a string"),
        ([{"role": "user", "content": ["a"]}], "its content is not a string"),
        ([{"content": "a"}], "turn 0 is not an object with a role"),
        (["user: a"], "turn 0 is not an object with a role"),
        (pair("a", ""), r"turn 1 \(assistant\) is empty"),
        ([*pair("a", "b"), {"role": "assistant", "content": "c"}], "turn 2 .* after assistant"),
        (pair("a", "b")[1:], r"turn 0 \(assistant\) comes after nothing"),
        ([{"role": "critic", "content": "a"}], "turn 0 has the role 'critic'; known are system"),
    ],
)
def test_refused_turns(built: Built, chat: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        built["nemotron-h-aligned"].tokenize_conversation(chat)


def test_a_turn_whose_tokens_reach_into_the_next_is_named(built: Built) -> None:
    with pytest.raises(DataError, match=r"turn 0 \(user\) tokenizes differently on its own"):
        built["identity"].tokenize_conversation(pair("wea", "ther"))


# --- templates --------------------------------------------------------------------------------


def test_a_template_is_rendered_as_transformers_does(folder: str, theirs: Any) -> None:
    chat = [
        {
            "role": "user",
            "content": "caf\u00e9 <b>&amp;</b> \"'",
            "name": None,
            "n": [1, 2.5, True],
        },
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "\u4f60 {{ 1 + 1 }}"},
    ]
    ours = build(folder, "default")
    for invite in (False, True):
        text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=invite)
        assert ours.render(chat, invite=invite) == text
        found = ours.tokenize_conversation(chat, False, invite)
        assert found.tolist() == render(theirs, chat, OWN, invite)
    with pytest.raises(DataError, match="a tool begins: x"):
        ours.tokenize_conversation([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].x.y }}",
        "{{ 1 + 'a' }}",
        "{{ raise_exception('no') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(text: str) -> None:
    with pytest.raises(DataError, match="given template: "):
        ChatTemplate(text, "given template").render([{"role": "user"}], {}, invite=False)


def test_templates_have_no_clock() -> None:
    text = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}"
    assert ChatTemplate(text, "t").render([], {}, invite=False) == "2024"


def test_a_template_file_replaces_the_tokenizers_own(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    tokenizer = build(folder, "default", chat_template=str(file))
    assert tokenizer.render(CHAT[1:2]) == f"[{CHAT[1]['content']}]"
    with pytest.raises(ConfigError, match="--chat-template does not apply to"):
        build(folder, chat_template=str(file))
    file.write_text("{% for %}")
    with pytest.raises(ConfigError, match="not a Jinja template on line 1"):
        build(folder, "default", chat_template=str(file))


def test_the_default_of_several_templates_is_used(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert build(write_folder(tmp_path, chat_template=several), "default").render(CHAT) == "d"
    with pytest.raises(ConfigError, match="give one with --chat-template"):
        build(write_folder(tmp_path), "default")


# --- the rest ---------------------------------------------------------------------------------


def test_pads_are_those_of_the_format(folder: str, tmp_path: Path) -> None:
    names = {"nemotron-h-aligned": "<SPECIAL_233>", "nemotron-nano-v2": "<unk>"}
    names |= {"identity": "<unk>", "default": "<pad>"}
    for name, token in names.items():
        tokenizer = build(folder, name)
        assert tokenizer.pad is not None
        assert tokenizer.decode([tokenizer.pad]) == token
    bare = write_folder(tmp_path, named={"eos_token": "</s>"}, chat_template="x")
    assert build(bare, "default").pad == build(bare, "default").eod
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["added_tokens"] = [t for t in document["added_tokens"] if "_233" not in t["content"]]
    document["model"]["vocab"]["<other>"] = document["model"]["vocab"].pop("<SPECIAL_233>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert build(bare).pad is None


def test_special_tokens_are_known_by_their_ids(tmp_path: Path) -> None:
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "cls_token": "[INST]"}
    folder = write_folder(tmp_path / "t", named, sep_token={"content": "[/INST]"}, mask_token="no")
    more = {"mask_token": "[PREFIX]", "bos_token": "<pad>"}
    (tmp_path / "t/special_tokens_map.json").write_text(json.dumps(more))
    for kind in ("HuggingFaceTokenizer", "SFTTokenizer"):
        kinds: Any = kind
        config = TokenizerConfig(tokenizer_type=kinds, tokenizer_model=folder)
        built: Any = build_tokenizer(config)
        ids = (built.bos, built.eos, built.unk, built.cls, built.sep, built.mask)
        # A token that there is not ("no") is no token; the first file that names one counts.
        assert ids == (1, 2, 0, MARKS.index("[INST]"), MARKS.index("[/INST]"), None)


def test_a_tokenizer_comes_back_from_the_files_it_carries(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "given.jinja"
    file.write_text("{{ messages[0].content }}{{ eos_token }}")
    for name, template in (("nemotron-nano-v2", None), ("default", None), ("default", str(file))):
        tokenizer = build(folder, name, chat_template=template)
        again = carried(tokenizer, tmp_path / f"{name}-{template is None}")
        assert isinstance(again, SFTTokenizer)
        assert again.files() == tokenizer.files()
        found, expected = (one.tokenize_conversation(CHAT) for one in (again, tokenizer))
        assert np.array_equal(found, expected)


def test_an_unknown_format_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="--sft-tokenizer-prompt-format x: known are nemotron-h"):
        build(folder, "x")


@pytest.mark.slow
def test_real_conversations(built: Built, theirs: Any, shared: Path) -> None:
    for path in sorted((shared / "data/sft").glob("*.jsonl")):
        for chat in read_chats(path)[::40]:
            turns = [turn | {"role": turn["role"].replace("tool_call", "user")} for turn in chat]
            for name, tokenizer in built.items():
                tokens = tokenizer.tokenize_conversation(turns, False)
                assert tokens.tolist() == render(theirs, turns, FORMATS[name])
            if all(turn["content"].strip() for turn in turns) and turns[-1]["role"] == "assistant":
                tokens, targets = built["nemotron-nano-v2"].tokenize_conversation(turns)
                answers = [t["content"].strip() for t in turns if t["role"] == "assistant"]
                said = [f"{answer}\n<SPECIAL_12>\n" for answer in answers]
                assert spans(built["nemotron-nano-v2"], targets) == said
