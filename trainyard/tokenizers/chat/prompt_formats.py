"""The named prompt formats of SFTTokenizer and MultimodalTokenizer, which lay out conversations.

Most are a function from a turn to text; only formats without one use the tokenizer's chat template.
Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainyard.errors import ConfigError

Turn = tuple[str, str]
"""Role and content."""

PromptLayout = Callable[[str, str, str], str]
"""Makes the text of a turn from (role, content, end-of-sentence token)."""

QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """One of `--sft-tokenizer-prompt-format` or `--tokenizer-prompt-format`."""

    layout: PromptLayout | None
    """None: the tokenizer's own chat template."""
    invitation: str = ""
    """The text that prompts the model for its turn."""
    pad: str = "pad_token"
    """The token that pads a row, or the role of one: pad_token, unk_token."""
    masked_prefix: int = 0
    """Tokens at the beginning of an assistant's turn that are not learnt."""
    begins: bool = False
    """Whether a BOS comes before the first turn, or before a turn that is rendered alone."""
    masks: bool = True
    """Whether only turns of the assistant are learnt."""
    system: bool = True
    """Whether the format has a system turn; otherwise that of a conversation is dropped."""
    system_text: str | None = None
    """The system turn for `--force-system-message`."""
    capitalizes: bool = False
    """Whether roles begin with a capital letter."""


def render_turns(
    prompt_format: PromptFormat, turns: Sequence[Turn], *, bos: str, eos: str, invite: bool
) -> str:
    """The text of a conversation in a format that has a layout."""
    assert prompt_format.layout is not None
    texts = (prompt_format.layout(role, content, eos) for role, content in turns)
    return (
        (bos if prompt_format.begins else "")
        + "".join(texts)
        + (prompt_format.invitation if invite else "")
    )


def find_format(table: dict[str, PromptFormat], name: str, flag: str) -> PromptFormat:
    """The format of a name. Raises ConfigError, which lists the known names. flag: the option."""
    if name not in table:
        raise ConfigError(f"{flag} {name}: known are {', '.join(table)}")
    return table[name]


# --- turns ------------------------------------------------------------------------------------


def _h_aligned(role: str, content: str, eos: str) -> str:
    content = content.strip()
    match role:
        case "system":
            return f"<SPECIAL_10>System\n{content}\n"
        case "user":
            return f"<SPECIAL_11>User\n{content}\n<SPECIAL_11>Assistant\n"
        case "assistant":
            return f"{content}\n"
    return ""


def _nano_v2(role: str, content: str, eos: str) -> str:
    if role == "assistant":
        return f"<SPECIAL_11>Assistant\n{content.strip()}\n<SPECIAL_12>\n"
    content = content.replace("/think", "").replace("/no_think", "").strip()
    match role:
        case "system":
            return f"<SPECIAL_10>System\n{content}\n"
        case "user":
            return f"<SPECIAL_11>User\n{content}\n"
    return ""


def _identity(role: str, content: str, eos: str) -> str:
    return content


def _mistral(role: str, content: str, eos: str) -> str:
    match role:
        case "user":
            return f"[INST] {content}[/INST]"
        case "assistant":
            return f" {content}{eos}"
    return ""


def _llama3p1(role: str, content: str, eos: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content.strip()}<|eot_id|>"


def _chatml(role: str, content: str, eos: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _nemotron5(role: str, content: str, eos: str) -> str:
    return f"<SPECIAL_14>{role}\n{content}<SPECIAL_15>\n"


def _nemotron5_aligned(role: str, content: str, eos: str) -> str:
    return f"{role}\n{content}\n[PREFIX]"


# --- tables -----------------------------------------------------------------------------------

SFT_FORMATS = {
    "nemotron-h-aligned": PromptFormat(layout=_h_aligned, pad="<SPECIAL_233>"),
    "nemotron-nano-v2": PromptFormat(layout=_nano_v2, pad="<unk>", masked_prefix=3),
    "identity": PromptFormat(layout=_identity, pad="<unk>"),
    "default": PromptFormat(layout=None, masks=False),
}

_LLAMA3P1 = PromptFormat(
    layout=_llama3p1,
    invitation="<|start_header_id|>assistant<|end_header_id|>\n\n",
    pad="<|finetune_right_pad_id|>",
    masked_prefix=4,
    begins=True,
)
_QWEN2 = PromptFormat(
    layout=_chatml,
    invitation="<|im_start|>assistant\n",
    masked_prefix=3,
    system_text=QWEN_SYSTEM,
)
MULTIMODAL_FORMATS = {
    "mistral": PromptFormat(
        layout=_mistral, invitation=" ", pad="unk_token", begins=True, system=False
    ),
    "llama3": PromptFormat(layout=None, pad="<|end_of_text|>", masked_prefix=4, begins=True),
    "llama3p1": _LLAMA3P1,
    "llama3p2": _LLAMA3P1,
    "nvlm-yi-34b": PromptFormat(
        layout=_chatml, invitation="<|im_start|>assistant\n", masked_prefix=4, begins=True
    ),
    "chatml": PromptFormat(layout=None, masked_prefix=3),
    "qwen2p0": _QWEN2,
    "qwen2p5": _QWEN2,
    "nemotron5": PromptFormat(
        layout=_nemotron5,
        invitation="<SPECIAL_14>assistant\n",
        pad="<SPECIAL_233>",
        masked_prefix=3,
        begins=True,
    ),
    "nemotron5-aligned": PromptFormat(
        layout=_nemotron5_aligned,
        invitation="Assistant\n",
        pad="<SPECIAL_233>",
        masked_prefix=2,
        begins=True,
        capitalizes=True,
    ),
}
