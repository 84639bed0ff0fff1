"""Machines by name: what the catalogue has, what is refused, and the advice."""

import pytest

from widefield.planner.machines import cluster_of
from widefield.planner.machines.catalogue import ALIASES, DEVICES, INSIDE, LINKS_OF, NETWORK_ALIASES, NETWORKS


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "nodes", "each", "device", "inside", "between"),
    [
        ("8xH100", 1, 8, "H100-80G", "NVLink 4", "InfiniBand NDR"),
        ("4x8xA100-80G", 4, 8, "A100-80G", "NVLink 3", "InfiniBand HDR"),
        ("2xrtx4090", 1, 2, "RTX4090", "PCIe 4 x16", "10 Gbit Ethernet"),
        ("2x4x4090", 2, 4, "RTX4090", "PCIe 4 x16", "10 Gbit Ethernet"),
        ("H200", 1, 1, "H200", "NVLink 4", "InfiniBand NDR"),
        ("2048 x 8 x H100 @ 100gbe", 2048, 8, "H100-80G", "NVLink 4", "100 Gbit Ethernet"),
        ("cpu", 1, 1, "cpu", "gloo over loopback", "gloo over loopback"),
        ("cpu:2", 1, 2, "cpu", "gloo over loopback", "gloo over loopback"),
        ("3x2xcpu", 3, 2, "cpu", "gloo over loopback", "10 Gbit Ethernet"),
    ],
)
def test_a_cluster_is_a_line_of_text(text, nodes, each, device, inside, between):
    cluster = cluster_of(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.ranks) == (nodes, each, nodes * each)
    assert (cluster.device.name, cluster.inside.name, cluster.between.name) == (device, inside, between)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xH10", "no device 'h10' in the catalogue; did you mean 'h100'"),
        ("8xzx81", "It has: V100-16G"),
        ("eight", "no device 'eight'"),
        ("", "no cluster: ''; write devices, or nodes x devices, as 8xH100"),
        ("8x", "no cluster: '8x'"),
        ("0xH100", "has 0 devices; write 1 to"),
        ("9999x9999xH100", "has 99980001 devices; write 1 to"),
        ("cpu:0", "has 0 ranks; write cpu:1"),
        ("2xcpu:2", "gives the ranks of a machine twice; write cpu:2"),
        ("h100:8", "the number of GPUs comes first; write 8xh100"),
        ("8xH100@ibb", "no network 'ibb' in the catalogue; did you mean 'ib'"),
        ("measured", "this machine was not measured yet; run widefield plan --calibrate"),
    ],
)
def test_what_is_no_cluster_is_refused_in_words(text, words):
    with pytest.raises(ValueError) as refused:
        cluster_of(text)
    assert words in str(refused.value)


def test_options_are_checked():
    with pytest.raises(ValueError, match="a network is not faster than its cards; write 1 or more"):
        cluster_of("8xH100", oversubscription=0.5)
    with pytest.raises(ValueError, match="no network 'token-ring'"):
        cluster_of("2x8xH100", network="token-ring")


def test_every_figure_has_a_source():
    rows = [*DEVICES.values(), *INSIDE.values(), *NETWORKS.values()]
    assert len(DEVICES) >= 18
    assert all(len(row.source) > 15 for row in rows)
    assert set(ALIASES.values()) | set(LINKS_OF) <= set(DEVICES)
    assert set(NETWORK_ALIASES.values()) | {network for _, network in LINKS_OF.values()} <= set(NETWORKS)
    assert {inside for inside, _ in LINKS_OF.values()} <= set(INSIDE)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_figures_are_in_their_units(device):
    """A slip of a thousand, or of bits for bytes, is outside of these bounds."""
    assert 8 * 2**30 < device.memory_bytes < 300 * 2**30
    assert 2e11 < device.memory_bytes_per_second < 1e13
    assert 7e12 < device.peak_flops("float32") <= device.peak_flops("tf32") <= device.peak_flops("float16") < 3e15
    assert device.peak_flops("float64") <= device.peak_flops("float32")
    # Operations that a byte of memory pays for: tens to hundreds on every GPU since Volta.
    assert 40 < device.peak_flops("float16") / device.memory_bytes_per_second < 500


def test_a_network_is_shared_by_the_devices_of_a_node():
    one, eight = cluster_of("2x1xL4@100gbe"), cluster_of("2x8xL4@100gbe")
    assert one.network_bytes_per_second() == 8 * eight.network_bytes_per_second()
    assert cluster_of("2x8xH100").network_bytes_per_second() == cluster_of("2x4xH100").network_bytes_per_second()
    assert cluster_of("2x8xH100", oversubscription=3).network_bytes_per_second() == pytest.approx(15e9)


def test_ranks_lie_node_by_node():
    cluster = cluster_of("4x8xH100")
    assert cluster.spread(range(8)) == (1, 8)
    assert cluster.spread(range(0, 32, 8)) == (4, 1)
    assert cluster.spread(range(32)) == (4, 8)
    assert cluster.link_of([0, 7]) is cluster.inside and cluster.link_of([7, 8]) is cluster.between


def test_advice_compares_in_one_unit():
    """900 GB/s of memory want 90 GB/s of network, which is 720 Gbit/s."""
    (network, equal) = cluster_of("4x8xV100@100gbe").advice()
    assert "1.41 GB/s (11 Gbit/s)" in network and "900 GB/s, which would be 90 GB/s (720 Gbit/s)" in network
    assert "the slowest device sets the pace" in equal
    assert any("not by NVLink" in line for line in cluster_of("2xrtx4090").advice())
    assert cluster_of("H100").advice() == []


def test_a_price_is_the_users():
    assert cluster_of("4x8xA100").dollars_per_hour() is None
    assert cluster_of("4x8xA100", dollars_per_hour=2.0).dollars_per_hour() == 64.0
