"""Three ways to run the same decoder: in one process, on ranks, and the ideal that ranks could reach.

One process is plain PyTorch and knows nothing of this library, so it is what the ranks are held to as well. The ranks
make the calls a user would make. In the ideal every rank works on its own tokens and computes the pieces that its own
programs give it; nothing is sent, merged or stored, so its results mean nothing.

In float32 and float64 the results of one process are the right ones. Half types round at every step, so there both are
held to one process with the same weights in float32, and ranks may be twice as far off as one process is.
"""

import copy
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from ringspan.algorithms.choose import KV_RING
from ringspan.bench.baselines import Inputs, Operands, attend_pieces, largest_error, own_pieces
from ringspan.bench.decoder import VOCABULARY, Attend, Decoder
from ringspan.bench.group import sum_over_ranks
from ringspan.bench.result import ANSWER, ResultCheck
from ringspan.bench.settings import DTYPES, TransformerSettings
from ringspan.cache import KVCache
from ringspan.kernels.base import Kernel
from ringspan.layout import Layout
from ringspan.mask import causal
from ringspan.program.prepare import ProgramOptions, prepare
from ringspan.program.problem import Problem, Shapes
from ringspan.runtime.api import attention
from ringspan.runtime.session import session_of
from ringspan.schedule import Heads
from ringspan.training import cross_rank_mean_loss, position_ids, shard_batch

ALGORITHM = KV_RING  # of what is new to the cache K and V are never more than queries and results
Wrap = Callable[[Attend], Attend]


class Trained(NamedTuple):
    """A training step without its update: the loss, and the gradients of all weights."""

    loss: torch.Tensor
    gradients: list[torch.Tensor]


def _differentiate(loss: torch.Tensor, model: Decoder) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _unwrapped(attend: Attend) -> Attend:
    return attend


class OneProcess:
    """The whole model in one process, with PyTorch's own attention."""

    def __init__(self, settings: TransformerSettings, model: Decoder, tokens: torch.Tensor) -> None:
        self.settings = settings
        self.model = model
        self.tokens = tokens
        self.positions = torch.arange(settings.seq_len)
        self._cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._length = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values, including room for the answer."""
        return sum(k.nbytes + v.nbytes for k, v in self._cache)

    @torch.no_grad()
    def prefill(self) -> torch.Tensor:
        """The logits (batch, vocabulary) after each sequence; keys and values are kept."""
        self._cache, self._length = [], self.settings.seq_len
        hidden = self.model(self.tokens, self.positions, self._attend_new)
        return self.model.logits(hidden[:, -1])

    @torch.no_grad()
    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits (batch, vocabulary) after one more token (batch,) of each sequence."""
        self._length += 1
        hidden = self.model(tokens[:, None], torch.tensor([self._length - 1]), self._attend_one)
        return self.model.logits(hidden[:, -1])

    def train(self, at_turn: Callable[[], None] = lambda: None) -> Trained:
        """A training step: the mean loss over tokens with a next one. `at_turn` is called before the backward pass."""
        hidden = self.model(self.tokens, self.positions, self._attend)
        logits = self.model.logits(hidden)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), self.tokens[:, 1:].flatten())
        at_turn()
        return Trained(loss.detach(), _differentiate(loss, self.model))

    def _attend(self, _: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _sdpa(q, k, v, is_causal=True)

    def _attend_new(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, heads, seq_len, head_dim = k.shape
        room = [k.new_empty(batch, heads, seq_len + ANSWER, head_dim) for _ in range(2)]
        for stored, x in zip(room, (k, v), strict=True):
            stored[:, :, :seq_len] = x
        self._cache.append((room[0], room[1]))
        return self._attend(layer, q, k, v)

    def _attend_one(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for stored, x in zip(self._cache[layer], (k, v), strict=True):
            stored[:, :, self._length - 1 : self._length] = x
        keys, values = (x[:, :, : self._length] for x in self._cache[layer])
        return _sdpa(q, keys, values, is_causal=False)


class OnRanks:
    """This rank's part, through the public calls. `wrap` may wrap attention, for example to record it."""

    def __init__(
        self, settings: TransformerSettings, model: Decoder, tokens: torch.Tensor, layout: Layout, group: Any
    ) -> None:
        self.settings = settings
        self.model = model
        self.tokens = tokens
        self.layout = layout
        self.group = group
        self._cache: KVCache | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values on this rank, including room for more."""
        assert self._cache is not None
        return self._cache.nbytes

    @torch.no_grad()
    def prefill(self, wrap: Wrap = _unwrapped) -> torch.Tensor:
        """The logits (batch, vocabulary) after each sequence, on every rank."""
        s = self.settings
        self._cache = KVCache(
            num_layers=s.layers,
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            dtype=getattr(torch, s.dtype),
            kernel=s.kernel,
            device=self.tokens.device,
            group=self.group,
        )
        with self._cache.begin([s.seq_len] * s.batch, algorithm=ALGORITHM) as turn:
            transport = session_of(self.group).transport
            own = turn.layout.shard(self.tokens.view(1, -1), transport.rank, 1)
            hidden = self.model(own, turn.positions, wrap(_of_turn(turn.prefill)))[0]
            # The rank that holds the last token of a sequence sends its logits to the others.
            lasts = np.arange(1, s.batch + 1) * s.seq_len - 1
            rows = {int(position): row for row, position in enumerate(turn.layout.positions(transport.rank))}
            logits = torch.zeros(s.batch, VOCABULARY, dtype=torch.float64, device=own.device)
            for sequence, last in enumerate(lasts.tolist()):
                if last in rows:
                    logits[sequence] = self.model.logits(hidden[rows[last]])
            return sum_over_ranks(transport, [logits], s.timeout_s)[0]

    @torch.no_grad()
    def decode(self, tokens: torch.Tensor, wrap: Wrap = _unwrapped) -> torch.Tensor:
        """The logits (batch, vocabulary) after one more token (batch,) of each sequence, on every rank."""
        assert self._cache is not None
        with self._cache.begin([1] * self.settings.batch, query="replicated") as turn:
            hidden = self.model(tokens[:, None], turn.positions[:1], wrap(_of_turn(turn.decode)))
            return self.model.logits(hidden[:, -1])

    def train(self, wrap: Wrap = _unwrapped, at_turn: Callable[[], None] = lambda: None) -> Trained:
        """A training step: the mean loss over the labels of all ranks; gradients are summed over the ranks."""
        s = self.settings
        batch = shard_batch({"input_ids": self.tokens}, self.layout, self.group)

        def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = attention(
                q,
                k,
                v,
                mask=causal(),
                layout=self.layout,
                group=self.group,
                algorithm=ALGORITHM,
                kernel=s.kernel,
                timeout_s=s.timeout_s,
            )
            assert isinstance(out, torch.Tensor)
            return out

        hidden = self.model(batch["input_ids"], batch["position_ids"][0], wrap(attend))
        loss = cross_rank_mean_loss(_losses(self.model, hidden, batch["labels"]), batch["labels"], self.group)
        at_turn()
        gradients = _differentiate(loss, self.model)
        return Trained(loss.detach(), sum_over_ranks(session_of(self.group).transport, gradients, s.timeout_s))


class Ideal:
    """This rank's part without messages."""

    def __init__(self, ranks: OnRanks, kernel: Kernel) -> None:
        s, layout = ranks.settings, ranks.layout
        rank = session_of(ranks.group).transport.rank
        self.model = ranks.model
        self.batch = shard_batch({"input_ids": ranks.tokens}, layout, ranks.group)
        self.positions = position_ids(layout, ranks.group)
        self.kernel = kernel
        self.scale = s.head_dim**-0.5
        shapes = Shapes((s.batch,), Heads(s.num_heads, s.num_kv_heads), s.head_dim, s.head_dim, *DTYPES[s.dtype])
        problem = Problem(causal(), layout, layout, shapes)
        dtype, device = getattr(torch, s.dtype), ranks.tokens.device
        inputs = Inputs(
            *(
                torch.randn(s.batch, heads, layout.shard_len(rank), s.head_dim).to(device, dtype)
                for heads in (s.num_heads, s.num_kv_heads, s.num_kv_heads)
            )
        )
        self.pieces, self.gradient_pieces = (
            list(own_pieces(prepare(problem, rank, ALGORITHM, ProgramOptions(backward=side)), inputs))
            for side in (None, problem.lighter_side())
        )

    @torch.no_grad()
    def prefill(self) -> None:
        """Prefill; every rank computes logits, which is no less work than any rank has."""
        self.model.logits(self.model(self.batch["input_ids"], self.positions, self._attend)[:, -1])

    def train(self) -> None:
        """A training step whose gradients are not summed over ranks."""
        hidden = self.model(self.batch["input_ids"], self.positions, self._attend_and_back)
        _differentiate(_losses(self.model, hidden, self.batch["labels"]).mean(), self.model)

    def _attend(self, _: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        self.attend(self.pieces)
        return q

    def _attend_and_back(self, _: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _AttendPieces.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out

    def attend(self, pieces: Sequence[Operands]) -> None:
        """Run the kernel on every piece."""
        attend_pieces(self.kernel, self.scale, pieces)


class _AttendPieces(torch.autograd.Function):
    """The work of attention and of its gradients; the values are meaningless, the shapes are right."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, _: torch.Tensor, ideal: Ideal) -> torch.Tensor:
        ctx.ideal, ctx.num_kv_heads = ideal, k.shape[1]
        ideal.attend(ideal.pieces)
        return q.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.ideal.attend(ctx.ideal.gradient_pieces)
        of_kv = grads[0].narrow(1, 0, ctx.num_kv_heads)
        return grads[0], of_kv, of_kv, None


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """PyTorch's own attention; on a CPU in float32 or wider, like the kernels of the ranks."""
    dtype = q.dtype
    if q.device.type == "cpu":
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    has_groups = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=has_groups).to(dtype)


def _of_turn(call: Callable[..., Any]) -> Attend:
    return lambda layer, q, k, v: call(q, k, v, layer=layer)


def _losses(model: Decoder, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model.logits(hidden).transpose(1, 2), labels, reduction="none")


TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
TIMES = 2  # error allowed in a half type, relative to that of one process in the same type

Answer = list[torch.Tensor]
"""The logits (batch, vocabulary) after the prompts and after each token that follows."""


class Outcome(NamedTuple):
    """The results of one run of the model."""

    answer: Answer
    trained: Trained


class Checked(NamedTuple):
    """Errors of logits, loss and gradients, and how many of the tokens that the ranks chose are right."""

    checks: dict[str, ResultCheck]
    right_tokens: int
    num_tokens: int


def check_model(
    alone: OneProcess,
    given: Sequence[torch.Tensor],
    of_one_process: Outcome,
    of_ranks: Outcome,
    chosen: Sequence[Sequence[Sequence[int]]],
) -> Checked:
    """Compare the ranks with one process. `chosen` holds, for every rank, its likeliest token after each step."""
    dtype = alone.model.embedding.dtype
    name, exact = "one process", of_one_process
    tolerances = dict.fromkeys(_errors(exact, exact), TOLERANCE.get(dtype, 0.0))
    if dtype not in TOLERANCE:
        name, exact = "one process in float32", _in_float32(alone, given)
        tolerances = {what: TIMES * error for what, error in _errors(of_one_process, exact).items()}
        tolerances["loss"] = tolerances["logits"]  # the loss is a mean, which can be right by chance
    found = _errors(of_ranks, exact)
    checks = {
        what: ResultCheck(error if isfinite(error) else None, tolerances[what], name) for what, error in found.items()
    }
    tokens = [
        _is_likeliest(logits, sequence, token, tolerances["logits"])
        for of_rank in chosen
        for logits, row in zip(exact.answer, of_rank, strict=True)
        for sequence, token in enumerate(row)
    ]
    return Checked(checks, sum(tokens), len(tokens))


def _in_float32(alone: OneProcess, given: Sequence[torch.Tensor]) -> Outcome:
    wide = OneProcess(alone.settings, copy.deepcopy(alone.model).float(), alone.tokens)
    return Outcome([wide.prefill(), *(wide.decode(tokens) for tokens in given)], wide.train())


def _errors(found: Outcome, right: Outcome) -> dict[str, float]:
    """Errors of logits and loss are |difference| / max(1, |value|); those of gradients are relative to the largest."""
    (answer, trained), (right_answer, right_trained) = found, right
    gradients = zip(trained.gradients, right_trained.gradients, strict=True)
    scaled = [((x.double() - y.double()).abs().max() / y.double().abs().max()).item() for x, y in gradients]
    return {
        "logits": largest_error(torch.stack(answer), torch.stack(right_answer)).item(),
        "loss": largest_error(trained.loss, right_trained.loss).item(),
        "gradients": torch.tensor(scaled).max().item(),  # NaN if there is one
    }


def _is_likeliest(logits: torch.Tensor, sequence: int, token: int, tolerance: float) -> bool:
    """Two logits count as equal if they differ by less than the sum of their tolerances."""
    likeliest = logits[sequence].max().item()
    return logits[sequence, token].item() >= likeliest - 2 * tolerance * max(1.0, abs(likeliest))
