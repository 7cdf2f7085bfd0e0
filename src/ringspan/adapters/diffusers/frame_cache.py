"""How does a video that comes in chunks of frames attend to its past, which is split over ranks?

Autoregressive video models denoise a chunk several times, and each time it attends to the keys and values of the chunks
before it. Those are written once, by a last pass over the clean chunk. Here every rank keeps the keys and values of its
own tokens, and queries travel (pass-Q), since the past is much larger than a chunk. Old frames are evicted, all but the
first ones, which may be pinned: attention sinks of a kind.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ringspan.arguments import FLAG, TEXT, WHOLE, check_arguments, optional
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import Layout, contiguous
from ringspan.mask import frame_causal
from ringspan.runtime.api import attention
from ringspan.runtime.session import session_of
from ringspan.span import Span

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class FrameCache:
    """The keys and values of earlier frames, for all layers of one guidance branch."""

    def __init__(
        self,
        tokens_per_frame: int,
        group: Any = None,
        *,
        max_frames: int | None = None,
        pinned_frames: int = 0,
        algorithm: str = "pass_q",
    ) -> None:
        """Begin with an empty cache, on every rank of a group.

        Args:
            tokens_per_frame: Tokens of one latent frame. A token sees its own frame and earlier ones. For models
                whose chunks see themselves whole, give the tokens of a chunk.
            group: As in `rs.attention`.
            max_frames: How many frames are kept; None keeps all.
            pinned_frames: How many of the first frames are never evicted; they count among `max_frames`.
            algorithm: As in `rs.attention`.
        """
        check_arguments(
            tokens_per_frame=(WHOLE, tokens_per_frame),
            max_frames=(optional(WHOLE), max_frames),
            pinned_frames=(WHOLE, pinned_frames),
            algorithm=(TEXT, algorithm),
        )
        if tokens_per_frame < 1:
            raise ShapeError("a frame has at least one token", argument="tokens_per_frame", value=tokens_per_frame)
        if max_frames is not None and not 0 <= pinned_frames < max_frames:
            raise ShapeError(
                f"pinned frames are some of max_frames={max_frames}", argument="pinned_frames", value=pinned_frames
            )
        self.num_frames = 0  # that were written, evicted ones included
        self._tokens_per_frame = tokens_per_frame
        self._group = group
        self._max_frames = max_frames
        self._pinned_frames = pinned_frames
        self._algorithm = algorithm
        transport = session_of(group).transport
        self._rank, self._world_size = transport.rank, transport.world_size
        self._spans: tuple[tuple[Span, ...], ...] = ((),) * transport.world_size
        self._kv: dict[int, KeysAndValues] = {}

    @property
    def held_frames(self) -> list[int]:
        """The numbers of the frames that the cache holds."""
        positions = Layout(self._spans).all_positions()
        return sorted(set((positions // self._tokens_per_frame).tolist()))

    @property
    def held_bytes(self) -> int:
        """Bytes of keys and values on this rank."""
        return sum(x.nbytes for kv in self._kv.values() for x in kv)

    @contextmanager
    def chunk(self, num_frames: int, *, is_clean: bool = False) -> Iterator["FrameChunk"]:
        """One pass over the next frames. Only a clean one writes, at its end, unless it fails; then frames go on."""
        check_arguments(num_frames=(WHOLE, num_frames), is_clean=(FLAG, is_clean))
        if num_frames < 1:
            raise ShapeError("a chunk has at least one frame", argument="num_frames", value=num_frames)
        chunk = FrameChunk(self, num_frames)
        yield chunk
        if is_clean:
            self._write(chunk)

    def _write(self, chunk: "FrameChunk") -> None:
        missing = sorted(self._kv.keys() - chunk.kv.keys())
        if missing or not chunk.kv:
            raise UnsupportedError(f"a clean pass left out layers {missing}: every layer attends once in each pass")
        self._kv, self._spans = chunk.kv, chunk.kv_layout.spans_by_rank
        self.num_frames += chunk.num_frames
        if self._max_frames is not None:
            self._evict(self._max_frames)

    def _evict(self, max_frames: int) -> None:
        pinned = self._pinned_frames * self._tokens_per_frame
        first = max(0, self.num_frames - (max_frames - self._pinned_frames)) * self._tokens_per_frame
        if first <= pinned:
            return
        positions = Layout(self._spans).positions(self._rank)
        rows = torch.from_numpy(((positions < pinned) | (positions >= first)).nonzero()[0])
        self._kv = {
            layer: (k.index_select(2, rows.to(k.device)), v.index_select(2, rows.to(v.device)))
            for layer, (k, v) in self._kv.items()
        }
        kept = (Span(0, pinned), Span(first, self.num_frames * self._tokens_per_frame))
        self._spans = tuple(
            tuple(Span(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop))) for a in spans for b in kept)
            for spans in self._spans
        )


class FrameChunk:
    """A pass over one chunk. This rank's tokens are those of `layout.positions(rank)`, minus `start`."""

    def __init__(self, cache: FrameCache, num_frames: int) -> None:
        self.num_frames = num_frames
        self.start = cache.num_frames * cache._tokens_per_frame  # the position of the first token
        self.layout = contiguous(num_frames * cache._tokens_per_frame, cache._world_size, start=self.start)
        spans = zip(cache._spans, self.layout.spans_by_rank, strict=True)
        self.kv_layout = Layout(tuple((*past, *own) for past, own in spans))
        self.kv: dict[int, KeysAndValues] = {}
        self._cache = cache

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """This rank's output; q, k and v are those of its tokens, (batch, heads, tokens, head_dim)."""
        check_arguments(layer=(WHOLE, layer))
        if layer in self.kv:
            raise UnsupportedError(f"layer {layer} attends twice in one pass: begin another chunk for each pass")
        past = self._cache._kv.get(layer)
        if past is None and self._cache._kv:
            raise UnsupportedError(f"layer {layer} has no past: every layer attends once in each pass")
        if past is not None:
            k, v = (torch.cat([old, new], 2) for old, new in zip(past, (k, v), strict=True))
        out = attention(
            q,
            k,
            v,
            mask=frame_causal(self._cache._tokens_per_frame),
            layout=self.layout,
            kv_layout=self.kv_layout,
            group=self._cache._group,
            algorithm=self._cache._algorithm,
            scale=scale,
        )
        assert isinstance(out, torch.Tensor)
        self.kv[layer] = (k, v)
        return out
