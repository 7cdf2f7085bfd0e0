"""Which kernel serves a request? Each family of kernels has a file; `choose_kernel` finds them by name."""

from ringspan.errors import UnsupportedError
from ringspan.kernels.base import Kernel, KernelRequest
from ringspan.kernels.reference import ReferenceKernel
from ringspan.kernels.sdpa_cpu import SdpaCpu
from ringspan.kernels.sdpa_cuda import CUDNN, EFFICIENT, FLASH

__all__ = ["KERNELS", "Kernel", "KernelRequest", "choose_kernel"]

KERNELS: tuple[Kernel, ...] = (FLASH, EFFICIENT, CUDNN, SdpaCpu(), ReferenceKernel())
"""In order of preference: "auto" takes the first kernel that does not refuse. Only the reference takes a softcap."""


def choose_kernel(name: str, request: KernelRequest) -> Kernel:
    """Return the kernel of that name, or for "auto" the first kernel that can serve the request."""
    chosen = [kernel for kernel in KERNELS if name in ("auto", kernel.name)]
    if not chosen:
        choices = ", ".join(["auto", *(kernel.name for kernel in KERNELS)])
        raise UnsupportedError("there is no such kernel", argument="kernel", value=name, remedy=f"use one of {choices}")
    refusals = {}
    for kernel in chosen:
        reason = kernel.refuses(request)
        if reason is None:
            return kernel if request.softcap is None else ReferenceKernel(request.softcap)
        refusals[kernel.name] = reason
    able = [kernel.name for kernel in KERNELS if kernel.refuses(request) is None]
    reasons = "; ".join(f"{kernel} {reason}" for kernel, reason in refusals.items())
    raise UnsupportedError(
        f"cannot compute {_format_request(request)}: {reasons}",
        argument="kernel",
        value=name,
        remedy=f"use auto, or {' or '.join(able)}" if able else _remedy(request),
    )


def _remedy(request: KernelRequest) -> str:
    if request.reproducible and request.softcap is not None:
        return "leave out softcap or reproducible"
    return "convert the tensors"


def _format_request(request: KernelRequest) -> str:
    mode = ", reproducible=True" if request.reproducible else ""
    mode += "" if request.softcap is None else f", softcap={request.softcap:g}"
    return f"{request.dtype} on {request.device}, head_dim={request.head_dim}, v_head_dim={request.v_head_dim}{mode}"
