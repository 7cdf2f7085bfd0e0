"""What is asked: a model, a workload and devices; and how the work may be split over them.

Tensor parallelism is innermost (neighbouring devices), context parallelism next, copies for parts of the batch last.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ringspan.algorithms import find_algorithm
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.planner.catalog import Cluster, Model
from ringspan.planner.cost import WEIGHT_BYTES, WIRE_BYTES
from ringspan.planner.software import RINGSPAN, Software

Phase = Literal["prefill", "decode", "train", "denoise"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "train", "denoise")
CACHE_BYTES = {"bf16": 2.0, "fp8": 1.0}  # of an element of the KV cache; the scales of fp8 are per head and left out
MOST_TOKENS = 2**40
MOST_SEQUENCES = 2**20  # in a batch


@dataclass(frozen=True, slots=True)
class Request:
    """One question. In decode `tokens` are those already there; `batch` counts sequences, or forwards of a video.

    `chunk_tokens` is the length of a piece of a prefill that is computed piece by piece, `accumulate` the number of
    passes whose gradients make one training step, `is_resident` whether text encoder and VAE stay on the devices, and
    `size` frames, height and width of a video, where they are known.
    """

    model: Model
    cluster: Cluster
    phase: Phase
    tokens: int
    cached_tokens: int = 0
    batch: int = 1
    tp: int | None = None
    wire: str = "bf16"
    weights: str = "bf16"
    mlp_weights: str | None = None
    recomputes: bool = True
    shards_weights: bool = False
    software: Software = RINGSPAN
    kv_cache: str = "bf16"
    chunk_tokens: int | None = None
    accumulate: int = 1
    is_resident: bool = False
    size: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("tokens", 1),
            ("cached_tokens", 0),
            ("batch", 1),
            ("chunk_tokens", 1),
            ("accumulate", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ShapeError("too small", argument=name, value=value, remedy=f"use {least} or more")
        if self.batch > MOST_SEQUENCES:
            raise ShapeError(
                "too many sequences", argument="batch", value=self.batch, remedy=f"use at most {MOST_SEQUENCES:,}"
            )
        if self.tokens + self.cached_tokens > MOST_TOKENS:
            raise ShapeError(f"{self.tokens + self.cached_tokens:,} tokens", remedy=f"use at most {MOST_TOKENS:,}")
        for name, value, known in (
            ("wire", self.wire, WIRE_BYTES),
            ("weights", self.weights, WEIGHT_BYTES),
            ("kv_cache", self.kv_cache, CACHE_BYTES),
        ):
            if value not in known:
                raise UnsupportedError(
                    "there is no such type", argument=name, value=value, remedy=f"use one of {', '.join(known)}"
                )
        if self.phase not in PHASES:
            raise UnsupportedError(
                "there is no such phase", argument="phase", value=self.phase, remedy=f"use one of {', '.join(PHASES)}"
            )
        is_video = self.model.video is not None
        if (self.phase == "denoise") != is_video and self.phase != "train":
            legal = "denoise or train" if is_video else "prefill, decode or train"
            raise UnsupportedError(
                f"{self.model.id} is a model for {legal}", argument="phase", value=self.phase, remedy="use one of these"
            )
        self._check_phase()
        if self.tp is not None:
            check_tp(self.model, self.cluster, self.tp)

    def _check_phase(self) -> None:
        """Refuse options that have no meaning in the phase."""
        if self.cached_tokens and self.phase == "decode":
            raise UnsupportedError(
                "in decode all tokens but one are cached",
                argument="cached_tokens",
                value=self.cached_tokens,
                remedy="leave it out, and give the length of the cache as the number of tokens",
            )
        if self.cached_tokens and self.phase != "prefill":
            raise UnsupportedError(
                f"only a prefill finds tokens cached, and the phase is {self.phase}",
                argument="cached_tokens",
                value=self.cached_tokens,
                remedy="leave it out",
            )
        if self.shards_weights and self.phase not in ("train", "denoise"):
            raise UnsupportedError(
                f"in {self.phase} every layer's weights would be gathered again in every pass, which is planned for "
                "training and denoising only",
                argument="shards_weights",
                value=True,
                remedy="leave it out; tensor parallelism or fp8 weights take less memory",
            )
        if self.phase == "train" and {self.weights, self.mlp_weights or self.weights} != {"bf16"}:
            raise UnsupportedError(
                "training is planned with weights in bf16",
                argument="weights",
                value=self.weights,
                remedy="leave it out; sharded weights or tensor parallelism take less memory",
            )
        if self.wire != "bf16" and self.phase in ("train", "decode"):
            reason = (
                "gradients through rounded K and V would not be exact" if self.phase == "train" else "no K and V travel"
            )
            raise UnsupportedError(f"in {self.phase} {reason}", argument="wire", value=self.wire, remedy="leave it out")
        for name, is_set, where in (
            ("kv_cache", self.kv_cache != "bf16", ("prefill", "decode")),
            ("chunk_tokens", self.chunk_tokens is not None, ("prefill",)),
            ("accumulate", self.accumulate > 1, ("train",)),
            ("is_resident", self.is_resident, ("denoise",)),
        ):
            if is_set and self.phase not in where:
                raise UnsupportedError(
                    f"it is for {' or '.join(where)}, and the phase is {self.phase}",
                    argument=name,
                    value=getattr(self, name),
                    remedy="leave it out",
                )

    @property
    def chunk(self) -> int:
        """New tokens that are computed at once."""
        return min(self.tokens, self.chunk_tokens or self.tokens)

    @property
    def has_guidance(self) -> bool:
        """Whether the batch is the two forwards of a step with classifier-free guidance."""
        video = self.model.video
        return self.phase == "denoise" and video is not None and self.batch == video.forwards == 2

    @property
    def pixels(self) -> int:
        """Pixels of a frame of the requested video, or of the usual one."""
        video = self.model.video
        size = self.size or (video.usual if video is not None else None)
        return size[1] * size[2] if size else 0


def check_tp(model: Model, cluster: Cluster, tp: int) -> None:
    """Refuse a tensor parallelism that does not divide heads and devices."""
    legal = legal_tps(model, cluster)
    if tp not in legal:
        raise ShapeError(
            f"tensor parallelism must divide the {model.num_heads} query heads and the {cluster.num_devices} devices, "
            f"and divide or be a multiple of the {model.num_kv_heads} KV heads and of the {cluster.per_node} devices "
            "of a node",
            argument="tp",
            value=tp,
            remedy=f"use one of {', '.join(map(str, legal))}",
        )


def legal_tps(model: Model, cluster: Cluster) -> list[int]:
    """All legal tensor parallelisms, ascending."""

    def is_legal(tp: int) -> bool:
        splits_kv = model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0
        in_nodes = cluster.per_node % tp == 0 or tp % cluster.per_node == 0
        return model.num_heads % tp == 0 and cluster.num_devices % tp == 0 and splits_kv and in_nodes

    return [tp for tp in range(1, min(model.num_heads, cluster.num_devices) + 1) if is_legal(tp)]


class Setup(NamedTuple):
    """One way to split the work. `inner` is the Ulysses degree of hybrid, or the ring inside a node of double_ring."""

    algorithm: str
    layout: str
    tp: int
    cp: int
    copies: int = 1
    inner: int = 1

    @property
    def has_mesh(self) -> bool:
        """Whether ranks are in two dimensions, `inner` of them in the last one."""
        return "mesh" in find_algorithm(self.algorithm).options

    def __str__(self) -> str:
        name = self.algorithm.replace("_", "-")
        if self.has_mesh:
            name += f" {self.cp // self.inner}×{self.inner}"
        return name if self.cp > 1 else "one device" if self.tp == 1 else "tensor parallel only"
