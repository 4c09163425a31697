"""The state space of Mamba-2, in plain torch that a compiler fuses: over a whole sequence in chunks
(SSD, arXiv:2405.21060, sections 6 and 7), and token by token.

Per head, with the decay a < 0 and time steps dt > 0:

    state_t = exp(dt_t a) state_{t-1} + dt_t x_t B_t^T        y_t = state_t C_t

Decays, sums of them and the states between chunks are fp32; matrix products have the type of x.

b batch, l tokens, k chunks, q tokens of a chunk, g groups, r heads of a group, p channels of a
head, n numbers of the state of a channel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def chunked_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    documents: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y like x, and the state after the last token, (b, g, r, p, n) fp32.

    x: (b, l, g, r, p). dt: (b, l, g, r) fp32. a: (g, r) fp32. b, c: (b, l, g, n). documents: (b, l)
    ascending numbers; the state of another document than the token's is forgotten. state: before
    the first token, of whose document it is; unset: 0."""
    length = x.shape[1]
    q = min(chunk_size, length)
    if missing := -length % q:  # with time steps of 0, which change no state
        x, dt, b, c = (_lengthened(tensor, missing) for tensor in (x, dt, b, c))
        if documents is not None:
            documents = torch.cat((documents, documents[:, -1:].expand(-1, missing)), dim=1)
    x, dt, b, c = (tensor.unflatten(1, (-1, q)) for tensor in (x, dt, b, c))
    places = None if documents is None else _Documents(documents.unflatten(1, (-1, q)))
    dt = dt.permute(0, 1, 3, 4, 2)  # (b, k, g, r, q)
    decay = (dt * a.unsqueeze(-1)).cumsum(dim=-1)
    b, c = b.transpose(2, 3), c.transpose(2, 3)  # (b, k, g, q, n)
    written = _written_states(x, dt, decay, b, places)
    states = _passed_states(written, decay[..., -1], state, places)
    y = _within_chunks(x, dt, decay, b, c, places) + _from_states(
        states[:, :-1].to(x.dtype), decay, c, places
    )
    return y.flatten(1, 2)[:, :length].to(x.dtype), states[:, -1]


def next_state(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """y of one token, like x, and the state after it.

    state: (b, g, r, p, n) fp32. x: (b, g, r, p). dt: (b, g, r) fp32. a: (g, r). b, c: (b, g, n)."""
    decayed = state * torch.exp(dt * a)[..., None, None]
    write = (dt.unsqueeze(-1) * x.float()).unsqueeze(-1) * b.float()[:, :, None, None, :]
    state = decayed + write
    y = (state * c.float()[:, :, None, None, :]).sum(dim=-1)
    return y.to(x.dtype), state


def _lengthened(x: Tensor, missing: int) -> Tensor:
    return functional.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))


class _Documents:
    """Which document tokens and the states between chunks belong to."""

    def __init__(self, of_tokens: Tensor) -> None:
        """of_tokens: (b, k, q)."""
        self.of_tokens = of_tokens
        ends = of_tokens[:, :, -1]
        self.of_states = torch.cat((of_tokens[:, :1, 0], ends), dim=1)  # (b, k + 1)

    def among_tokens(self) -> Tensor:
        """(b, k, 1, 1, q, q) whether two tokens of a chunk are of one."""
        own = self.of_tokens
        return (own.unsqueeze(-1) == own.unsqueeze(-2))[:, :, None, None]

    def among_states(self) -> Tensor:
        """(b, 1, 1, k + 1, k + 1) whether two states are of one."""
        own = self.of_states
        return (own.unsqueeze(-1) == own.unsqueeze(-2))[:, None, None]

    def of_state_before(self) -> Tensor:
        """(b, k, 1, 1, q) whether a token is of that of the state before its chunk."""
        return (self.of_tokens == self.of_states[:, :-1, None])[:, :, None, None]

    def of_state_after(self) -> Tensor:
        """(b, k, 1, 1, q) whether a token is of that of the state after its chunk."""
        return (self.of_tokens == self.of_states[:, 1:, None])[:, :, None, None]


def _decay_between(sums: Tensor, allowed: Tensor | None) -> Tensor:
    """(..., i, j) exp of sums_i - sums_j for j <= i, where allowed; otherwise 0. sums: (..., i) of
    logarithms."""
    size = sums.shape[-1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=sums.device).tril()
    kept = earlier if allowed is None else earlier & allowed
    difference = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    return torch.exp(difference.masked_fill(~kept, float("-inf")))


def _within_chunks(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, places: _Documents | None
) -> Tensor:
    """(b, k, q, g, r, p) fp32: what tokens of the same chunk wrote, as attention without a
    softmax."""
    scores = (c @ b.transpose(-1, -2)).float().unsqueeze(3)  # (b, k, g, 1, q, q)
    between = _decay_between(decay, None if places is None else places.among_tokens())
    weights = (scores * between * dt.unsqueeze(-2)).to(x.dtype)
    return (weights @ x.permute(0, 1, 3, 4, 2, 5)).permute(0, 1, 4, 2, 3, 5).float()


def _written_states(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, places: _Documents | None
) -> Tensor:
    """(b, k, g, r, p, n) fp32: what the tokens of a chunk add to the state after it."""
    left = torch.exp(decay[..., -1:] - decay) * dt  # (b, k, g, r, q)
    if places is not None:
        left = left * places.of_state_after()
    weighted = (x * left.permute(0, 1, 4, 2, 3).unsqueeze(-1)).to(x.dtype)
    rows = weighted.permute(0, 1, 3, 4, 5, 2).flatten(3, 4)  # (b, k, g, r p, q)
    written: Tensor = (rows @ b).float().unflatten(3, x.shape[-2:])
    return written


def _passed_states(
    written: Tensor, total: Tensor, state: Tensor | None, places: _Documents | None
) -> Tensor:
    """(b, k + 1, g, r, p, n) fp32: the state before each chunk, and behind the last.

    written: (b, k, g, r, p, n) of each chunk alone. total: (b, k, g, r) logarithm of its decay."""
    first = torch.zeros_like(written[:, 0]) if state is None else state
    every = torch.cat((first.unsqueeze(1), written), dim=1)
    sums = functional.pad(total.permute(0, 2, 3, 1).cumsum(dim=-1), (1, 0))  # (b, g, r, k + 1)
    between = _decay_between(sums, None if places is None else places.among_states())
    flat = every.flatten(4).permute(0, 2, 3, 1, 4)  # (b, g, r, k + 1, p n)
    passed: Tensor = (between @ flat).permute(0, 3, 1, 2, 4).unflatten(4, written.shape[-2:])
    return passed


def _from_states(before: Tensor, decay: Tensor, c: Tensor, places: _Documents | None) -> Tensor:
    """(b, k, q, g, r, p) fp32: what the state before a chunk says to its tokens."""
    read = c @ before.flatten(3, 4).transpose(-1, -2)  # (b, k, g, q, r p)
    left = torch.exp(decay)
    if places is not None:
        left = left * places.of_state_before()
    heads: Tensor = read.unflatten(-1, before.shape[3:5]).transpose(2, 3)  # (b, k, q, g, r, p)
    return heads.float() * left.permute(0, 1, 4, 2, 3).unsqueeze(-1)
