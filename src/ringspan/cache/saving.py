"""A cache on disk, and back onto any number of ranks.

Every rank writes what it holds with torch.distributed.checkpoint, block by block and as it is stored, into a folder of
its own, so it does not matter what carries the group's messages. `cache.json` says which rank has which token; it is
written last, so a folder that has it is complete. Loading deals the tokens anew to the ranks there are; each of them
reads the blocks in which some of its tokens lie, one at a time.
"""

import itertools
import json
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringspan.cache.placement import Placement
from ringspan.cache.state import CacheState
from ringspan.cache.turn import Turn
from ringspan.errors import CacheError
from ringspan.runtime.contract import Signature
from ringspan.span import Positions, Span

_INDEX = "cache.json"
_VERSION = 1


def save(state: CacheState, folder: Path) -> None:
    """Write the committed tokens; all ranks must, into one folder that all can reach."""
    with state.session.call() as call:
        if state.rank == 0:
            (folder / _INDEX).unlink(missing_ok=True)  # what was saved there before is no longer complete
        call.agree(signature(state, "save", folder), once=True)
    with state.session.call() as call:
        _write(state, folder / f"rank-{state.rank}")
        call.agree(signature(state, "write the index of", folder), once=True)
    with state.session.call() as call:
        if state.rank == 0:
            _write_index(state, folder)
        call.agree(signature(state, "have saved", folder), once=True)


def _write(state: CacheState, mine: Path) -> None:
    """This rank's tokens."""
    mine.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {}
    blocks: dict[int, list[int]] = {}
    for sequence, placement in state.placements.items():
        stored, count = state.stored[sequence], placement.counts[state.rank]
        blocks[sequence] = [start for start in stored.starts if start < count]
        for start, views in stored.all_layers(count):
            tensors |= {_key(sequence, start, i): x.contiguous() for i, x in enumerate(views)}
    if tensors:
        from torch.distributed.checkpoint.state_dict_saver import save as save_tensors  # slow to import

        with _alone():
            save_tensors(tensors, checkpoint_id=mine, no_dist=True)
    (mine / "blocks.json").write_text(json.dumps(blocks))


def _write_index(state: CacheState, folder: Path) -> None:
    """Who has which token."""
    index = {
        "version": _VERSION,
        "cache": state.contents,
        "world_size": state.world_size,
        "placements": {
            sequence: [[(span.start, span.stop, span.step) for span in spans] for spans in placement.spans]
            for sequence, placement in state.placements.items()
        },
    }
    (folder / _INDEX).write_text(json.dumps(index))


def read_index(state: CacheState, folder: Path) -> dict[int, Placement]:
    """Where the tokens lie in a folder; refused if it is not of a cache like this one."""
    try:
        index = json.loads((folder / _INDEX).read_text())
    except (OSError, ValueError) as error:
        raise CacheError(f"folder={str(folder)!r}: there is no complete cache in it ({error})") from None
    if index.get("version") != _VERSION:
        raise CacheError(f"folder={str(folder)!r}: its version is {index.get('version')}; this one reads {_VERSION}")
    if index["cache"] != state.contents:
        raise CacheError(f"folder={str(folder)!r} has a cache of {index['cache']}; this one is of {state.contents}")
    return {
        int(sequence): Placement(tuple(tuple(Span(*span) for span in spans) for spans in ranks))
        for sequence, ranks in index["placements"].items()
    }


def fill(turn: Turn, folder: Path, saved: Mapping[int, Placement]) -> None:
    """Read this rank's new tokens of a turn from the folder, all layers of them."""
    state = turn.state
    for old_rank in range(len(next(iter(saved.values())).spans)):
        source = folder / f"rank-{old_rank}"
        blocks = json.loads((source / "blocks.json").read_text())
        for part in turn.parts:
            wanted = part.after.positions(state.rank)
            held = saved[part.sequence].positions(old_rank)
            starts = blocks.get(str(part.sequence), [])
            for start, stop in itertools.pairwise([*starts, len(held)]):
                common, theirs, mine = np.intersect1d(held[start:stop], wanted, return_indices=True)
                if len(common):
                    rows = _read_block(state, source, part.sequence, start, stop)
                    _take(turn, part.sequence, rows, theirs, mine)
    turn.layers_done.update(dict.fromkeys(range(state.model.num_layers)))


def signature(state: CacheState, what: str, folder: Path) -> Signature:
    """The ranks are at the same point, with the same history."""
    return Signature.of({"call": what, "cache": state.description, "history": state.history, "folder": folder.name})


_LOCK = threading.Lock()


@contextmanager
def _alone() -> Iterator[None]:
    """Without warnings that each rank writes for itself, and over what was there, as is meant; ranks may be threads."""
    with _LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield


def _key(sequence: int, start: int, i: int) -> str:
    return f"{sequence}.{start}.{i}"


def _read_block(state: CacheState, source: Path, sequence: int, start: int, stop: int) -> list[torch.Tensor]:
    layers, heads, dims, dtypes, _ = state.spec
    rows = {
        _key(sequence, start, i): torch.empty(layers, heads, stop - start, dim, dtype=dtype, device="cpu")
        for i, (dim, dtype) in enumerate(zip(dims, dtypes, strict=True))
    }
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors  # slow to import

    with _alone():
        load_tensors(rows, checkpoint_id=source, no_dist=True)
    return list(rows.values())


def _take(turn: Turn, sequence: int, rows: list[torch.Tensor], theirs: Positions, mine: Positions) -> None:
    """Put rows where they belong on this rank, block by block."""
    stored = turn.state.stored[sequence]
    for start, views in stored.all_layers(stored.capacity):
        inside = (mine >= start) & (mine < start + views[0].shape[2])
        if inside.any():
            to = torch.from_numpy(mine[inside] - start).to(views[0].device)
            for view, x in zip(views, rows, strict=True):
                view[:, :, to] = x[:, :, torch.from_numpy(theirs[inside])].to(view.device)
