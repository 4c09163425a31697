"""Beam search for one prompt, by the definitions of Megatron-LM 0.7: the last release that had it.

A finished text scores sum of log-probabilities / length ^ penalty. Each step looks at the best
2 x width continuations of all beams: those with the end token finish if they are among the best
width, the first width others go on. The search ends when no beam can beat the worst of `width`
finished texts; texts that are not finished then score too, by the length they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainyard.inference.decoders import Decoder
from trainyard.inference.request import BrokenOutputError


@dataclass(frozen=True, slots=True)
class BeamText:
    """A text that the search found."""

    score: float
    tokens: list[int]
    """New tokens, with the end token if it has one."""


class Finished:
    """The best `width` texts so far."""

    def __init__(self, width: int, length_penalty: float) -> None:
        self.width, self.length_penalty = width, length_penalty
        self.texts: list[BeamText] = []

    def score(self, log_prob: float, length: int) -> float:
        """Of a text of this length, its end token counted."""
        return log_prob / float(length**self.length_penalty)

    def add(self, tokens: list[int], log_prob: float, length: int) -> None:
        """Keep a text if it is among the best."""
        self.texts.append(BeamText(self.score(log_prob, length), tokens))
        self.texts.sort(key=lambda text: -text.score)
        del self.texts[self.width :]

    def beats(self, log_prob: float, length: int) -> bool:
        """Whether no text with these figures would be kept."""
        full = len(self.texts) == self.width
        return full and self.texts[-1].score >= self.score(log_prob, length)


@torch.inference_mode()
def beam_search(
    decoder: Decoder,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    width: int,
    length_penalty: float = 1.0,
    end: int | None = None,
) -> list[BeamText]:
    """Up to `width` texts, the best first.

    decoder: with room for `width` copies of the prompt. end: token that finishes a text. Raises
    BrokenOutputError for logits that are NaN or infinite."""
    finished = Finished(width, length_penalty)
    logits = decoder.start([prompt] * width).logits
    beams: list[list[int]] = [[] for _ in range(width)]
    scores = torch.zeros(width, dtype=torch.float64, device=logits.device)
    is_done = False
    for length in range(1, max_tokens + 1):
        totals = logits.float().log_softmax(dim=-1).double() + scores.unsqueeze(1)
        # All beams are equal before their first token.
        candidates = (totals[:1] if length == 1 else totals).flatten()
        best = candidates.topk(min(2 * width, len(candidates)))
        if best.values[0].isnan():
            raise BrokenOutputError
        open_beams: list[tuple[int, int, float]] = []
        ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for rank, (place, total) in enumerate(ranked):
            row, token = divmod(place, logits.shape[1])
            if token != end:
                open_beams.append((row, token, total))
            elif rank < width:
                finished.add([*beams[row], token], total, length)
            if len(open_beams) == width:
                break
        is_done = finished.beats(float(best.values[0]), length)
        beams = [[*beams[row], token] for row, token, _ in open_beams]
        if is_done or not beams or length == max_tokens:
            break
        rows = [row for row, _, _ in open_beams]
        scores = torch.tensor([total for *_, total in open_beams], device=scores.device).double()
        decoder.reorder(rows)
        logits = decoder.step(torch.tensor([beam[-1] for beam in beams], device=logits.device))
    if not is_done:
        for beam, (_, _, total) in zip(beams, open_beams, strict=True):
            finished.add(beam, total, len(beam))
    return finished.texts
