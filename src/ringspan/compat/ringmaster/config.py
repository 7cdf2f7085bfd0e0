"""The configuration of axolotl-ringmaster: `RingmasterConfig` and its enumerations."""

from dataclasses import dataclass
from enum import StrEnum

from ringspan.errors import ShapeError

__all__ = ["AUTO", "Backend", "LoadBalance", "RingImpl", "RingmasterConfig", "RotateMethod", "auto_select"]

AUTO = -1


class Backend(StrEnum):
    """The algorithm family: ring, Ulysses, or both."""

    AUTO = "auto"
    ULYSSES = "ulysses"
    RING = "ring"
    USP = "usp"


class RotateMethod(StrEnum):
    """The transport of keys and values."""

    ALLGATHER = "allgather"
    ALLTOALL = "alltoall"


class LoadBalance(StrEnum):
    """The layout of a sequence. "distflash" keeps contiguous shards; the original has not built the last two."""

    NONE = "none"
    HEAD_TAIL = "head_tail"
    DISTFLASH = "distflash"
    PER_DOCUMENT = "per_document"
    PTRR = "ptrr"


class RingImpl(StrEnum):
    """Which kernels the original calls; here the library's own compute all of them."""

    AUTO = "auto"
    TORCH_NATIVE = "torch_native"
    HF_KERNELS = "hf_kernels"
    RING_FLASH_ATTN = "ring_flash_attn"


@dataclass
class RingmasterConfig:
    """`size` ranks; `backend` chooses the algorithm, `load_balance` the layout."""

    size: int = 1
    backend: Backend = Backend.AUTO
    ulysses_size: int = AUTO
    ring_size: int = AUTO
    rotate_method: RotateMethod = RotateMethod.ALLGATHER
    load_balance: LoadBalance = LoadBalance.NONE
    ring_impl: RingImpl = RingImpl.AUTO

    @property
    def enabled(self) -> bool:
        """Whether there is more than one rank."""
        return self.size > 1

    def normalize(self, *, num_kv_heads: int | None, intra_node_size: int | None) -> "RingmasterConfig":
        """Choose sizes and the backend where they are left open, in place."""
        self.ulysses_size, self.ring_size, self.backend = auto_select(
            total=self.size,
            requested_backend=self.backend,
            requested_ulysses=self.ulysses_size,
            requested_ring=self.ring_size,
            num_kv_heads=num_kv_heads,
            intra_node_size=intra_node_size,
        )
        return self


def auto_select(
    *,
    total: int,
    requested_backend: Backend,
    requested_ulysses: int,
    requested_ring: int,
    num_kv_heads: int | None,
    intra_node_size: int | None,
) -> tuple[int, int, Backend]:
    """Return (ulysses_size, ring_size, backend): sizes that are given, or as many heads per node as divide."""
    if total <= 1:
        return 1, 1, Backend.ULYSSES
    if requested_ulysses != AUTO or requested_ring != AUTO:
        ulysses = requested_ulysses if requested_ulysses != AUTO else total // requested_ring
        ring = requested_ring if requested_ring != AUTO else total // requested_ulysses
        if ulysses * ring != total:
            raise ShapeError(f"ulysses_size * ring_size must be size={total}; they are {ulysses} and {ring}")
        return ulysses, ring, _backend(ulysses, ring)
    if requested_backend == Backend.RING:
        return 1, total, Backend.RING
    if requested_backend == Backend.ULYSSES:
        if num_kv_heads is not None and num_kv_heads % total:
            raise ShapeError(
                f"{num_kv_heads} KV heads are not divided by {total} ranks",
                argument="backend",
                value="ulysses",
                remedy="choose ring or usp",
            )
        return total, 1, Backend.ULYSSES
    limit = intra_node_size or total
    sizes = [n for n in range(1, min(limit, total) + 1) if total % n == 0 and (num_kv_heads or total) % n == 0]
    return sizes[-1], total // sizes[-1], _backend(sizes[-1], total // sizes[-1])


def _backend(ulysses: int, ring: int) -> Backend:
    if ring == 1:
        return Backend.ULYSSES
    return Backend.RING if ulysses == 1 else Backend.USP
