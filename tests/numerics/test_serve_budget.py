"""The book of rank 0 counts at least the memory that a cache really takes, on every rank."""

import itertools
import random

import pytest
import torch

import ringspan as rs
from ringspan.serve.slots import SlotBook

BYTES_PER_TOKEN = 2 * (4 + 4) * 4  # layers, k and v, float32


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_bound_holds_over_growing_and_cropping(world_size):
    def live(group):
        rng, fresh = random.Random(world_size), itertools.count()
        cache = rs.KVCache(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, group=group)
        book = SlotBook(world_size, BYTES_PER_TOKEN, 2**40)
        tokens, compared = [], []
        for _ in range(60):
            kept = tokens[: rng.randint(-(-len(tokens) // 2), len(tokens))]
            new = [next(fresh) for _ in range(rng.choice([1, 1, 2, 50, 700, 3000]))]
            tokens = kept + new
            place = book.place(tokens, len(tokens))
            assert place is not None
            slot, keep = place.slot, place.keep
            assert keep == len(kept)
            if cache.lengths:
                cache.truncate(0, keep)
            with cache.begin({0: len(new)}, query="replicated") as turn:
                rows = torch.zeros(1, 1, len(new), 4)
                for layer in range(2):
                    turn.store(rows, rows, layer=layer)
            book.extend(slot, new)
            book.release(slot)
            compared.append((cache.nbytes, book.nbytes))
        return compared

    for compared in rs.run_in_process(live, world_size, timeout_s=60):
        assert [pair for pair in compared if pair[0] > pair[1]] == []
        assert max(bound for _, bound in compared) < 2 * max(real for real, _ in compared)
