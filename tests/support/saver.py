"""A process that saves a cache over an earlier one and dies on the way: at the n-th thing it does to the folder."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import ringspan as rs
from ringspan.transports.in_process import InProcessRank

LENGTH, WORLD_SIZE = 24, 2
OPTIONS: dict[str, Any] = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4}
_OF_FILES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "os.listdir", "shutil.rmtree"}


def save(folder: Path, value: float, group: InProcessRank | None = None) -> None:
    """A cache in which every number is `value`."""
    cache = rs.KVCache(**OPTIONS, group=group)
    turn = cache.begin([LENGTH], algorithm="pass_kv")
    for _, views in cache._state.stored[0].all_layers(LENGTH):
        for x in views:
            x.fill_(value)
    turn.layers_done.update({0: None})
    turn.commit()
    cache.save(folder)


def load(folder: Path) -> set[float]:
    """The different numbers in the cache of a folder, which must be whole."""
    cache = rs.KVCache(**OPTIONS)
    cache.load(folder)
    assert cache.lengths == {0: LENGTH}
    return {v for _, views in cache._state.stored[0].all_layers(LENGTH) for x in views for v in x.flatten().tolist()}


def die_at(number: int, folder: str) -> None:
    lock, seen = threading.Lock(), [0]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event not in _OF_FILES or not str(args[0]).startswith(folder):
            return
        with lock:
            if seen[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen[0] += 1

    sys.addaudithook(watch)


def main(folder: str, value: float, number: int | None, after_s: float | None) -> None:
    """Save `value` on two ranks; die before operation `number`, or some time after the start."""
    torch.set_num_threads(1)
    if number is not None:
        die_at(number, folder)
    if after_s is not None:
        threading.Thread(
            target=lambda: (time.sleep(after_s), os.kill(os.getpid(), signal.SIGKILL)), daemon=True
        ).start()
    rs.run_in_process(lambda group: save(Path(folder), value, group), WORLD_SIZE)
