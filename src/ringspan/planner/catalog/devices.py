"""How fast are devices and links? By name, with the share of their peak that they reach.

Peaks and line rates come from `devices.toml`; the share that is reached comes from the fitted constants; choices
(which network) come from `defaults.toml`. A file that `ringspan bench calibrate` wrote takes the place
of all three.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ringspan.errors import ShapeError, UnsupportedError
from ringspan.planner.catalog.constants import Constants, fitted
from ringspan.planner.catalog.files import find, plain, read_data, read_toml, unverified
from ringspan.planner.catalog.kernels import NEWEST, AttentionCurve, Silicon, attention_curve
from ringspan.planner.catalog.links import Link, load_network, load_scale_up

MOST_DEVICES = 2**14
LARGEST_FIGURE = 1e30  # in a calibrated file, and 1/it the smallest, so that products of a few stay finite

MAY_BE_0 = (  # figures of a calibrated file that may be 0
    *("latency_s", "steals", "call_s", "softmax_dims", "ramp_full_tokens", "ramp_causal_tokens"),
    *("backward_ramp_full_tokens", "backward_ramp_causal_tokens"),
)


@dataclass(frozen=True, slots=True)
class Device:
    """One device, described by the rates that it reaches, not by its peaks."""

    id: str
    attention: AttentionCurve
    dense_flops_per_s: float
    fp8_ratio: float
    memory_bytes: float
    memory_bytes_per_s: float
    merge_bytes_per_s: float
    near: Link
    far: Link
    node_size: int
    constants: Constants
    has_curve: bool = False  # whether the kernel was measured on this device, or comes from peaks alone
    notes: tuple[str, ...] = ()


MATMUL_SHARE = 0.8  # of the peak, where no matrix product was measured: the median of those in devices.toml that were


class Cluster(NamedTuple):
    """`nodes` of `per_node` devices each."""

    nodes: int
    per_node: int
    device: Device

    @property
    def num_devices(self) -> int:
        return self.nodes * self.per_node


def parse_devices(text: str, network: str | None = None, kernel: str | None = None, link: str | None = None) -> Cluster:
    """NODESxPER_NODExDEVICE or COUNTxDEVICE, as in 16x8xh100, 8xh100 or 2xFILE.toml."""
    found = re.fullmatch(r"(?:(\d{1,7})x)?(?:(\d{1,7})x)?(.+)", text.strip())
    if found is None or found[1] is None or found[3].startswith("-"):
        raise ShapeError(
            "this names no devices",
            argument="devices",
            value=text,
            remedy="use COUNTxDEVICE or NODESxPER_NODExDEVICE, such as 8xh100, 16x8xh100",
        )
    device = load_device(found[3], network, kernel, link)
    if found[2] is not None:
        nodes, per_node = int(found[1]), int(found[2])
    else:
        count = int(found[1])
        per_node = min(count, device.node_size)
        nodes = count // per_node if per_node else 0
        if per_node and count % per_node:
            raise ShapeError(
                f"{count} devices do not fill nodes of {per_node}",
                argument="devices",
                value=text,
                remedy=f"write NODESxPER_NODExDEVICE, such as {nodes + 1}x{per_node}x{found[3]}",
            )
    if nodes < 1 or per_node < 1:
        raise ShapeError(
            "a cluster has at least 1 device", argument="devices", value=text, remedy="use a count above 0"
        )
    if nodes * per_node > MOST_DEVICES:
        raise ShapeError(
            f"planning takes time for every step of a ring over all {nodes * per_node:,} devices",
            argument="devices",
            value=text,
            remedy=f"use at most {MOST_DEVICES:,}",
        )
    return Cluster(nodes, per_node, device)


def load_device(
    name: str,
    network: str | None = None,
    kernel: str | None = None,
    link: str | None = None,
    constants: Constants | None = None,
) -> Device:
    """A device of the catalogue by id or alias, or the path of a calibrated file."""
    if name.endswith(".toml"):
        for argument, value in (("network", network), ("kernel", kernel), ("link", link)):
            if value is not None:
                raise UnsupportedError(
                    f"{name} has its own, as measured", argument=argument, value=value, remedy="leave it out"
                )
        return _read_calibrated(Path(name))
    return _load_device(name, network, kernel, link, constants or fitted())


@lru_cache(maxsize=512)
def _load_device(name: str, network: str | None, kernel: str | None, link: str | None, constants: Constants) -> Device:
    data, defaults = read_data("devices.toml"), read_data("defaults.toml")
    name = defaults["alias"].get(name.lower(), name.lower())
    entry = find([*data["device"], *_aliases(defaults)], name, "device", "devices")
    figures = plain(entry)
    doubtful = unverified(entry)
    peak = figures.get("peak_bf16_dense_flops_per_s", figures.get("peak_fp16_dense_flops_per_s"))
    memory = defaults["memory"].get(name, {})
    memory_bytes = figures.get("memory_bytes", memory.get("bytes"))
    memory_rate = figures.get("memory_bytes_per_s", memory.get("bytes_per_s"))
    for key, value in (("peak", peak), ("memory_bytes", memory_bytes), ("memory_bytes_per_s", memory_rate)):
        if value is None:
            raise UnsupportedError(
                f"the catalogue has no {key} for it", argument=name, remedy="use another device, or a calibrated file"
            )
    assert peak is not None
    assert memory_bytes is not None
    silicon = Silicon(figures.get("family", "unknown"), peak, figures.get("exponentials_per_s"))
    if kernel in (None, "newest"):
        kernel = NEWEST.get(silicon.family, "fa2") if kernel else "fa2"
    assert kernel is not None
    has_curve = name in defaults["measured_kernels"][kernel] if kernel in defaults["measured_kernels"] else False
    notes = [f"{name}: {figures['notes']}"] if "notes" in figures else []
    notes += [f"{name}: not confirmed: {', '.join(doubtful)}"] if doubtful else []
    notes += [] if has_curve else [f"no measurement of {kernel} on {name}: from its peak and exponentials"]
    return Device(
        id=name,
        attention=attention_curve(name, kernel, silicon, constants),
        dense_flops_per_s=constants.dense_share * figures.get("measured_bf16_matmul_flops_per_s", MATMUL_SHARE * peak),
        fp8_ratio=defaults["fp8"].get(name, 1.0),
        memory_bytes=memory_bytes,
        memory_bytes_per_s=constants.memory_share * memory_rate,
        merge_bytes_per_s=constants.memory_share * memory_rate,
        near=_scale_up(name, figures, link, constants),
        far=load_network(network or defaults["network"].get(name, defaults["network"]["default"]), constants),
        node_size=figures.get("node_size", defaults["node_size"]),
        constants=constants,
        has_curve=has_curve,
        notes=tuple(notes),
    )


def device_names() -> list[str]:
    """Return all ids and aliases of the catalogue."""
    return [*read_data("defaults.toml")["alias"], *(entry["id"] for entry in read_data("devices.toml")["device"])]


def _aliases(defaults: dict[str, Any]) -> list[dict[str, Any]]:
    """Return aliases as entries, so that suggestions include them."""
    return [{"id": alias} for alias in defaults["alias"]]


def _scale_up(name: str, figures: dict[str, Any], link: str | None, constants: Constants) -> Link:
    """The requested link, or the device's own link with its rates."""
    if link is not None:
        return load_scale_up(link, constants)
    own = figures.get("scale_up_link", read_data("defaults.toml")["scale_up"].get(name))
    if own is None:
        raise UnsupportedError(
            "the catalogue names no link between its devices", argument=name, remedy="use another device"
        )
    together = figures.get("scale_up_one_way_bytes_per_s")
    rate = figures.get("scale_up_per_peer_one_way_bytes_per_s", together)
    return load_scale_up(own, constants, rate=rate, together=together)


def _read_calibrated(path: Path) -> Device:
    data = read_toml(path)
    try:
        attention, link = data["attention"], data["link"]
        rate, latency_s, steals = (_figure(path, link, key) for key in ("bytes_per_s", "latency_s", "steals"))
        near = Link(f"{path.stem} link", rate, latency_s, rate, latency_s, rate, steals)
        curve = {key: _figure(path, attention, key) for key in AttentionCurve._fields if key != "kernel"}
        return Device(
            id=path.stem,
            attention=AttentionCurve(kernel=str(attention["kernel"]), **curve),
            dense_flops_per_s=_figure(path, data, "dense_flops_per_s"),
            fp8_ratio=1.0,
            memory_bytes=_figure(path, data, "memory_bytes"),
            memory_bytes_per_s=_figure(path, data, "memory_bytes_per_s"),
            merge_bytes_per_s=_figure(path, data, "merge_bytes_per_s"),
            near=near,
            far=near,
            node_size=int(_figure(path, data, "node_size")),
            constants=fitted(),
            has_curve=True,
            notes=tuple(data.get("notes", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{path} is not a calibrated device ({error!r})", remedy=f"write one with ringspan bench calibrate {path}"
        ) from None


def _figure(path: Path, table: dict[str, Any], key: str) -> float:
    """Read a number of a calibrated file: divisors must be above 0, additive times may be 0."""
    value = table[key]
    may_be_0 = key in MAY_BE_0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (1 / LARGEST_FIGURE <= value <= LARGEST_FIGURE or (may_be_0 and value == 0)):
        raise UnsupportedError(
            f"{path}: {key}={value!r}: expected a number {'of at least' if may_be_0 else 'above'} 0 "
            f"and up to {LARGEST_FIGURE:g}",
            remedy=f"write the file anew with ringspan bench calibrate {path}",
        )
    return float(value)
