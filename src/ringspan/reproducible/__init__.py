"""Layers whose bits do not depend on the number of ranks or on the layout.

`attention(..., reproducible=True)` covers attention; these functions cover the layers with weights. A weight's gradient
is a sum over all tokens, and the bits of a matrix product may change with its number of rows. So these functions
compute tile by tile of the global grid, and add the tiles' gradients in one tree over all ranks.

**After backward every rank has the whole gradient of every weight**, not its share, so no all-reduce is needed. Only
the loss sends messages in the forward pass. Every call sends once in the backward pass, and all ranks must make it.
"""

from ringspan.reproducible._activations import elementwise
from ringspan.reproducible._convert import convert
from ringspan.reproducible._embedding import embedding
from ringspan.reproducible._linear import linear
from ringspan.reproducible._loss import cross_entropy
from ringspan.reproducible._norms import layer_norm, rms_norm

__all__ = ["convert", "cross_entropy", "elementwise", "embedding", "layer_norm", "linear", "rms_norm"]
