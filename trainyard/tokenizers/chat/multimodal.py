"""MultimodalTokenizer: conversations about images.

`<image>` stands for an image in a text and is a separate token, like all other
`--tokenizer-special-tokens`. Unlike in Megatron-LM, these count in the size of the vocabulary, so
that every id is inside the embedding. The model gets the id -200 in the place of an image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import ConfigError, DataError
from trainyard.tokenizers.base import Flat
from trainyard.tokenizers.chat.prompt_formats import MULTIMODAL_FORMATS, PromptFormat, find_format
from trainyard.tokenizers.chat.sft import ConversationTokenizer, Ids, Message
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.hf_tokenizers import EngineTokenizer
from trainyard.tokenizers.huggingface import build_huggingface

IMAGE = "<image>"
VIDEO = "<video>"
NUMBERED = re.compile(r"<image-(\d+)>")

IMAGE_INDEX = -200
"""The id that the model gets for an image, instead of that of its token."""

IMAGE_TAGS = {
    "": IMAGE,
    "nvlm": f"<Image>{IMAGE}</Image>",
    "internvl": f"<img>{IMAGE}</img>",
}
"""The text of an image, by `--image-tag-type`."""

MAX_TILES = 12


class MultimodalTokenizer(ConversationTokenizer):
    """Conversations in which `<image>` stands for an image, or for the frames of a video."""

    def __init__(self, inner: EngineTokenizer, prompt_format: PromptFormat, flag: str) -> None:
        super().__init__(inner, prompt_format, flag)
        self._image = IMAGE_TAGS[inner.config.image_tag_type]
        self.image_id: int | None = self._id_of(IMAGE)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with tags around its images."""
        return super().encode(self._tag(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, in order."""
        return super().encode_batch([self._tag(text) for text in texts])

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The ids of several texts as arrays."""
        return super().encode_flat([self._tag(text) for text in texts])

    def encode_reference(self, text: str) -> list[int]:
        """The ids of a text by the tokenizers library."""
        return super().encode_reference(self._tag(text))

    def reference_array(self, text: str) -> NDArray[np.uint32]:
        """The same as an array."""
        return super().reference_array(self._tag(text))

    def model_ids(self, ids: Sequence[int] | NDArray[np.integer]) -> Ids:
        """A copy of `ids` with -200 for every image."""
        found = np.array(ids, np.int64)
        if self.image_id is not None:
            found[found == self.image_id] = IMAGE_INDEX
        return found

    def tile_tag_ids(self, max_num_tiles: int) -> list[list[int]]:
        """The ids of the tags of `tile_tags`, without a BOS."""
        name = self.config.tokenizer_prompt_format
        assert name is not None
        library = self._inner.library
        encoded = (
            library.encode(tag, add_special_tokens=False) for tag in tile_tags(name, max_num_tiles)
        )
        return [encoding.ids for encoding in encoded]

    def prepare(self, conversation: Sequence[Message]) -> list[Message]:
        """The turns to lay out, with the forced system message and tags around images."""
        turns = super().prepare(conversation)
        if self.config.force_system_message:
            rest = turns[1:] if turns[0]["role"] == "system" else turns
            turns = [{"role": "system", "content": self._prompt_format.system_text}, *rest]
        return [
            {**turn, "role": self._role(turn["role"]), "content": self._tag(turn["content"])}
            for turn in turns
        ]

    def check_turn(self, turns: Sequence[Message], number: int) -> None:
        """Refuse an empty turn, and an image in a turn of the assistant."""
        turn = turns[number]
        if not turn["content"]:
            raise DataError(f"turn {number} ({turn['role']}) is empty")
        if turn["role"].lower() == "assistant" and IMAGE in turn["content"]:
            raise DataError(
                f"turn {number} ({turn['role']}) has an {IMAGE}, but a model cannot learn images"
            )

    def _tag(self, text: str) -> str:
        return text if self._image == IMAGE else text.replace(IMAGE, self._image)

    def _role(self, role: str) -> str:
        return role[:1].upper() + role[1:] if self._prompt_format.capitalizes else role


def build_multimodal(config: TokenizerConfig) -> MultimodalTokenizer:
    """The tokenizer of `--tokenizer-model` in the format of `--tokenizer-prompt-format`."""
    flag, name = "--tokenizer-prompt-format", config.tokenizer_prompt_format
    assert name is not None
    prompt_format = find_format(MULTIMODAL_FORMATS, name, flag)
    if config.image_tag_type not in IMAGE_TAGS:
        known = ", ".join(repr(tag) for tag in IMAGE_TAGS)
        raise ConfigError(f"--image-tag-type {config.image_tag_type}: known are {known}")
    if config.force_system_message and prompt_format.system_text is None:
        having = ", ".join(
            k for k, prompt_format in MULTIMODAL_FORMATS.items() if prompt_format.system_text
        )
        raise ConfigError(
            f"--force-system-message: {flag} {name} has no system message; {having} have one"
        )
    if not config.tokenizer_special_tokens:
        config = replace(config, tokenizer_special_tokens=(IMAGE,))
    return MultimodalTokenizer(build_huggingface(config), prompt_format, f"{flag} {name}")


def tile_tags(prompt_format: str, max_num_tiles: int) -> list[str]:
    """The texts before each tile of an image and before its thumbnail, which comes last.

    Numbers have two digits if one of them needs two, so that all texts have the same number of
    tokens."""
    if not 1 <= max_num_tiles <= MAX_TILES:
        raise ConfigError(
            f"--max-num-tiles must be 1 to {MAX_TILES} with tile tags, got {max_num_tiles}"
        )
    nemotron = prompt_format.startswith("nemotron")
    two_digits = max_num_tiles >= 10
    thumbnail = "tile_global" if prompt_format == "nvlm-yi-34b" else "tile_global_thumbnail"
    if two_digits and not nemotron and prompt_format != "llama3p1":
        thumbnail += "0"
    width = 2 if two_digits or nemotron else 1
    return [f"<tile_{i:0{width}d}>" for i in range(1, max_num_tiles + 1)] + [f"<{thumbnail}>"]


def place_images(
    conversation: Sequence[Message], num_images: int, *, video: bool = False
) -> tuple[list[Message], list[int]]:
    """The conversation with one `<image>` for every image, and for each of them the number of its
    image (from 0).

    `<image-N>` in a turn of the user is the Nth image (from 1); if any occurs, only these images
    are used. One image may serve several `<image>`. Images without a place come before the first
    turn of the user. Without images, the tags are removed. video: there is one place, which may
    also be written `<video>`."""
    turns = [dict(turn) for turn in conversation]
    users = [turn for turn in turns if turn["role"] == "user"]
    order: list[int] = []
    for turn in users:
        order += [int(number) - 1 for number in NUMBERED.findall(turn["content"])]
        turn["content"] = NUMBERED.sub(IMAGE, turn["content"])
        if video:
            turn["content"] = turn["content"].replace(VIDEO, IMAGE)
    if any(not 0 <= number < num_images for number in order):
        numbers = ", ".join(f"<image-{number + 1}>" for number in order)
        raise DataError(f"a conversation names {numbers}, but has {num_images} images")
    found = sum(turn["content"].count(IMAGE) for turn in users)
    images = order or list(range(num_images))
    if not video and len(images) == 1 and found > 1:
        images = images * found
    if not images:
        for turn in users:
            turn["content"] = turn["content"].replace(IMAGE, "")
        return list(turns), []
    places = 1 if video else len(images)
    if found > places or (found < places and not users):
        raise DataError(
            f"a conversation has {found} {IMAGE} in turns of the user for {places} images"
        )
    if found < places:
        users[0]["content"] = IMAGE * (places - found) + "\n" + users[0]["content"]
    return list(turns), images
