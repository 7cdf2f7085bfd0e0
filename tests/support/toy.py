"""The algorithm of `examples/pair_ring`, registered for the length of a test."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import ringspan as rs
from ringspan.algorithms import Algorithm

FOLDER = Path(__file__).parents[2] / "examples" / "pair_ring"


@cache
def load_record() -> Algorithm:
    """The record in the one file."""
    spec = importlib.util.spec_from_file_location("pair_ring", FOLDER / "pair_ring.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    record = module.PAIR_RING
    assert isinstance(record, Algorithm)
    return record


@contextmanager
def registered() -> Iterator[Algorithm]:
    """`pair_ring` is an algorithm, and afterwards it is none."""
    record = load_record()
    rs.algorithms.register(record)
    try:
        yield record
    finally:
        rs.algorithms.unregister(record.name)
