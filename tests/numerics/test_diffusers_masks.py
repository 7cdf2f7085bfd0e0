"""Masks of joint attention: honoured, and never built for all pairs."""

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringspan.adapters.diffusers import parallelize
from ringspan.adapters.diffusers.masks import read_part, read_whole
from ringspan.adapters.diffusers.outer_masks import OuterMasks
from ringspan.errors import UnsupportedError
from ringspan.layout import Layout, contiguous
from ringspan.mask import frame_causal, full
from ringspan.span import Span
from support.diffused import error_of, on_ranks, run_alone, whole


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made of anything but a weight."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.bytes = 0
        self._weights = {x.untyped_storage().data_ptr() for x in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self._weights:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


def test_no_mask_of_all_pairs_is_built():
    """HunyuanVideo 1.5 makes one in every layer: 12.5 GB at 720p."""
    alone = run_alone("hunyuan15")
    many = alone.arguments | {"hidden_states": torch.randn(2, 4, 5, 20, 40, generator=torch.Generator().manual_seed(5))}
    with torch.no_grad():
        expected = whole(alone.model(**many))

    def forward(model, group):
        with torch.no_grad(), parallelize(model, group, example=alone.arguments), Largest(model) as largest:
            return whole(model(**many)), largest.bytes

    for output, num_bytes in on_ranks(alone, 2, forward):
        assert error_of(output, expected) <= 2e-6
        assert num_bytes < 2 * (4000 // 2) ** 2  # a byte for each pair of one rank's rows, in two rows of the batch


def test_the_product_of_two_masks_is_real_for_whoever_asks():
    keys = torch.rand(2, 1, 1, 9) > 0.5
    masks = OuterMasks()
    repeated = masks.call(torch.Tensor.repeat, (keys, 1, 1, 9, 1), {})
    product = masks.call(torch.Tensor.__and__, (repeated, repeated.transpose(2, 3)), {})
    outer = masks.find(product)
    assert outer is not None
    assert torch.equal(outer.keys, keys)
    expected = keys & keys.transpose(2, 3)
    assert torch.equal(masks.call(torch.Tensor.float, (product,), {}), expected.float())
    assert masks.call(torch.Tensor.bool, (product,), {}) is product


def test_masks_of_all_pairs_are_read():
    assert read_whole(torch.ones(2, 1, 4, 4, dtype=torch.bool)).mask == full()
    frames = torch.from_numpy(frame_causal(3).allowed(range(12), range(12)))
    padding = torch.arange(12) < 7
    position = torch.arange(12)
    window = (position[:, None] - position).abs() <= 2
    for visible in (frames, frames.T, padding[:, None] & padding, window, window & (position % 5 != 0), ~window):
        rows = torch.stack([visible, frames])
        found = torch.from_numpy(read_whole(rows[:, None]).mask.allowed(range(12), range(12)))
        assert torch.equal(found.expand_as(rows), rows)
    with pytest.raises(UnsupportedError, match="more than 64 intervals"):
        read_whole(torch.rand(200, 200, generator=torch.Generator().manual_seed(0)) > 0.5)


def test_queries_that_see_nothing():
    """Torch gives 0 if all scores are -inf; a large number is taken away by softmax."""
    bias = torch.zeros(4, 4)
    bias[2] = -torch.inf
    assert not read_whole(bias).mask.allowed([2], range(4)).any()
    with pytest.raises(UnsupportedError, match="softmax takes away"):
        read_whole(bias.clamp_min(-1e9))


def test_masks_of_keys_that_cannot_be_split():
    layout = Layout(contiguous(8, 2).spans_by_rank, (Span(8, 12),))
    with pytest.raises(UnsupportedError, match="bias"):
        read_part(torch.full((1, 1, 1, 8), 0.5), layout, 0, [])
    hidden = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    hidden[..., 1] = False
    with pytest.raises(UnsupportedError, match="hides tokens"):
        read_part(hidden, layout, 0, [])
    differing = torch.eye(8, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="different keys from different queries"):
        read_part(differing, layout, 0, [])
    with pytest.raises(UnsupportedError, match="between heads"):
        read_part(differing[None, :, None], layout, 0, [])


def test_padding_among_tokens_is_found_in_the_whole_mask():
    layout = contiguous(8, 2)
    whole_mask = torch.tensor([[True] * 6 + [False] * 2])
    read = read_part(whole_mask[:, None, None, :4], layout, 0, [whole_mask])
    assert read.mask.allowed([0], range(8))[0].tolist() == whole_mask[0].tolist()
