"""Attention of one piece on one device, and partial results with their merge."""

from ringspan.kernels.choose import KERNELS, Kernel, Request, choose_kernel

__all__ = [
    "KERNELS",
    "Kernel",
    "Request",
    "choose_kernel",
]
