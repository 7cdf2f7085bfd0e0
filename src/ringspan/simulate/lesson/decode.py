"""Token by token: is every decode step right, and does the cache stay balanced?

Decode runs in two ways. One sequence with a replicated query: each rank attends its part of the cache, and one merge
leaves the result on all ranks. A batch of sequences with sharded queries: the queries travel around the ring. The
sequences of the batch are documents on one axis of positions, so that each has its own new position and rank.

New tokens are dealt round-robin: the i-th new token of sequence b goes to rank (b + i) mod P (arXiv 2411.01783,
algorithm 4).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ringspan.algorithms import Query, build_decode
from ringspan.layout import Layout
from ringspan.mask import Mask, documents
from ringspan.schedule import format_schedule, visible_blocks
from ringspan.simulate._simulator import Simulation, bytes_sent, simulate_attention
from ringspan.simulate.lesson.dense import Check, check, dense_attention
from ringspan.simulate.lesson.prefill import Tokens
from ringspan.simulate.lesson.settings import LessonSettings
from ringspan.span import Span

MOST_STEPS = 8
MOST_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One new token per sequence: its rank, the cache per rank afterwards, and the error of the result."""

    step: int
    new_token_ranks: tuple[int, ...]  # by sequence
    cache_tokens_per_rank: tuple[int, ...]
    sent_bytes: int
    check: Check


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Consecutive decode steps. `grid` is the schedule of the first step."""

    query: Query
    mask: str
    num_sequences: int
    prompt_tokens: int  # of each sequence
    grid: str
    steps: tuple[DecodeStep, ...]
    unrotated_cache_tokens_per_rank: tuple[int, ...]  # after the last step, if each sequence stayed on its first rank


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode in both ways; a single sequence whose documents end with the prompt has no next token."""

    one_sequence: DecodeRun | None
    batch: DecodeRun


def run_decode(settings: LessonSettings, tokens: Tokens, rng: np.random.Generator) -> Decode:
    """Decode a few tokens after the prefilled `tokens`, then after a batch of shorter sequences."""
    runs = {query: _run(batch, all_tokens, query) for query, batch, all_tokens in _list_batches(settings, tokens, rng)}
    return Decode(runs.get("replicated"), runs["sharded"])


def first_decode_steps(settings: LessonSettings, tokens: Tokens, rng: np.random.Generator) -> dict[Query, Simulation]:
    """Simulate the first step of each way in which `run_decode` decodes."""
    batches = _list_batches(settings, tokens, rng)
    return {query: _simulate(batch, all_tokens, 0, query) for query, batch, all_tokens in batches}


def _list_batches(
    settings: LessonSettings, tokens: Tokens, rng: np.random.Generator
) -> Iterator[tuple[Query, "_DecodeBatch", Tokens]]:
    """The single sequence, if it has a next token, and the batch; each with all its tokens."""
    num_steps = min(max(settings.world_size, 4), MOST_STEPS)
    num_next = min(num_steps, settings.mask.num_positions - settings.seq_len)
    if num_next:
        grown = tokens.then(Tokens.random(settings, num_next, rng))
        yield "replicated", _DecodeBatch(settings, settings.mask, 1, settings.seq_len, num_next), grown
    num_sequences = min(settings.world_size, MOST_SEQUENCES)
    prompt = max(1, settings.seq_len // num_sequences)
    mask = documents([prompt + num_steps] * num_sequences)
    batch = _DecodeBatch(settings, mask, num_sequences, prompt, num_steps)
    yield "sharded", batch, Tokens.random(settings, num_sequences * (prompt + num_steps), rng)


@dataclass(frozen=True, slots=True)
class _DecodeBatch:
    """The positions of a batch: sequence b begins at b · (prompt + num_steps)."""

    settings: LessonSettings
    mask: Mask
    num_sequences: int
    prompt: int
    num_steps: int

    def new_position(self, sequence: int, step: int) -> int:
        return sequence * (self.prompt + self.num_steps) + self.prompt + step

    def new_rank(self, sequence: int, step: int) -> int:
        return (sequence + step) % self.settings.world_size

    def cache_layout(self, num_new: int) -> Layout:
        """Lay out the prompts by the settings and the first num_new tokens of each sequence round-robin."""
        spans: list[list[Span]] = [[] for _ in range(self.settings.world_size)]
        for sequence in range(self.num_sequences):
            start = self.new_position(sequence, 0) - self.prompt
            prompt = self.settings.layout.build(self.mask, self.prompt, self.settings.world_size, start=start)
            for rank, of_rank in enumerate(prompt.spans_by_rank):
                # Prompts that do not divide evenly begin on different ranks, or rank 0 would get the most tokens.
                spans[(rank + sequence) % self.settings.world_size] += of_rank
            for step in range(num_new):
                spans[self.new_rank(sequence, step)].append(_one(self.new_position(sequence, step)))
        return Layout(tuple(map(tuple, spans)))

    def query_layout(self, step: int, query: Query) -> Layout:
        """Lay out the new tokens of a step: on all ranks, or each on the rank that holds its keys."""
        new = [(self.new_rank(b, step), _one(self.new_position(b, step))) for b in range(self.num_sequences)]
        ranks = range(self.settings.world_size)
        if query == "replicated":
            return Layout(tuple(() for _ in ranks), replicated=tuple(span for _, span in new))
        return Layout(tuple(tuple(span for owner, span in new if owner == rank) for rank in ranks))


def _run(batch: _DecodeBatch, tokens: Tokens, query: Query) -> DecodeRun:
    done = [_simulate(batch, tokens, step, query) for step in range(batch.num_steps)]
    unrotated = np.array(_held(batch.cache_layout(0)))
    for sequence in range(batch.num_sequences):
        unrotated[batch.new_rank(sequence, 0)] += batch.num_steps
    return DecodeRun(
        query=query,
        mask=repr(batch.mask),
        num_sequences=batch.num_sequences,
        prompt_tokens=batch.prompt,
        grid=format_schedule(done[0].schedule),
        steps=tuple(_step(batch, step, simulation) for step, simulation in enumerate(done)),
        unrotated_cache_tokens_per_rank=tuple(unrotated.tolist()),
    )


def _simulate(batch: _DecodeBatch, tokens: Tokens, step: int, query: Query) -> Simulation:
    """Attend the new queries to the cache, which already holds their own keys."""
    layout, kv_layout = batch.query_layout(step, query), batch.cache_layout(step + 1)
    new, cached = layout.all_positions(), kv_layout.all_positions()
    schedule = build_decode(visible_blocks(batch.mask, layout, kv_layout), query=query)
    q, k, v = tokens.q[:, new], tokens.k[:, cached], tokens.v[:, cached]
    return simulate_attention(q, k, v, mask=batch.mask, layout=layout, kv_layout=kv_layout, algorithm=schedule)


def _step(batch: _DecodeBatch, step: int, simulation: Simulation) -> DecodeStep:
    case = simulation.case
    q_positions, kv_positions = case.problem.layout.all_positions(), case.problem.kv_layout.all_positions()
    truth = dense_attention(case.q, case.k, case.v, batch.mask, q_positions, kv_positions, np.float64)
    return DecodeStep(
        step=step,
        new_token_ranks=tuple(batch.new_rank(sequence, step) for sequence in range(batch.num_sequences)),
        cache_tokens_per_rank=_held(case.problem.kv_layout),
        sent_bytes=bytes_sent(simulation.trace),
        check=check(simulation.out, simulation.lse, *truth),
    )


def _held(layout: Layout) -> tuple[int, ...]:
    return tuple(layout.shard_len(rank) for rank in range(layout.world_size))


def _one(position: int) -> Span:
    return Span(position, position + 1)
