"""How does a rank keep sums whose bits must not depend on which rank computed which part?

Each tile's sum is kept as the unfinished nodes of a binary tree instead of a running total. `tree.py` defines the
order, `bind.py` works it out for a program; this file follows it.
"""

from ringspan.program.execute import Arithmetic, BlockSizes, RankState, Value
from ringspan.program.reproducible.bind import Growth
from ringspan.program.reproducible.grid import Cell, GridTile, Rise
from ringspan.program.reproducible.tree import TILE
from ringspan.schedule import Block, Transfer


class TreeState(RankState):
    """One rank's inputs and tree nodes while it runs a program of the reproducible mode."""

    def __init__(
        self, rank: int, sizes: BlockSizes, inputs: dict[Block, Value], arithmetic: Arithmetic, growth: Growth
    ) -> None:
        super().__init__(rank, sizes, inputs, arithmetic)
        self.growth = growth
        self.roots = {root.slot: root for root in growth.roots}
        self.nodes: dict[int, Value] = {}
        # Nodes of neighbouring tiles that are views of one value, which is joined faster than they are one by one.
        self.runs: dict[tuple[int, ...], Value] = {}
        self.run_of: dict[int, tuple[int, ...]] = {}

    def attend(self, tile: GridTile) -> None:
        """Compute the cells of a tile; each result is a leaf of its sums."""
        q, kv = self.input(tile.q), self.input(tile.kv)
        for cell in tile.cells:
            at_q, at_kv = _rows(q, cell.q), _rows(kv, cell.kv)
            if tile.q.kind == "q":
                self._rise_together(tile.sums[0], cell.rises, self._attend_cell(tile, cell, at_q, at_kv))
            else:
                leaves = self._differentiate_cell(tile, cell, at_q, at_kv)
                for block, rise, leaf in zip(tile.sums, cell.rises, leaves, strict=True):
                    self._rise(block, rise, leaf)

    def take(self, step: int, transfer: Transfer) -> Value:
        """The value a message carries: an input, or the nodes of a sum's part, one after the other."""
        if not transfer.block.is_sum:
            return super().take(step, transfer)
        leaving = self.growth.leaving[step, transfer]
        if len(leaving) == 1:
            return self._pop(leaving[0].slot)
        part = self._new(transfer.block, leaving[-1].rows.stop, self.nodes[leaving[0].slot])
        for _, rows, slot in leaving:
            _copy(self._pop(slot), _rows(part, rows))
        return part

    def add(self, step: int, transfer: Transfer, part: Value) -> bool:
        """Join the nodes of an arrived part with this rank's."""
        for rows, rise in self.growth.arriving[step, transfer]:
            node = self._new(transfer.block, rows.stop - rows.start, part)
            _copy(_rows(part, rows), node)
            self._rise(transfer.block, rise, node)
        return True

    def new_sum(self, block: Block) -> Value:
        """The arrays that the roots of a sum are copied into; they need no zeros if roots fill all rows."""
        if block in self.growth.complete:
            return self.arithmetic.room(self.sizes.block_shapes(block))
        return super().new_sum(block)

    def _attend_cell(self, tile: GridTile, cell: Cell, q: Value, kv: Value) -> Value:
        first, *others = cell.pieces
        height = cell.q.stop - cell.q.start
        if not others and first.rows is None and first.q.stop - first.q.start == height:
            return self.arithmetic.begin(first, q, kv)
        *lead, _ = q[0].shape
        out = self.arithmetic.new_sum(tile.sums[0], ((*lead, kv[1].shape[-1]), (*lead, 1)))
        for piece in cell.pieces:
            self.arithmetic.attend(piece, q, kv, out, False)
        return out

    def _differentiate_cell(self, tile: GridTile, cell: Cell, q_grad: Value, kv: Value) -> tuple[Value, Value]:
        first, *others = cell.pieces
        size = cell.q.stop - cell.q.start, cell.kv.stop - cell.kv.start
        if not others and first.rows is None and (first.q, first.kv) == (slice(0, size[0]), slice(0, size[1])):
            return self.arithmetic.attend_grad(first, q_grad, kv, None, None)
        dq = self.arithmetic.new_sum(tile.sums[0], (q_grad[0].shape,))
        dkv = self.arithmetic.new_sum(tile.sums[1], tuple(x.shape for x in kv))
        for piece in cell.pieces:
            self.arithmetic.attend_grad(piece, q_grad, kv, dq, dkv)
        return dq, dkv

    def _rise_together(self, block: Block, rises: tuple[Rise, ...], run: Value) -> None:
        """Join the new nodes of neighbouring tiles: together while their siblings are together, then one by one."""
        joined = 0
        for siblings in zip(*(rise.siblings for rise in rises), strict=False):
            slots = tuple(slot for slot, _ in siblings)
            if slots not in self.runs or len({is_left for _, is_left in siblings}) > 1:
                break
            other = self.runs[slots]
            for slot in slots:
                self._pop(slot)
            run = self._joined(block, run, other, siblings[0].is_left)
            joined += 1
        nodes = _split(run, len(rises))
        for rise, node in zip(rises, nodes, strict=True):
            self._rise(block, rise, node, joined)
        slots = tuple(rise.slot for rise in rises)
        if len(slots) > 1 and all(slot in self.nodes and len(siblings) == joined for siblings, slot in rises):
            self.runs[slots] = run
            self.run_of.update(dict.fromkeys(slots, slots))

    def _rise(self, block: Block, rise: Rise, node: Value, joined: int = 0) -> None:
        """Join a new node with the held siblings, except the first `joined`, which it contains already."""
        for slot, is_left in rise.siblings[joined:]:
            node = self._joined(block, node, self._pop(slot), is_left)
        root = self.roots.get(rise.slot)
        if root is None:
            self.nodes[rise.slot] = node
        else:
            _copy(node, _rows(self.sum(block), root.rows))

    def _joined(self, block: Block, node: Value, other: Value, is_left: bool) -> Value:
        """Merge two siblings in the tree's order, into the left one."""
        left, right = (other, node) if is_left else (node, other)
        self.arithmetic.merge(block, left, right)
        return left

    def _pop(self, slot: int) -> Value:
        self.runs.pop(self.run_of.pop(slot, ()), None)
        return self.nodes.pop(slot)

    def _new(self, block: Block, num_rows: int, like: Value) -> Value:
        shapes = tuple((*x.shape[:-2], num_rows, x.shape[-1]) for x in like)
        return self.arithmetic.new_sum(block, shapes)


def _rows(value: Value, rows: slice) -> Value:
    return tuple(x[..., rows, :] for x in value)


def _split(value: Value, num_tiles: int) -> list[Value]:
    """Split a value of several whole tiles into tiles."""
    if num_tiles == 1:
        return [value]
    return [_rows(value, slice(i * TILE, (i + 1) * TILE)) for i in range(num_tiles)]


def _copy(value: Value, into: Value) -> None:
    for x, y in zip(value, into, strict=True):
        y[...] = x
