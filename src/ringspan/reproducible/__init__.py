"""The layers of a model whose bits do not depend on the number of ranks, nor on who holds which token.

`attention(..., reproducible=True)` does its part; what is left is whatever has weights. A weight's gradient is a sum
over all tokens, and the bits of a matrix product may change with its number of rows. So these functions compute tile by
tile of the global grid, and take the tiles' gradients together in one tree over all ranks.

**After backward every rank has the whole gradient of every weight**, not its share: nothing is left to all-reduce.
Forward sends nothing (but for the loss); backward sends once for each call, and all ranks must make it.
"""

from ringspan.reproducible.activations import elementwise
from ringspan.reproducible.convert import convert
from ringspan.reproducible.embedding import embedding
from ringspan.reproducible.linear import linear
from ringspan.reproducible.loss import cross_entropy
from ringspan.reproducible.norms import layer_norm, rms_norm

__all__ = ["convert", "cross_entropy", "elementwise", "embedding", "layer_norm", "linear", "rms_norm"]
