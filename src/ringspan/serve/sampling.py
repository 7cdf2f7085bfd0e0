"""Which token comes next? Rank 0 decides and sends it, so that seeds and ties cannot make ranks differ."""

from typing import NamedTuple

import torch


class Likely(NamedTuple):
    """A token and its log-probability."""

    token: int
    logprob: float


class Sampler:
    """The choice of tokens for one request.

    Args:
        temperature: 0 takes the most likely token.
        top_p: Only the most likely tokens that together reach this probability are chosen from.
        seed: The same seed and prompt give the same tokens.
    """

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        self._temperature = temperature
        self._top_p = top_p
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: torch.Tensor) -> int:
        """A token, from logits (vocabulary,)."""
        if self._temperature == 0:
            return int(logits.argmax())
        logits = logits.double()
        # Without the difference, dividing by a very small temperature would overflow.
        shares = torch.softmax((logits - logits.max()) / self._temperature, -1)
        values, order = shares.sort(descending=True, stable=True)
        before = values.cumsum(0) - values
        before[0] = -1.0  # one token is always left
        values[before >= self._top_p] = 0
        return int(order[torch.multinomial(values, 1, generator=self._generator)])


def most_likely(logits: torch.Tensor, token: int, count: int) -> list[Likely]:
    """The token itself, then the `count` most likely ones, by the model's own probabilities."""
    logprobs = torch.log_softmax(logits.double(), -1)
    top = torch.topk(logprobs, min(count, len(logprobs))).indices.tolist() if count else []
    return [Likely(each, float(logprobs[each])) for each in (token, *top)]
