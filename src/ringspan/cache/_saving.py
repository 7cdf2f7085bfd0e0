"""How is a cache saved to disk, and loaded onto any number of ranks?

Every rank writes the tokens it holds into a new data folder beside the old one. When all of them have, rank 0 makes the
index name that folder, by a rename; so at any instant the folder has the old cache or the new one, whole. Loading deals
the tokens anew to the ranks there are; each of them reads and checks the blocks in which some of its tokens lie.
"""

import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.arguments import LIST, PATH, check_arguments, optional
from ringspan.cache._arguments import by_sequence
from ringspan.cache._placement import Placement
from ringspan.cache._saved_files import (
    RankFile,
    SavedBlock,
    SavedIndex,
    check_coverage,
    checksum,
    read_blocks,
    read_index,
    write_index,
    write_rank,
)
from ringspan.cache._state import CacheState
from ringspan.cache._turn import Turn
from ringspan.errors import CacheError
from ringspan.runtime.contract import Signature
from ringspan.span import Positions

_CHECKSUM = struct.Struct("<I")


def save(state: CacheState, folder: str | Path, sequences: Sequence[int] | None) -> None:
    """Write committed tokens into a folder that all ranks can reach; a collective call."""
    with state.session.call() as call:
        state.refuse_during_turn("save")
        check_arguments(folder=(PATH, folder), sequences=(optional(LIST), sequences))
        chosen = [*state.placements] if sequences is None else [*sequences]
        _check_known("sequences", chosen, state.placements)
        placements = {sequence: state.placements[sequence] for sequence in chosen}
        folder = Path(folder)
        call.agree(signature(state, "save", folder), once=True)
        name = f"data-{_gather(state, secrets.token_bytes(8))[0].hex()}"
    with state.session.call() as call:
        written = _write(state, placements, folder / name)
        call.agree(signature(state, "write the index of", folder), once=True)
        checksums = tuple(_CHECKSUM.unpack(each)[0] for each in _gather(state, _CHECKSUM.pack(written)))
    with state.session.call() as call:
        if state.rank == 0:
            write_index(folder, state.contents, SavedIndex(name, placements, checksums))
            _remove_older(folder, name)
        call.agree(signature(state, "have saved", folder), once=True)


def load(state: CacheState, begin: Callable[..., Turn], folder: str | Path, numbers: Mapping[int, int] | None) -> None:
    """Deal saved sequences to the ranks; `numbers` renames the saved sequences."""
    with state.session.call() as call:
        state.refuse_during_turn("load")
        check_arguments(folder=(PATH, folder))
        folder = Path(folder)
        index = _read_saved(state, folder)
        saved = {sequence: placement.length for sequence, placement in index.placements.items() if placement.length}
        numbers = {sequence: sequence for sequence in saved} if numbers is None else by_sequence("numbers", numbers, 0)
        _check_known("numbers", numbers, saved)
        taken = sorted({*numbers.values()} & {*state.placements})
        if taken or len({*numbers.values()}) < len(numbers):
            raise CacheError(
                f"load into a cache that has sequences {[*state.placements]}, under the numbers {[*numbers.values()]}",
                remedy="drop them first, or give numbers that are not in use, each once",
            )
        call.agree(signature(state, "load", folder), once=True)
    if not numbers:
        return
    lengths = {number: saved[sequence] for sequence, number in numbers.items()}
    with begin(lengths, algorithm=DEFAULT_ALGORITHM) as turn, turn.step() as call:
        _fill(turn, folder, index, {number: sequence for sequence, number in numbers.items()})
        call.agree(signature(state, "loaded", folder), once=True)


def _check_known(argument: str, given: Iterable[int], known: Mapping[int, object]) -> None:
    for sequence in given:
        if sequence not in known:
            raise CacheError(
                f"there are sequences {', '.join(map(str, known)) or 'none'}",
                argument=argument,
                value=sequence,
                remedy="use one of them",
            )


def _read_saved(state: CacheState, folder: Path) -> SavedIndex:
    """Read the index of a folder; CacheError unless its tokens fit this cache."""
    index = read_index(folder, state.contents)
    for rank in range(len(index.checksums)):
        read_blocks(folder, index, rank, state.spec)
    check_coverage(folder, index)
    return index


def _fill(turn: Turn, folder: Path, index: SavedIndex, saved: Mapping[int, int]) -> None:
    """Read this rank's new tokens of a turn, all layers of them; `saved` gives the saved number of each sequence."""
    state = turn.state
    num_read = 0
    for old_rank in range(len(index.checksums)):
        blocks = read_blocks(folder, index, old_rank, state.spec)
        source = RankFile(folder, index, old_rank, state.spec)
        for part in turn.parts:
            wanted = part.after.positions(state.rank)
            old = saved[part.sequence]
            held = index.placements[old].positions(old_rank)
            for block in blocks.get(old, ()):
                common, theirs, mine = np.intersect1d(held[block.start : block.stop], wanted, return_indices=True)
                if len(common):
                    _take(turn, part.sequence, source.rows(old, block), theirs, mine)
                    num_read += len(common)
    num_wanted = sum(part.after.counts[state.rank] for part in turn.parts)
    if num_read != num_wanted:
        raise CacheError(f"{num_wanted - num_read} tokens are missing", argument="folder", value=str(folder))
    turn.layers_done.update(dict.fromkeys(range(state.model.num_layers)))


def signature(state: CacheState, what: str, folder: Path) -> Signature:
    """Return the signature by which ranks agree that they are at the same point with the same history."""
    return Signature.of({"call": what, "cache": state.description, "history": state.history, "folder": folder.name})


def _gather(state: CacheState, mine: bytes) -> list[bytes]:
    transport = state.session.transport
    return [mine] if state.world_size == 1 else transport.all_gather_bytes(mine, None)


def _write(state: CacheState, placements: Mapping[int, Placement], data: Path) -> int:
    """Write this rank's tokens and return the checksum; a failure leaves no file behind."""
    data.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    blocks: dict[int, tuple[SavedBlock, ...]] = {}
    try:
        for sequence, placement in placements.items():
            of_sequence = []
            for start, views in state.stored[sequence].all_layers(placement.counts[state.rank]):
                rows = [x.cpu().contiguous() for x in views]
                block = SavedBlock(start, start + rows[0].shape[2], tuple(map(checksum, rows)))
                tensors |= {block.key(sequence, i): x for i, x in enumerate(rows)}
                of_sequence.append(block)
            blocks[sequence] = tuple(of_sequence)
        return write_rank(data, state.rank, tensors, blocks)
    except BaseException:
        # No rank has agreed to go on without this one, so no index names these files.
        for path in data.glob(f"rank-{state.rank}.*"):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            data.rmdir()  # if no other rank has written to it
        raise


def _remove_older(folder: Path, kept: str) -> None:
    """Remove the data of earlier saves and of interrupted ones."""
    for path in [*folder.glob("data-*"), *folder.glob("cache.json.data-*")]:
        if path.name != kept:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _take(turn: Turn, sequence: int, rows: list[torch.Tensor], theirs: Positions, mine: Positions) -> None:
    """Put rows where they belong on this rank, block by block."""
    stored = turn.state.stored[sequence]
    for start, views in stored.all_layers(stored.capacity):
        inside = (mine >= start) & (mine < start + views[0].shape[2])
        if inside.any():
            to = torch.from_numpy(mine[inside] - start).to(views[0].device)
            for view, x in zip(views, rows, strict=True):
                view[:, :, to] = x[:, :, torch.from_numpy(theirs[inside])].to(view.device)
