"""What would a call cost if ranks computed only attention, without messages and merging?

Every rank computes the pieces its own program gives it, with the kernel of the call. Whose values they are makes no
difference to the time, so one q, one k and so on of each shape serves for all blocks. But q is not k: a core finds one
tensor in its caches where it would not find three, which is worth up to 4 % of the time.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ringspan.bench.inputs import Inputs
from ringspan.kernels.base import Kernel, Merged
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.program.bind import Compute
from ringspan.program.pieces import Piece
from ringspan.program.prepare import Prepared
from ringspan.program.problem import Problem, Shape
from ringspan.schedule import Block


class Operands(NamedTuple):
    """The operands of a kernel for one piece; `merged` only in the backward pass."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    merged: Merged | None
    piece: Piece


def own_pieces(prepared: Prepared[Problem], inputs: Inputs) -> Iterator[Operands]:
    """The pieces of a rank's program, forward or backward."""
    problem = prepared.problem
    tensors: dict[tuple[str, Shape], torch.Tensor] = {(name, tuple(x.shape)): x for name, x in inputs._asdict().items()}

    def tensor(name: str, shape: Shape) -> torch.Tensor:
        if (name, shape) not in tensors:
            tensors[name, shape] = inputs.q.new_empty(shape).normal_()
        return tensors[name, shape]

    def merged(block: Block) -> Merged | None:
        if block.kind == "q":
            return None
        _, dout, out, lse = problem.block_shapes(block)
        # About the lse of this many random keys: other magnitudes change the time of exp.
        typical = torch.full(
            lse[:-1], math.log(problem.kv_layout.num_positions), dtype=accumulator_dtype(inputs.q.dtype)
        )
        return Merged(tensor("dout", dout), tensor("out", out), typical.to(inputs.q.device))

    for instruction in prepared.program:
        for tile in instruction.tiles if isinstance(instruction, Compute) else ():
            q, whole = tensor("q", problem.block_shapes(tile.q)[0]), merged(tile.q)
            k, v = map(tensor, "kv", problem.block_shapes(tile.kv))
            for piece in tile.all_pieces():
                part = whole and Merged(*(x[:, :, piece.q] for x in whole))
                yield Operands(q[:, :, piece.q], k[:, :, piece.kv], v[:, :, piece.kv], part, piece)


def attend_pieces(kernel: Kernel, scale: float, pieces: Sequence[Operands]) -> None:
    """Compute the pieces one after the other and discard the results."""
    for q, k, v, merged, piece in pieces:
        if merged is None:
            kernel.forward(q, k, v, piece, scale)
        else:
            kernel.backward(q, k, v, merged, piece, scale)
