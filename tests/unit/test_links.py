"""What links carry: to one peer, to many at once, and as collectives, by hand."""

import pytest

from ringspan.algorithms import Ring, Sequence
from ringspan.errors import UnsupportedError
from ringspan.planner.catalog import fitted, load_device, load_network, load_scale_up, parse_devices
from ringspan.planner.catalog.kernels import Silicon, attention_curve
from ringspan.planner.cost import Shard, attention_flops_per_s
from ringspan.planner.software import MEGATRON, RINGSPAN, SOFTWARE, USP, find_software
from ringspan.planner.timeline import attention_timeline


def shard(software, heads=32, kv_heads=8):
    return Shard(1, heads, kv_heads, 128, 128, 2 * kv_heads * 128, 2, "bf16", software)


def test_nvlink_gives_an_exchange_what_it_gives_a_pair():
    link = load_scale_up("nvlink4")
    assert link.bytes_per_s == pytest.approx(0.844 * 450e9)
    assert link.for_group(8).exchange_bytes_per_s == link.bytes_per_s


def test_a_mesh_uses_a_link_to_every_peer():
    near = load_device("mi300x").near
    assert near.bytes_per_s == pytest.approx(0.844 * 64e9)
    assert near.for_group(4).exchange_bytes_per_s == pytest.approx(3 * 0.844 * 64e9)
    assert near.for_group(8).exchange_bytes_per_s == pytest.approx(0.844 * 448e9)


def test_copies_through_the_memory_of_the_host_are_as_slow_for_all_as_for_a_pair():
    """GeForce cards have no peer-to-peer copies."""
    near = load_device("rtx-4090").near
    assert near.wiring == "host"
    assert near.for_group(8).exchange_bytes_per_s == near.bytes_per_s == pytest.approx(fitted().bridge_share * 31e9)


def test_an_exchange_across_the_bridges_of_a_cpu_shares_what_one_pair_gets():
    """So that 8 devices exchange 1/7 as fast as 2, which is what 8 L20 were measured to do."""
    near = load_device("l20").near
    assert near.bytes_per_s == pytest.approx(fitted().bridge_share * 31e9)
    assert near.for_group(2).exchange_bytes_per_s == near.bytes_per_s
    assert near.for_group(8).exchange_bytes_per_s == pytest.approx(near.bytes_per_s / 7)


def test_a_torus_slows_exchanges_down_by_its_side():
    """A byte takes a quarter of a side per axis; 16 × 16 chips with 4 links of 42.2 GB/s carry 8/16 of one each."""
    near = load_device("tpu-v5e").near
    assert near.wiring == "torus"
    assert near.for_group(256).exchange_bytes_per_s == pytest.approx(8 / 16 * near.bytes_per_s)
    assert near.for_group(4).exchange_bytes_per_s == pytest.approx(0.844 * 186e9)


def test_the_link_inside_a_node_can_be_chosen_and_is_not_a_network():
    assert load_device("rtx-4090", link="pcie4-x16-p2p").near.wiring == "switch"
    with pytest.raises(UnsupportedError, match="link='infiniband-hdr'"):
        load_scale_up("infiniband-hdr")
    with pytest.raises(UnsupportedError, match="network='nvlink4'"):
        load_network("nvlink4")


def test_72_devices_share_the_fast_link_of_a_rack():
    assert parse_devices("72xgb200")[:2] == (1, 72)
    assert parse_devices("144xgb300")[:2] == (2, 72)


@pytest.mark.parametrize(("degree", "bytes_sent"), [(2, 0.5), (4, 0.75), (8, 0.875)])
def test_ulysses_through_the_host_is_bound_by_the_bridge(degree, bytes_sent):
    """q, K, V there and back out; the bridge carries one pair's rate for all. The last results are waited for."""
    device, tokens = load_device("l20"), 32768 // 8
    near = device.near.for_group(degree)
    near = near._replace(latency_s=0.0, exchange_latency_s=0.0)
    timeline = attention_timeline(
        "ulysses",
        Ring(degree, 8, degree),
        Sequence(tokens * degree, 0, True, "zigzag"),
        shard(USP),
        _with(device, near),
    )
    one = shard(USP)
    nbytes = tokens * (2 * one.q_bytes + one.kv_bytes) * bytes_sent
    by_hand = nbytes * (degree - 1) / near.bytes_per_s
    assert float(timeline.exposed_s.max()) == pytest.approx(by_hand, rel=0.02)


def _with(device, near):
    import dataclasses

    return dataclasses.replace(device, near=near)


def test_a_library_gathers_once_over_each_port_and_attends_by_one_kernel():
    """16 ranks on 2 nodes: 1 part leaves each device for the other node, 14 parts go round its own."""
    device = load_device("h100", kernel="fa3")
    sequence, ring = Sequence(16 * 8192, 0, True, "zigzag"), Ring(16, 8)
    ours, theirs = (
        attention_timeline("all_gather", ring, sequence, shard(software, 64), device)
        for software in (RINGSPAN, MEGATRON)
    )
    part = 8192 * shard(MEGATRON, 64).kv_bytes
    far = device.far.exchange_latency_s + part / device.far.exchange_bytes_per_s
    near = device.near.latency_s + 14 * part / device.near.bytes_per_s
    assert float(theirs.exposed_s.max()) == pytest.approx(max(far, near), rel=0.01)
    assert float(theirs.compute_s.max()) < float(ours.compute_s.max())  # no merges, longer tiles


@pytest.mark.parametrize("algorithm", ["pass_kv", "all_gather"])
def test_backward_adds_to_dq_once_for_every_block_that_comes_by(algorithm):
    device, sequence = load_device("h100"), Sequence(8 * 8192, 0, False, "contiguous")
    plain, heavy = (RINGSPAN._replace(gradient_bytes=nbytes) for nbytes in (0, 24))
    times = [
        float(attention_timeline(algorithm, Ring(8, 8), sequence, shard(one), device, is_backward=True).compute_s.max())
        for one in (plain, heavy)
    ]
    added = 7 * 8192 * 32 * 128 * 24 / device.merge_bytes_per_s
    assert times[1] - times[0] == pytest.approx(added, rel=1e-6)


def test_a_device_that_was_never_measured_gets_a_curve_of_its_own(subtests):
    """H20 has a seventh of the products of H100 and 60 % of its exponentials: more of its peak is reached."""
    shares = {}
    for name, peak in (("h100", 989e12), ("h20", 148e12), ("a100", 312e12)):
        with subtests.test(f"{name}, {peak}"):
            device = load_device(name)
            rate = attention_flops_per_s(device.attention, 128, 2**17, is_causal=False, is_backward=False)
            shares[name] = rate / peak
            assert device.has_curve == (name != "h20")
    assert shares["h100"] < 0.40 < shares["a100"] < shares["h20"] < 0.85


def test_a_curve_is_products_and_exponentials_one_after_the_other():
    reached = fitted()
    curve = attention_curve("x", "fa2", Silicon("ampere", 100e12, 1e12), reached)
    seconds_per_pair = 4 * 128 / (reached.fa2_share * 100e12) + reached.softmax_share / 1e12
    rate = attention_flops_per_s(curve, 128, 1e12, is_causal=False, is_backward=False)
    assert rate == pytest.approx(4 * 128 / seconds_per_pair, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "newest", "refused", "remedy"),
    [("h100", "fa3", "fa4", "use fa3 or fa2"), ("a100", "fa2", "fa3", "use fa2"), ("b200", "fa4", "fa3", "use fa4 or")],
)
def test_a_kernel_runs_on_the_family_that_it_was_made_for(name, newest, refused, remedy):
    assert load_device(name, kernel="newest").attention.kernel == newest
    with pytest.raises(UnsupportedError, match=f"kernel='{refused}': it does not run on .*{remedy}"):
        load_device(name, kernel=refused)


def test_flash_attention_4_reaches_on_b200_what_its_paper_prints():
    """arXiv 2603.05451: 1,613 TF/s for long sequences of head_dim 128."""
    curve = load_device("b200", kernel="fa4").attention
    rate = attention_flops_per_s(curve, 128, 1e9, is_causal=False, is_backward=False)
    assert rate == pytest.approx(1613e12, rel=0.02)


def test_software_is_found_by_name_and_says_what_it_does():
    assert find_software("megatron") is MEGATRON
    with pytest.raises(UnsupportedError, match=r"software='vllm': .*use one of ringspan"):
        find_software("vllm")
    assert all(one.about and name == one.name for name, one in SOFTWARE.items())
