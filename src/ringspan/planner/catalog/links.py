"""What does a link carry, to one peer and to many at once? Depends on how devices are wired, not on a line rate alone.

switch   every device reaches every other at the full rate (NVLink with NVSwitch, InfiniBand, PCIe with peer-to-peer)
mesh     a link to each peer: one message uses one of them, an exchange all (AMD Infinity Fabric)
host     every byte is written to the memory of the host and read again, at the same rate whomever it is for (PCIe of
         GeForce cards, which have no peer-to-peer copies; NVIDIA/nccl-tests#287)
bridge   peer-to-peer copies cross the bridges of a CPU, which are no switch: an exchange shares what one pair gets
         (NVIDIA/nccl#1603: 2 GB/s for an exchange of 4, where copies through the host reached 18)
torus    neighbours only: an exchange crosses a quarter of a side per axis on average (TPU)
"""

from typing import Any, Literal, NamedTuple

from ringspan.errors import UnsupportedError
from ringspan.planner.catalog.constants import Constants, fitted
from ringspan.planner.catalog.files import find, plain, read_data

Wiring = Literal["switch", "mesh", "host", "bridge", "torus"]
WIRINGS: tuple[Wiring, ...] = ("switch", "mesh", "host", "bridge", "torus")
THROUGH_CPU: tuple[Wiring, ...] = ("host", "bridge")
POINT_TO_POINT_SHARE = 0.844  # of NVLink 4: 380 of 450 GB/s (NVIDIA/nccl#1264); taken for all links inside a node
NEAR_LATENCY_S = 1.2e-5  # unconfirmed: NCCL inside a node starts a message in 10 to 20 µs; no source was found


class Link(NamedTuple):
    """One way, for one device: a message of n bytes takes latency_s + n / bytes_per_s.

    An exchange is a step in which every rank sends to several others; `for_group` says what it reaches among so many.
    `steals` is compute lost per second of a message: a CPU that carries messages does not compute meanwhile.
    """

    id: str
    bytes_per_s: float
    latency_s: float
    exchange_bytes_per_s: float
    exchange_latency_s: float
    line_bytes_per_s: float
    steals: float = 0.0
    wiring: Wiring = "switch"
    axes: int = 1  # of a torus

    def for_group(self, size: int) -> "Link":
        """The same link with the rate of an exchange among `size` devices."""
        if size < 2 or self.wiring in ("switch", "host"):
            return self
        pair = self.bytes_per_s
        if self.wiring == "mesh":
            return self._replace(exchange_bytes_per_s=min(self.exchange_bytes_per_s, pair * (size - 1)))
        if self.wiring == "bridge":
            return self._replace(exchange_bytes_per_s=pair / (size - 1))
        side = max(2.0, size ** (1 / self.axes))  # 2 links per axis, of which a byte takes side/4 per axis
        return self._replace(exchange_bytes_per_s=min(self.exchange_bytes_per_s, 8 * pair / side))


def load_network(name: str, constants: Constants | None = None) -> Link:
    """A network between nodes by id, with what messages reach of its line rate."""
    reached = constants or fitted()
    entry = _entry(name, "network")
    if entry.get("wiring"):
        raise UnsupportedError(
            "it connects devices inside a node", argument="network", value=name, remedy="use one between nodes"
        )
    line = entry["one_way_bytes_per_s"]
    return Link(
        name,
        reached.network_share * line,
        reached.network_latency_s,
        max(reached.network_share, reached.exchange_share) * line,
        reached.exchange_latency_s,
        line,
    )


def load_scale_up(
    name: str, constants: Constants | None = None, *, rate: float | None = None, together: float | None = None
) -> Link:
    """A link inside a node by id; `rate` to one peer, `together` to all, where the device has its own."""
    entry, reached = _entry(name, "link"), constants or fitted()
    wiring = entry.get("wiring")
    if wiring not in WIRINGS:
        raise UnsupportedError("it connects nodes", argument="link", value=name, remedy="use one inside a node")
    line = rate or entry.get("per_peer_one_way_bytes_per_s") or entry["one_way_bytes_per_s"]
    share = reached.bridge_share if wiring in THROUGH_CPU else POINT_TO_POINT_SHARE
    everything = together or entry["one_way_bytes_per_s"]
    return Link(
        name,
        share * line,
        NEAR_LATENCY_S,
        share * max(line, everything),
        NEAR_LATENCY_S,
        line,
        wiring=wiring,
        axes=entry.get("axes", 1),
    )


def _entry(name: str, argument: str) -> dict[str, Any]:
    return plain(find(read_data("devices.toml")["link"], name, "link", argument))
