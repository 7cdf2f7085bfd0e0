"""What do ranks that hold the same weights exchange, and how much of it does compute hide?

Gradients are reduced while the backward pass runs. Fully sharded weights are gathered layer by layer, while the layer
before computes, in every pass, and their gradients are scattered in the backward one (arXiv 1910.02054).
"""

from ringspan.planner.cost import WEIGHT_BYTES, all_gather_s, all_reduce_s
from ringspan.planner.plan.request import Request, Setup


def reduce_gradients_s(request: Request, setup: Setup) -> float:
    """Every device holds 1/tp of the gradients and reduces them with the ranks that hold the same part."""
    device = request.cluster.device
    return all_reduce_s(device.near, device.far, _held_bytes(request, setup), *_holders(request, setup))


def gathering_s(request: Request, setup: Setup, forward_s: float) -> float:
    """What a forward pass does not hide of gathering each layer's weights while the layer before computes.

    The first gather has none to hide behind, and of the others shows what takes longer than a layer's compute.
    """
    layers, gather_s = request.model.layers, _gather_s(request, setup)
    return gather_s + (layers - 1) * max(0.0, gather_s - forward_s / layers)


def scattering_s(request: Request, setup: Setup, backward_s: float) -> float:
    """The same of a backward pass, which gathers weights and scatters their gradients; the last scatter shows too."""
    layers, gather_s = request.model.layers, _gather_s(request, setup)
    return 2 * gather_s + (layers - 1) * max(0.0, 2 * gather_s - backward_s / layers)


def _gather_s(request: Request, setup: Setup) -> float:
    """Seconds to gather one layer's weights; scattering their gradients takes as long."""
    device = request.cluster.device
    nbytes = request.model.layer_parameters * WEIGHT_BYTES["bf16"] / setup.tp
    return all_gather_s(device.near, device.far, nbytes, *_holders(request, setup))


def _held_bytes(request: Request, setup: Setup) -> float:
    """Bytes of the weights, or of their gradients, of one tensor-parallel rank."""
    return (request.model.parameters or request.model.counted_parameters) * WEIGHT_BYTES["bf16"] / setup.tp


def _holders(request: Request, setup: Setup) -> tuple[int, int]:
    """How many ranks hold the same weights or share them, and how many of them are in a node."""
    return setup.cp * setup.copies, max(1, request.cluster.per_node // setup.tp)
