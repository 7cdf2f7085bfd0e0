"""One byte per element: the error is within the stated bound, and everything else is unchanged."""

import pytest
import torch

import ringspan as rs
from ringspan.runtime import quantize
from ringspan.runtime.quantize import FORMATS
from support.conversations import Story, live_through

FORMAT_NAMES = list(FORMATS)


def examples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 70, 16, generator=generator)
    outliers = x.clone()
    outliers[0, 1, 5, 3] = 1e4
    return [
        x,
        x * 1e-30,
        x * 1e30,
        outliers,
        torch.zeros(1, 1, 5, 4),
        x[:, :, :1],
        x[:, :, :32],
        x.bfloat16(),
        x[:, :, :0],
    ]


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("number", range(len(examples())))
def test_elements_stay_within_the_bound(name: str, number: int) -> None:
    form, x = FORMATS[name], examples()[number]
    values, scales = quantize.encode(x, form)
    assert values.dtype == form.dtype
    assert scales.shape == (*x.shape[:3], 1)
    error = (quantize.decode(values, scales, torch.float64) - x.double()).abs()
    bound = scales.double().numpy() * form.half_step
    assert (error.numpy() <= bound * (1 + 1e-6)).all()
    largest = x.abs().float().amax().item() if x.numel() else 0.0
    assert (bound <= 1.02 * largest / form.limit * form.half_step + 1e-36).all()


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_stay_visible(name: str, bad: float) -> None:
    x = torch.ones(1, 1, 40, 4)
    x[0, 0, 35, 2] = bad
    decoded = quantize.decode(*quantize.encode(x, FORMATS[name]), torch.float32)
    assert decoded[0, 0, 35].isnan().all()
    assert torch.isfinite(decoded[0, 0, :35]).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes_on_the_wire(head_dim: int) -> None:
    """At most 27 % of the bytes of float32 and 53 % of bfloat16."""
    x = torch.zeros(1, 8, 4096, head_dim)
    nbytes = sum(part.nbytes for part in quantize.encode(x, FORMATS["int8"]))
    assert nbytes <= 0.27 * 4 * x.numel()
    assert nbytes <= 0.53 * 2 * x.numel()


def test_the_bound_of_the_output_holds_and_is_not_absurd(subtests: pytest.Subtests) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, form in FORMATS.items():
        with subtests.test(name):
            q, k, v = (torch.randn(1, heads, 200, 32, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
            ks, vs = quantize.encode(k, form), quantize.encode(v, form)
            k2, v2 = (quantize.decode(*x, torch.float64) for x in (ks, vs))
            exact, close = (
                torch.nn.functional.scaled_dot_product_attention(q, a, b, enable_gqa=True)
                for a, b in ((k, v), (k2, v2))
            )
            error = (exact - close).abs().amax((0, 2, 3))
            largest = [x[1].float().amax((0, 2, 3)) for x in (ks, vs)]
            bound = quantize.output_bound(q, *largest, form, 32**-0.5)
            assert (error <= bound).all(), name
            assert (error > 0).all()


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16", *FORMAT_NAMES])
@pytest.mark.parametrize("world_size", [1, 3])
def test_storage_of_every_type(storage: str, world_size: int) -> None:
    """Every answer is within the bound for rounded K and V, whichever side travels."""
    story = Story(8, rs.Heads(4, 2), [("causal",)], torch.float32, storage=storage)
    story.turn({0: 9, 1: 20}, algorithm="pass_kv").turn({1: 7, 0: 3}, algorithm="pass_q").truncate(1, 15)
    story.turn({0: 1, 1: 1}, query="replicated").turn({1: 1}, algorithm="pass_q").turn(
        {0: 6, 1: 5}, algorithm="pass_kv"
    )
    rs.run_in_process(lambda group: live_through(story, group), world_size)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bound_holds_for_a_single_token_of_every_type(name: str, dtype: torch.dtype) -> None:
    """Its output is v itself, so every rounding shows."""
    v = (1 + torch.arange(65) / 128).to(dtype).view(1, 1, 1, 65)
    q = torch.zeros_like(v)
    cache = rs.KVCache(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=65, dtype=dtype, storage=name)
    with cache.begin([1]) as turn:
        out = turn.prefill(q, v, v, layer=0)
        bound = turn.error_bound(q, layer=0).item()
    assert isinstance(out, torch.Tensor)
    error = (out.double() - v.double()).abs().max().item()
    assert 0 < error <= bound


def test_what_float16_cannot_hold_has_no_bound() -> None:
    v = torch.full((1, 1, 1, 4), 65504.0).half()
    cache = rs.KVCache(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, dtype=torch.float16, storage="int8")
    with cache.begin([1]) as turn:
        turn.prefill(torch.zeros_like(v), v, v, layer=0)
        assert turn.error_bound(torch.zeros_like(v), layer=0).isinf().all()
