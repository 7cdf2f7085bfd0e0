"""Kernels compute attention of one piece on one device; `softmax` merges their partial results."""

from ringspan.kernels.choose import KERNELS, Kernel, KernelRequest, choose_kernel

__all__ = [
    "KERNELS",
    "Kernel",
    "KernelRequest",
    "choose_kernel",
]
