"""tokenizer.json and chat templates of others: refused, or done in bounded time."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import ArtifactError, ConfigError, DataError, TrainyardError
from trainyard.tokenizers.chat import templates
from trainyard.tokenizers.chat.templates import ChatTemplate
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.huggingface import build_huggingface

VOCAB = {"a": 0, "b": 1, " ": 2, "</s>": 3, "x": 4, "c": 5}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(pattern: str) -> dict[str, Any]:
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


def model(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


TEN = replace({"String": "a"}, 10 * "a")
CHARS = replace({"Regex": "."}, 200 * "a")
TEMPLATE = {
    **{"type": "TemplateProcessing", "pair": [], "special_tokens": {}},
    "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
}

TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "an id near the end of uint32": ({"vocab": {**VOCAB, "y": 4294967290}}, "highest id"),
    "the last id of uint32": ({"vocab": {**VOCAB, "y": 2**32 - 1}}, "highest id"),
    "an id past int32": ({"vocab": {**VOCAB, "y": 2**31}}, "highest id"),
    "an id past uint32": ({"vocab": {**VOCAB, "y": 2**32}}, "readable"),
    "a negative id": ({"vocab": {**VOCAB, "y": -1}}, "readable"),
    "growth in steps": (
        {"normalizer": {"type": "Sequence", "normalizers": 9 * [TEN]}},
        "times as long",
    ),
    "growth in one step": ({"normalizer": replace({"String": "a"}, 101 * "b")}, "times as long"),
    "growth of every character": ({"normalizer": CHARS}, "times as long"),
    "growth of nothing": (
        {"normalizer": replace({"String": ""}, 200 * "a")},
        "times as long",
    ),
    "growth in a tree": (
        {"normalizer": {"type": "Sequence", "normalizers": 3 * [
            {"type": "Sequence", "normalizers": 3 * [TEN]}]}},
        "times as long",
    ),
    "growth as it decodes": (
        {"decoder": {"type": "Sequence", "decoders": 9 * [TEN]}},
        "times as long",
    ),
    "a token that is not there": ({"post_processor": TEMPLATE}, "no entry|SpecialToken|readable"),
    "an empty map of characters": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}},
        "out of bounds|Precompiled",
    ),
    "no map of characters": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        "Precompiled",
    ),
    "pieces of no length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "non-zero"),
    "an unknown token that is not there": (
        {"model": model("WordPiece", unk_token="U", vocab={"</s>": 0},
                        continuing_subword_prefix="##", max_input_chars_per_word=100)},
        "U",
    ),
    "no unknown token": (
        {"model": model("Unigram", unk_id=None, vocab=[["</s>", 0.0]], byte_fallback=False)},
        "unk_id",
    ),
    "an expression without an end": ({"pre_tokenizer": split("(")}, "parenthesis"),
    "an expression of an unknown class": ({"pre_tokenizer": split("\\p{Xx}")}, "property"),
}  # fmt: skip


def written(folder: Path, given: dict[str, Any]) -> str:
    bpe = {
        **{"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "merges": []},
        **{"continuing_subword_prefix": None, "end_of_word_suffix": None, "byte_fallback": False},
    }
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    more = {key: value for key, value in given.items() if key != "vocab"}
    document = {
        **{"version": "1.0", "added_tokens": [], "model": {**bpe, "vocab": VOCAB}},
        **dict.fromkeys(parts),
        **more,
    }
    if "vocab" in given:
        document["model"] = {**bpe, "vocab": given["vocab"]}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(document))
    return str(path)


def used(url: str, text: str = "a b </s>") -> None:
    tokenizer = build_huggingface(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=url)
    )
    tokenizer.decode(tokenizer.encode(text))
    tokenizer.encode_batch([text, text])


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(("given", "words"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_hostile_tokenizer_is_refused(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises((ArtifactError, ConfigError), match=words):
        used(written(tmp_path, given))


BACKTRACKING = [
    "(a*)*b",
    "(?:a|a)*c",
    "(a+)+$",
    "(a|aa)+$",
    "(?=(a+))a*b\\1",
    "(.*)*x",
    "(?:a?){30}b",
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("pattern", BACKTRACKING)
def test_a_backtracking_expression_ends(pattern: str, tmp_path: Path) -> None:
    url = written(tmp_path, {"pre_tokenizer": split(pattern)})
    began = time.process_time()
    with contextlib.suppress(TrainyardError):
        used(url, 60 * "a" + "!")
    assert time.process_time() - began < 20


# --- chat templates -------------------------------------------------------------------------------

R = "range(99999)"
LOOPS: dict[str, str] = {
    "loops in loops": f"{{% for i in {R} %}}{{% for j in {R} %}}{{% endfor %}}{{% endfor %}}",
    "loops that print": f"{{% for i in {R} %}}{{% for j in {R} %}}x{{% endfor %}}{{% endfor %}}",
    "a loop of no body": "{% for a in range(9999) if range(9999) | list | length < 0 %}{% endfor %}"
    + f"{{% for i in {R} %}}{{% for j in {R} if j < 0 %}}{{% endfor %}}{{% endfor %}}",
    "macros that call each other": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for i in [[1]] * 9 recursive %}{{ loop([[1]] * 99) }}{% endfor %}",
    "too long a range": "{{ range(10 ** 9) | list }}",
    "a text times a number": '{{ "x" * 10000000000 }}',
    "a number times a text": '{{ 10000000000 * "x" }}',
    "a list times a number": "{{ ([1] * 10000000000) | length }}",
    "a text that doubles": '{% set n = namespace(t="xx") %}{% for i in range(60) %}'
    "{% set n.t = n.t ~ n.t %}{% endfor %}",
    "a sum that doubles": '{% set n = namespace(t="xx") %}{% for i in range(60) %}'
    "{% set n.t = n.t + n.t %}{% endfor %}",
    "a product that grows": '{% set n = namespace(t="xx") %}{% for i in range(60) %}'
    "{% set n.t = n.t * 9 %}{% endfor %}",
    "a list that doubles": "{% set n = namespace(t=[1, 2]) %}{% for i in range(60) %}"
    "{% set n.t = n.t + n.t %}{% endfor %}",
    "a replacement that grows": '{% set n = namespace(t="xx") %}{% for i in range(60) %}'
    '{% set n.t = n.t.replace("x", "xxxx") %}{% endfor %}',
    "a filter that grows": '{% set n = namespace(t="xx") %}{% for i in range(60) %}'
    '{% set n.t = n.t | replace("x", "xxxx") %}{% endfor %}',
    "a join that grows": '{% set n = namespace(t="xx") %}{% for i in range(60) %}'
    "{% set n.t = n.t.join(n.t) %}{% endfor %}",
    "a wide filter": '{{ "x" | center(10000000000) }}',
    "a wide method": '{{ "x".center(10000000000) }}',
    "a wide number": "{{ 5 | string | indent(10000000000) }}",
    "a wide format": '{{ "%10000000000d" % 5 }}',
    "a width given apart": '{{ "%*d" % (10000000000, 5) }}',
    "a large power": "{{ 9 ** 9 ** 9 }}",
    "JSON with a wide indent": "{{ [1] | tojson(indent=10000000000) }}",
}


@pytest.mark.few_cases(5)
@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS)
def test_a_template_without_end_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_STEPS", 20_000)  # a tenth, to be sooner done
    began = time.process_time()
    with pytest.raises((DataError, ConfigError)) as caught:
        ChatTemplate(text, "x").render([{"role": "user", "content": "hi"}], {}, invite=False)
    assert len(str(caught.value)) < 300
    assert time.process_time() - began < 20


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__')|attr('__base__') }}",
    "{{ ''|attr('_' ~ '_class_' ~ '_') }}",
    "{{ ['']|map(attribute='__class__.__base__')|list }}",
    "{{ [messages]|groupby('__class__')|list }}",
    "{{ [messages]|selectattr('__class__')|list }}",
    "{{ messages.append.__self__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ range.__self__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ ('%(x)s'|format(x=1)).__class__ }}",
    "{{ (1).__class__.__bases__ }}",
    "{{ ''.encode.__self__.__class__ }}",
    "{{ messages.__getitem__(0) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update(a=1) }}",
    "{% set _ = messages.sort() %}",
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% from '/etc/passwd' import x %}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_a_template_reaches_nothing_but_its_conversation(text: str) -> None:
    given = [{"role": "user", "content": "hi"}]
    shown = ""
    with contextlib.suppress(DataError, ConfigError):
        shown = ChatTemplate(text, "x").render(given, {}, invite=False)
    assert not any(word in shown for word in ("<class", "<module", "<function", "<built", "root:"))
    assert given == [{"role": "user", "content": "hi"}]


def test_bounds_count_one_rendering_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_STEPS", 20_000)
    template = ChatTemplate("{% for i in range(5000) %}{% endfor %}{{ '%03d' % 5 ~ 'x' * 3 }}", "x")
    for _ in range(5):
        assert template.render([], {}, invite=False) == "005xxx"
