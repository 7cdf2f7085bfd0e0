"""What is a model for the planner? The shapes from which FLOPs and bytes are counted."""

from dataclasses import dataclass
from typing import NamedTuple

from ringspan.errors import ShapeError

LONGEST = 10**6  # limit of a video, in frames, and of its sides, in pixels


class Experts(NamedTuple):
    """A mixture of experts: a token visits `per_token` of `num_experts` MLPs of `mlp_size`, and all `shared` ones.

    The first `dense_layers` layers have one ordinary MLP instead.
    """

    num_experts: int
    per_token: int
    mlp_size: int
    shared: int = 0
    dense_layers: int = 0


class Latent(NamedTuple):
    """Multi-head latent attention: the cache holds kv_rank + rope_dim elements per token and layer, for all heads.

    `q_rank` is None if queries are projected directly.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int


class Window(NamedTuple):
    """All layers but `full_layers` see only the last `tokens` positions, including their own."""

    tokens: int
    full_layers: int


class Video(NamedTuple):
    """How frames × height × width become tokens, and how text enters: as more tokens or by cross-attention."""

    patch: tuple[int, int, int]
    temporal_stride: int
    spatial_stride: int
    text_tokens: int
    is_text_joint: bool
    usual: tuple[int, int, int] | None  # frames, height, width
    forwards: int = 1  # of a denoising step: 2 with classifier-free guidance, with and without the text
    steps: int | None = None  # of a video, where its pipeline has a default
    models: int = 1  # transformers of a pipeline, one after the other (Wan2.2: high and low noise)
    encoder_parameters: int | None = None  # of the text encoder
    vae_parameters: int | None = None

    def count_tokens(self, frames: int, height: int, width: int) -> int:
        """((frames - 1)/stride + 1)/patch_t · height/(stride · patch_h) · width/(stride · patch_w), and joint text."""
        patch_t, patch_h, patch_w = self.patch
        for name, length in (("frames", frames), ("height", height), ("width", width)):
            if length > LONGEST:
                raise ShapeError("too large", argument=name, value=length, remedy=f"use at most {LONGEST:,}")
        if frames < 1 or (frames - 1) % self.temporal_stride:
            near = max(1, round((frames - 1) / self.temporal_stride) * self.temporal_stride + 1)
            raise ShapeError(
                f"the VAE takes 1 + a multiple of {self.temporal_stride} frames",
                argument="frames",
                value=frames,
                remedy=f"use {near}",
            )
        for name, pixels, patch in (("height", height, patch_h), ("width", width, patch_w)):
            step = self.spatial_stride * patch
            if pixels < step or pixels % step:
                near = max(1, round(pixels / step)) * step
                raise ShapeError(
                    f"a token is {step} pixels wide and high",
                    argument=name,
                    value=pixels,
                    remedy=f"use a multiple, such as {near}",
                )
        latents = (frames - 1) // self.temporal_stride + 1
        if latents % patch_t:
            near = frames - latents % patch_t * self.temporal_stride
            raise ShapeError(
                f"{latents} latent frames are not a multiple of the patch of {patch_t}",
                argument="frames",
                value=frames,
                remedy=f"use {near if near > 0 else frames + (patch_t - latents % patch_t) * self.temporal_stride}",
            )
        step_h, step_w = self.spatial_stride * patch_h, self.spatial_stride * patch_w
        video = latents // patch_t * (height // step_h) * (width // step_w)
        return video + (self.text_tokens if self.is_text_joint else 0)


@dataclass(frozen=True, slots=True)
class Model:
    """An LLM or, with `video`, a diffusion transformer. Sizes are in elements."""

    id: str
    layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    hidden_size: int
    mlp_size: int
    mlp_matrices: int = 3  # gate, up and down; 2 without a gate
    experts: Experts | None = None
    latent: Latent | None = None
    window: Window | None = None
    video: Video | None = None
    vocab_size: int | None = None
    is_tied: bool = False
    parameters: int | None = None  # as published; counted if None
    max_tokens: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "hidden_size", "mlp_matrices"):
            value = getattr(self, name)
            if value < 1:
                raise ShapeError(f"{self.id}: {name}={value}; a model has at least 1")
        if self.mlp_size < 0:
            raise ShapeError(
                f"{self.id}: mlp_size={self.mlp_size}", remedy="use 0 for a model without MLP, or its size"
            )
        if self.vocab_size is not None and self.vocab_size < 0:
            raise ShapeError(
                f"{self.id}: vocab_size={self.vocab_size}", remedy="use 0, or leave it out, to count no embeddings"
            )
        if self.window is not None and self.window.tokens < 1:
            raise ShapeError(f"{self.id}: sliding_window={self.window.tokens}; a window has at least 1 token")
        if self.experts is not None:
            self._check_experts(self.experts)
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"{self.id}: {self.num_heads} query heads over {self.num_kv_heads} KV heads: every KV head "
                "serves the same number of query heads",
                remedy="make the one a multiple of the other",
            )

    def _check_experts(self, experts: Experts) -> None:
        if not 1 <= experts.per_token <= experts.num_experts:
            raise ShapeError(
                f"{self.id}: num_experts_per_tok={experts.per_token} of {experts.num_experts} experts: a "
                "token visits at least 1 and at most all of them",
                remedy=f"use 1 to {experts.num_experts}",
            )
        if not 0 <= experts.dense_layers <= self.layers:
            raise ShapeError(
                f"{self.id}: first_k_dense_replace={experts.dense_layers} of {self.layers} layers: no more "
                "can be without experts than there are",
                remedy=f"use 0 to {self.layers}",
            )

    @property
    def is_causal(self) -> bool:
        """Whether tokens see only earlier tokens."""
        return self.video is None

    @property
    def kv_elements(self) -> int:
        """Elements of K and V per token and layer, in a cache and in messages."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def full_layers(self) -> int:
        """The number of layers that attend to the whole length."""
        return self.layers if self.window is None else self.window.full_layers

    @property
    def attention_parameters(self) -> int:
        """Parameters of the projections of one layer; cross-attention to text has its own."""
        hidden, heads = self.hidden_size, self.num_heads
        out = heads * self.v_head_dim * hidden
        if self.latent is not None:
            q_rank, kv_rank, nope_dim, rope_dim = self.latent
            width = heads * (nope_dim + rope_dim)
            queries = hidden * width if q_rank is None else hidden * q_rank + q_rank * width
            return queries + hidden * (kv_rank + rope_dim) + kv_rank * heads * (nope_dim + self.v_head_dim) + out
        own = hidden * heads * self.head_dim + hidden * self.kv_elements + out
        return 2 * own if self._is_crossed else own

    @property
    def projected_parameters(self) -> int:
        """The weights that one token is multiplied with; K and V of text on the side come from the text."""
        if not self._is_crossed:
            return self.attention_parameters
        return self.attention_parameters - self.hidden_size * self.kv_elements

    @property
    def _is_crossed(self) -> bool:
        return self.video is not None and not self.video.is_text_joint

    @property
    def counted_parameters(self) -> int:
        """All weights: layers, and embeddings where the size of the vocabulary is known."""
        return self.layers * self.attention_parameters + self.mlp_parameters + self.embedding_parameters

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding and of the output head, counted once if they are tied."""
        return (self.vocab_size or 0) * self.hidden_size * (1 if self.is_tied else 2)

    @property
    def layer_parameters(self) -> float:
        """Weights of one layer on average."""
        return ((self.parameters or self.counted_parameters) - self.embedding_parameters) / self.layers

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the MLPs of all layers, with all experts."""
        return self._mlp_parameters(self.experts.num_experts if self.experts else 0)

    @property
    def active_mlp_parameters(self) -> int:
        """Parameters of the MLPs that a token visits, over all layers."""
        return self._mlp_parameters(self.experts.per_token if self.experts else 0)

    def _mlp_parameters(self, num_experts: int) -> int:
        """Count MLP parameters with `num_experts` experts per layer, plus shared ones."""
        ordinary = self.mlp_matrices * self.hidden_size * self.mlp_size
        if self.experts is None:
            return self.layers * ordinary
        mixture = self.mlp_matrices * self.hidden_size * self.experts.mlp_size * (num_experts + self.experts.shared)
        return self.experts.dense_layers * ordinary + (self.layers - self.experts.dense_layers) * mixture
