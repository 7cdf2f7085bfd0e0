"""A conversation of three turns with a small model whose KV cache is spread over several ranks.

The turns are a long document, a question about it and a follow-up. Each turn prefills its new tokens against the cache,
then decodes an answer token by token. The tokens equal those of one device.

    python examples/conversation.py [--ranks 2]
"""

import argparse
from typing import Any

import torch
from torch import nn

import ringspan as rs

VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 2, 4, 2, 32
WIDTH = HEADS * HEAD_DIM
TURNS = {"a long document": 1500, "a question": 24, "a follow-up": 9}  # new tokens
ANSWER = 8  # tokens


class Layer(nn.Module):
    """Attention and an MLP; only the call of attention depends on the ranks."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.to_q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.to_kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.to_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.forward_part = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, turn: rs.Turn) -> torch.Tensor:
        """Compute this rank's new tokens, x (rows, WIDTH)."""
        y = self.norm(x)
        q = rotate(heads_of(self.to_q(y)), turn.positions)
        k, v = heads_of(self.to_kv(y)).chunk(2, dim=1)
        out = turn.prefill(q, rotate(k, turn.positions), v, layer=self.number)
        x = x + self.to_out(out[0].transpose(0, 1).flatten(1))
        return x + self.forward_part(x)


class Model(nn.Module):
    """A decoder with random weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def next_token(self, tokens: torch.Tensor, turn: rs.Turn, group: Any) -> int:
        """Return the most likely next token; the new tokens are whole on every rank, which computes its rows."""
        x = self.embedding(turn.layout.shard(tokens, group.rank, 0))
        for layer in self.layers:
            x = layer(x, turn)
        last = rs.gather(x, turn.layout, group, dim=0)[-1]
        return int(self.head(last).argmax())


def heads_of(x: torch.Tensor) -> torch.Tensor:
    """Reshape (rows, heads · HEAD_DIM) to (1, heads, rows, HEAD_DIM)."""
    return x.unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)[None]


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding by the positions of the tokens in their sequence."""
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    a, b = x[..., ::2], x[..., 1::2]
    turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    return torch.stack(turned, -1).flatten(-2)


@torch.no_grad()
def converse(group: Any, prompts: dict[str, torch.Tensor], model: Model) -> tuple[list[int], list[str]]:
    """Return the tokens of all answers, and a report."""
    cache = rs.KVCache(num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, group=group)
    said: list[int] = []
    told: list[str] = []
    for name, prompt in prompts.items():
        with cache.begin([len(prompt)]) as turn:
            said.append(model.next_token(prompt, turn, group))
            told.append(f"{name}: {len(prompt)} new tokens after {turn.parts[0].start}\n  {turn.reason}")
        for _ in range(ANSWER):
            with cache.begin([1], query="replicated") as turn:
                said.append(model.next_token(torch.tensor(said[-1:]), turn, group))
        told.append(f"  answered {said[-ANSWER - 1 :]}\n  {turn.reason}")
    told.append(f"cached: {cache.lengths[0]} tokens, by rank {cache.balance()[0]}")
    return said, told


def main() -> None:
    """Converse on several ranks and on one, and compare the tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: give 1 or more")
    model = Model()
    generator = torch.Generator().manual_seed(1)
    prompts = {name: torch.randint(VOCABULARY, (n,), generator=generator) for name, n in TURNS.items()}
    answers = rs.run_in_process(lambda group: converse(group, prompts, model), args.ranks)
    print("\n".join(answers[0][1]))
    [(alone, _)] = rs.run_in_process(lambda group: converse(group, prompts, model), 1)
    is_same = all(said == alone for said, _ in answers)
    print(f"tokens on {args.ranks} ranks and on one device: {'the same' if is_same else 'DIFFERENT'}")
    raise SystemExit(not is_same)


if __name__ == "__main__":
    main()
