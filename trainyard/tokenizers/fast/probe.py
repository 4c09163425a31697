"""Checks whether gigatoken may encode for a tokenizer.

`refusal` names the parts of a tokenizer.json that gigatoken 0.10 accepts but reads differently from
the `tokenizers` library. `probe_texts` find unknown differences. gigatoken refuses the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

MAX_ADDED = 24
"""Added tokens to probe; some tokenizers have a thousand similar ones."""

TEXTS = (
    "",
    " ",
    "Hello world, it's the 21st of May 2024; they'll pay $1,234.56!",
    "two  spaces   three\n\nlines\r\n\ttab\x00nul \x85 end ",
    "    indented:\n        return 'It''s' + (x == y)  # 100%\n\n\n",
    "DON'T I'VE we're she'd I'm 'S 'LL 'tis",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "12345678901234567890 3.14159 1/2 \u00bd \u00b2 \u2167 \u0663\u0664 \u0967",
    "camelCase HTTPServer snake_case kebab-case \u01c5 \u1e9e \u0130i\u0131",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b \uc548\ub155\ud558\uc138\uc694",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0393\u03b5\u03b9\u03ac",
    "e\u0301 \u00e9 \u0301 q\u0307\u0323 \u1ec7 \u212b \ufb01 \u2126 \ufeffbom",
    "\U0001f468\u200d\U0001f469 \U0001f1eb\U0001f1f7 \U0001f44d\U0001f3fd \u2764\ufe0f",
    "\u00a0no\u2009break\u3000wide\u200bzero\u2028line \u2581 \u2581\u2581",
    "<|endoftext|> <s> </s> [CLS] <unk> <|im_start|> <0x41> |||IP_ADDRESS|||",
    "\U00020000\U0002a6df \U0001d54f \ue000 \ufffd \U0010fffd",
)


def probe_texts(added: Sequence[str]) -> list[str]:
    """Texts with many kinds of characters, and the added tokens in different contexts."""
    texts = list(TEXTS)
    for content in [*added[: MAX_ADDED // 2], *added[-MAX_ADDED // 2 :]]:
        texts += [content, f"a{content}b", f"  {content} {content}\n{content}{content}1 "]
    return texts


def refusal(document: dict[str, Any]) -> str | None:
    """Why gigatoken must not encode for this tokenizer.json; None if it may."""
    model = document["model"]
    if model.get("type") != "BPE":
        return f"no model of type {model.get('type')}"
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            return f"no BPE with {option}"
    byte_level = not model.get("byte_fallback")
    for kind in _normalizers(document):
        if kind not in (("NFC",) if byte_level else ("Prepend", "Replace")):
            return f"no normalizer of type {kind}"
    for part in _parts(document.get("pre_tokenizer"), "pretokenizers"):
        whole = part.get("behavior") == "Isolated" and not part.get("invert")
        if byte_level and part["type"] == "Split" and not whole:
            return "no Split that does not keep every piece by itself"
    return _added_tokens(document)


def _added_tokens(document: dict[str, Any]) -> str | None:
    tokens: list[dict[str, Any]] = document["added_tokens"]
    if any(token.get("single_word") for token in tokens):
        return "no added token that must be a word by itself"
    # The library first finds the tokens that are not normalized, then the others in the rest of
    # the text; gigatoken finds all at once.
    first = [token for token in tokens if not token.get("normalized")]
    second = [token["content"] for token in tokens if token.get("normalized")]
    if any(overlap(a["content"], b) for a, b in product(first, second)):
        return "no added tokens of both kinds (normalized or not) that overlap"
    if "NFC" in _normalizers(document) and not all(map(str.isascii, second)):
        return "no added token that NFC may change"
    strips = any(token.get("lstrip") or token.get("rstrip") for token in first)
    if strips and any(content != content.strip() for content in second):
        return "no added token that takes the spaces of another"
    return None


def overlap(a: str, b: str) -> bool:
    """Whether both can occur in a text with a character in common."""
    if a in b or b in a:
        return True
    shorter = min(len(a), len(b))
    return any(a[-n:] == b[:n] or b[-n:] == a[:n] for n in range(1, shorter))


def remove_nfc(document: dict[str, Any]) -> bool:
    """Remove NFC if it is the only normalizer; returns whether it was.

    The two libraries have different versions of Unicode, so gigatoken gets only text that needs no
    normalization; other text goes to the reference."""
    if _normalizers(document) != ["NFC"]:
        return False
    document["normalizer"] = None
    return True


def _normalizers(document: dict[str, Any]) -> list[str]:
    return [part["type"] for part in _parts(document.get("normalizer"), "normalizers")]


def _parts(component: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """A component, or the components of a Sequence."""
    if component is None:
        return
    if component["type"] != "Sequence":
        yield component
        return
    for part in component[key]:
        yield from _parts(part, key)
