"""A video in chunks of frames over a rolling cache: the numbers of one frame-causal pass."""

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

import torch
from torch.nn.functional import scaled_dot_product_attention

from ringspan.adapters.diffusers import FrameCache
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.transports.in_process import run_in_process

TOKENS, CHUNK, NUM_CHUNKS, LAYERS = 5, 2, 8, 2  # tokens in a frame, frames in a chunk
NUM_FRAMES = CHUNK * NUM_CHUNKS
GENERATOR = torch.Generator().manual_seed(0)
QKV = torch.randn(LAYERS, 3, 2, 3, NUM_FRAMES * TOKENS, 8, generator=GENERATOR)
NOISE = torch.randn(QKV.shape, generator=GENERATOR)


def dense(layer: int, pinned: int, kept: int | None) -> torch.Tensor:
    """All frames at once, in float64, with the frames that each chunk may see."""
    frames = torch.arange(NUM_FRAMES * TOKENS) // TOKENS
    q, kv = frames[:, None], frames[None, :]
    allowed = kv <= q
    if kept is not None:
        chunk_start = q // CHUNK * CHUNK
        allowed &= (kv < pinned) | (kv >= chunk_start - (kept - pinned)) | (kv >= chunk_start)
    return scaled_dot_product_attention(*QKV[layer].double(), attn_mask=allowed)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("pinned", "kept"), [(0, None), (0, 3), (1, 4)])
def test_a_stream_of_chunks_is_one_frame_causal_pass(world_size, pinned, kept):
    def stream(group):
        cache = FrameCache(TOKENS, group, max_frames=kept, pinned_frames=pinned)
        outputs, held = [[] for _ in range(LAYERS)], []
        for _ in range(NUM_CHUNKS):
            for is_clean in (False, False, True):
                with cache.chunk(CHUNK, is_clean=is_clean) as chunk:
                    rows = torch.from_numpy(chunk.layout.positions(group.rank))
                    for layer in range(LAYERS):
                        qkv = (QKV if is_clean else NOISE)[layer][:, :, :, rows]
                        out = chunk.attend(layer, *qkv)
                        if is_clean:
                            outputs[layer].append((rows, out))
            held.append((cache.held_frames, cache.held_bytes))
        return outputs, held

    results = run_in_process(stream, world_size)
    for layer in range(LAYERS):
        expected = dense(layer, pinned, kept)
        for outputs, _ in results:
            for rows, out in outputs[layer]:
                torch.testing.assert_close(out.double(), expected[:, :, rows], atol=1e-5, rtol=1e-4)
    frames = results[0][1][-1][0]
    last = [] if kept is None else list(range(NUM_FRAMES - (kept - pinned), NUM_FRAMES))
    assert frames == (list(range(NUM_FRAMES)) if kept is None else [*range(pinned), *last])
    # Keys and values of all held frames, in both layers, once among all ranks.
    assert sum(held[-1][1] for _, held in results) == 2 * LAYERS * 2 * 3 * len(frames) * TOKENS * 8 * 4


def test_passes_that_are_not_clean_or_fail_write_nothing():
    def stream(group):
        cache = FrameCache(TOKENS, group)

        def fail():
            with cache.chunk(1, is_clean=True) as chunk:
                chunk.attend(0, *QKV[0][:, :, :, : chunk.layout.shard_len(group.rank)])
                raise OSError("full")

        with pytest.raises(OSError, match="full"):
            fail()
        return cache.num_frames, cache.held_bytes

    assert run_in_process(stream, 2) == [(0, 0), (0, 0)]


def test_wrong_use():
    with pytest.raises(ShapeError, match="pinned_frames=3"):
        FrameCache(TOKENS, max_frames=3, pinned_frames=3)
    with pytest.raises(ShapeError, match="tokens_per_frame=0"):
        FrameCache(0)
    cache = FrameCache(TOKENS)
    with cache.chunk(1, is_clean=True) as chunk:
        chunk.attend(0, *QKV[0][:, :, :, :TOKENS])
        with pytest.raises(UnsupportedError, match="twice"):
            chunk.attend(0, *QKV[0][:, :, :, :TOKENS])
        chunk.attend(1, *QKV[1][:, :, :, :TOKENS])

    def leave_out(layer):
        with cache.chunk(1, is_clean=True) as chunk:
            chunk.attend(layer, *QKV[0][:, :, :, :TOKENS])

    with pytest.raises(UnsupportedError, match=r"left out layers \[1\]"):
        leave_out(0)
    with pytest.raises(UnsupportedError, match="layer 2 has no past"):
        leave_out(2)
