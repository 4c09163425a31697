"""Messages between a server and its engine: nothing is lost or changed on the way."""

from __future__ import annotations

import math
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.errors import ConfigError, DeviceMemoryError
from trainyard.inference.config import SamplingConfig
from trainyard.inference.request import BrokenOutputError, Request
from trainyard.inference.stop_words import LineEnds, StopWords
from trainyard.serving.wire import (
    Channel,
    ConnectionLost,
    Frames,
    Piece,
    decoded_error,
    decoded_piece,
    decoded_request,
    encoded_error,
    encoded_piece,
    encoded_request,
    framed,
)
from trainyard.tokenizers.bytelevel import ByteLevelTokenizer
from trainyard.tokenizers.config import TokenizerConfig

TOKENIZER = ByteLevelTokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(VALUES, max_size=5), st.integers(1, 9))
def test_messages_come_whole_however_their_bytes_are_cut(messages: list[object], size: int) -> None:
    data = b"".join(map(framed, messages))
    frames, found = Frames(), []
    for begin in range(0, len(data), size):
        found += frames.take(data[begin : begin + size])
    assert found == messages


def test_a_request_keeps_every_field() -> None:
    request = Request(
        prompt=[1, 2],
        max_tokens=9,
        sampling=SamplingConfig(temperature=0.3, top_k=0, top_p=0.1, seed=2**31 - 1),
        number=4,
        min_tokens=1,
        stop_ids=frozenset({7, 3}),
        is_stop=StopWords(TOKENIZER, ["\n\n", "\xe9\u2028"]),
        banned_after=LineEnds(TOKENIZER),
        log_probs=True,
        prompt_log_probs=True,
        top_n=5,
    )
    (document,) = Frames().take(framed(encoded_request(request)))
    line_ends = LineEnds(TOKENIZER)
    found = decoded_request(document, TOKENIZER, line_ends)
    assert isinstance(found.is_stop, StopWords)
    assert found.is_stop.words == ("\n\n", "\xe9\u2028")
    assert found.banned_after is line_ends
    for name in Request.__slots__:
        if name not in ("is_stop", "banned_after"):
            assert getattr(found, name) == getattr(request, name), name


@pytest.mark.parametrize("log_probs", [[], [-0.1, -math.inf]])
def test_a_piece_keeps_its_scores_to_the_last_bit(log_probs: list[float]) -> None:
    top = [[(5, value)] for value in log_probs]
    piece = Piece(
        tokens=[5, 6],
        log_probs=log_probs,
        top=top,
        finish_reason="stop",
        prompt_log_probs=log_probs,
        prompt_top=top,
    )
    ((*row,),) = Frames().take(framed(encoded_piece(piece)))
    assert decoded_piece(row) == piece


def test_an_error_keeps_its_class_and_words() -> None:
    for error in (ConfigError("--n is 0"), BrokenOutputError(), DeviceMemoryError("full")):
        found = decoded_error(encoded_error(error))
        assert type(found) is type(error)
        assert str(found) == str(error)
    defect = decoded_error(encoded_error(KeyError("x")))
    assert isinstance(defect, RuntimeError)
    assert str(defect) == "KeyError: 'x'"
    memory = decoded_error(encoded_error(RuntimeError("CUDA out of memory")))
    assert isinstance(memory, DeviceMemoryError)


def test_the_last_message_of_who_ends_is_read_before_the_end_is_told() -> None:
    ours, theirs = socket.socketpair()
    sending, receiving = Channel(theirs), Channel(ours)
    sending.send(["last"])
    sending.close()
    assert receiving.receive_one() == ["last"]
    with pytest.raises(ConnectionLost):
        receiving.receive(0)
    with pytest.raises(ConnectionLost):
        receiving.send(["nobody reads"])
    receiving.close()
