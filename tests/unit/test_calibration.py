"""Curves from measurements: a machine that is exactly like the model is found again, and the file is read back."""

import pytest

import ringspan as rs
from ringspan.bench.calibration import Calibration, Tiles, fit_attention, fit_link, format_calibration
from ringspan.bench.predict import predict_pass
from ringspan.bench.settings import Settings
from ringspan.planner.catalog import load_device
from ringspan.planner.cost import attention_flops_per_s

LENGTHS = (512, 1024, 2048, 4096, 8192)
LIMIT, RAMP, CAUSAL_RAMP, CALL_S = 65e9, 50.0, 600.0, 1e-4
BACKWARD_LIMIT, BACKWARD_RAMP, BACKWARD_CAUSAL_RAMP = 52e9, 80.0, 900.0


def points(ramp, share, limit=LIMIT):
    for n in LENGTHS:
        flops = 4.0 * 64 * n * n * share
        yield n, flops, flops * (n + ramp) / n / limit + CALL_S


FORWARD = Tiles(list(points(RAMP, 1.0)), list(points(CAUSAL_RAMP, 0.5)))
BACKWARD = Tiles(
    list(points(BACKWARD_RAMP, 2.5, BACKWARD_LIMIT)), list(points(BACKWARD_CAUSAL_RAMP, 1.25, BACKWARD_LIMIT))
)


def calibration():
    attention = fit_attention("made up", FORWARD, BACKWARD)
    link = fit_link([(n, 1e-4 + n / 1e9) for n in (4096, 2**20, 2**24)])
    return Calibration(
        attention, link, 0.5, 1e10, 16e9, 20e9, 80e9, 2, "made up", (("full", 512, 0.1),), ((4096, 1e-4),)
    )


def test_the_curve_that_made_the_points_is_found():
    attention = calibration().attention
    assert attention.flops_per_s == pytest.approx(LIMIT, rel=1e-3)
    assert attention.ramp_full_tokens == pytest.approx(RAMP, rel=0.02)
    assert attention.ramp_causal_tokens == pytest.approx(CAUSAL_RAMP, rel=0.02)
    assert attention.call_s == pytest.approx(CALL_S, rel=0.05)
    assert attention.backward_ratio == pytest.approx(BACKWARD_LIMIT / LIMIT, rel=0.01)
    assert attention.backward_ramp_full_tokens == pytest.approx(BACKWARD_RAMP, rel=0.05)
    assert attention.backward_ramp_causal_tokens == pytest.approx(BACKWARD_CAUSAL_RAMP, rel=0.02)


def test_a_link_is_found_and_one_rank_needs_none():
    rate, latency_s = calibration().link
    assert rate == pytest.approx(1e9, rel=1e-3)
    assert latency_s == pytest.approx(1e-4, rel=1e-2)
    assert fit_link([]) == (1e12, 0.0)


def test_noise_makes_no_negative_coefficient():
    noisy = [(n, 1.0 * n * n, 1e-9 * n**1.9) for n in LENGTHS]
    attention = fit_attention("x", Tiles(noisy, list(points(0.0, 0.5))), BACKWARD)
    assert min(attention.ramp_full_tokens, attention.ramp_causal_tokens, attention.call_s) >= 0


def test_the_file_is_a_device(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(format_calibration(calibration()))
    device = load_device(str(path))
    rate = attention_flops_per_s(device.attention, 64, 8192, is_causal=False, is_backward=False)
    assert rate == pytest.approx(LIMIT * 8192 / (8192 + RAMP), rel=1e-3)
    assert (device.near.steals, device.node_size) == (0.5, 2)
    path.write_text("[attention]\n")
    with pytest.raises(rs.RingspanError, match="ringspan bench calibrate"):
        load_device(str(path))


@pytest.mark.parametrize("has_backward", [False, True])
def test_a_measurement_is_predicted_from_its_own_schedule(tmp_path, has_backward):
    """Two ranks, full, contiguous: each attends two tiles of 4096 × 4096 and merges one; backward, it adds one."""
    path = tmp_path / "mine.toml"
    path.write_text(format_calibration(calibration()))
    device = load_device(str(path))
    layout = rs.contiguous(8192, 2)
    shape = {"seq_len": 8192, "batch": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "dtype": "float32"}
    run = {"algorithm": "pass_kv", "direction": None, "mesh": None, "kernel": "auto", "has_backward": has_backward}
    settings = Settings(
        **shape,
        mask=rs.full(),
        layout=layout,
        layout_name="contiguous",
        **run,
        carrier="gloo",
        repeats=1,
        seed=0,
        timeout_s=1.0,
    )
    tile_s = 4 * 64 * 4096**2 * (4096 + RAMP) / 4096 / LIMIT + CALL_S
    merge_s = 4096 * 64 * 26 / 16e9 * (16e9 / device.merge_bytes_per_s)
    stolen_s = 0.5 * 4096 * 64 * 2 * 4 / device.near.bytes_per_s
    predicted_s = sum(predict_pass(settings, device, side).makespan_s for side in settings.passes())
    expected_s = 2 * tile_s + merge_s + stolen_s
    if has_backward:  # k and v travel, and dk and dv back, in float32
        rows = 4096 + BACKWARD_RAMP
        expected_s += 2 * (2.5 * 4 * 64 * 4096 * rows / BACKWARD_LIMIT + CALL_S)
        expected_s += merge_s * 24 / 26 + 2 * stolen_s
    assert predicted_s == pytest.approx(expected_s, rel=0.01)
