"""How fast are devices and links? By name, with the share of their peak that they reach.

Peaks and line rates come from `devices.toml`; the shares reached from `curves.toml`, which `benchmarks/fit_curves.py`
writes from published measurements; unmeasured choices (kernel, network) from `defaults.toml`. A file of `ringspan bench
calibrate` replaces all three.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ringspan.errors import ShapeError, UnsupportedError
from ringspan.planner.catalog.files import find, plain, read_data, read_toml, unverified

MOST_DEVICES = 2**14
LARGEST_FIGURE = 1e30  # in a calibrated file, and 1/it the smallest, so that products of a few stay finite

MAY_BE_0 = (  # figures of a calibrated file that may be 0
    *("latency_s", "steals", "call_s", "softmax_dims", "ramp_full_tokens", "ramp_causal_tokens"),
    *("backward_ramp_full_tokens", "backward_ramp_causal_tokens"),
)


class Link(NamedTuple):
    """One direction of a device's link: a message of n bytes takes latency_s + n / bytes_per_s.

    An exchange is a step in which every rank sends to several others; it uses more of a link than single messages do.
    `steals` is compute lost per second of a message: a CPU that carries messages computes less.
    """

    id: str
    bytes_per_s: float
    latency_s: float
    exchange_bytes_per_s: float
    exchange_latency_s: float
    line_bytes_per_s: float
    steals: float = 0.0


class Attention(NamedTuple):
    """How fast a kernel attends on a device; see `cost.attention_flops_per_s`."""

    kernel: str
    flops_per_s: float  # for long full tiles of infinitely wide heads
    softmax_dims: float
    ramp_full_tokens: float
    ramp_causal_tokens: float
    backward_ratio: float
    backward_ramp_full_tokens: float
    backward_ramp_causal_tokens: float
    wide_head_ratio: float
    call_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """One device, described by the rates that it reaches, not by its peaks."""

    id: str
    attention: Attention
    dense_flops_per_s: float
    fp8_ratio: float
    memory_bytes: float
    memory_bytes_per_s: float
    merge_bytes_per_s: float
    near: Link
    far: Link
    node_size: int
    notes: tuple[str, ...] = ()


class Cluster(NamedTuple):
    """`nodes` of `per_node` devices each."""

    nodes: int
    per_node: int
    device: Device

    @property
    def num_devices(self) -> int:
        return self.nodes * self.per_node


def parse_devices(text: str, network: str | None = None, kernel: str | None = None) -> Cluster:
    """Parse NODESxPER_NODExDEVICE or COUNTxDEVICE, as in 16x8xh100, 8xh100 or 2xFILE.toml."""
    found = re.fullmatch(r"(?:(\d{1,7})x)?(?:(\d{1,7})x)?(.+)", text.strip())
    if found is None or found[1] is None or found[3].startswith("-"):
        raise ShapeError(
            "this names no devices",
            argument="devices",
            value=text,
            remedy="use COUNTxDEVICE or NODESxPER_NODExDEVICE, such as 8xh100, 16x8xh100",
        )
    device = load_device(found[3], network, kernel)
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


def load_device(name: str, network: str | None = None, kernel: str | None = None) -> Device:
    """Load a device of the catalogue by id or alias, or from the path of a calibrated file."""
    if name.endswith(".toml"):
        for argument, value in (("network", network), ("kernel", kernel)):
            if value is not None:
                raise UnsupportedError(
                    f"{name} has its own, as measured", argument=argument, value=value, remedy="leave it out"
                )
        return _read_calibrated(Path(name))
    data, defaults, curves = (read_data(file) for file in ("devices.toml", "defaults.toml", "curves.toml"))
    name = defaults["alias"].get(name.lower(), name.lower())
    entry = find([*data["device"], *_aliases(defaults)], name, "device")
    figures = plain(entry)
    notes = [f"{name}: {figures['notes']}"] if "notes" in figures else []
    doubtful = unverified(entry)
    notes += [f"{name}: not confirmed: {', '.join(doubtful)}"] if doubtful else []
    peak = figures.get("peak_bf16_dense_flops_per_s", figures.get("peak_fp16_dense_flops_per_s"))
    memory = defaults["memory"].get(name, {})
    memory_bytes = figures.get("memory_bytes", memory.get("bytes"))
    memory_rate = figures.get("memory_bytes_per_s", memory.get("bytes_per_s"))
    for key, value in (("peak", peak), ("memory_bytes", memory_bytes), ("memory_bytes_per_s", memory_rate)):
        if value is None:
            raise UnsupportedError(
                f"{name}: the catalogue has no {key} for it; use another device, or a calibrated file"
            )
    assert peak is not None
    attention, note = _attention(name, peak, kernel or defaults["kernel"].get(name, defaults["kernel"]["default"]))
    notes += [note] if note else []
    reached = curves["memory"]["efficiency"] * memory_rate
    return Device(
        id=name,
        attention=attention,
        dense_flops_per_s=curves["dense"]["efficiency"] * peak,
        fp8_ratio=defaults["fp8"].get(name, 1.0),
        memory_bytes=memory_bytes,
        memory_bytes_per_s=reached,
        merge_bytes_per_s=reached,
        near=_scale_up(name, figures),
        far=load_link(network or defaults["network"].get(name, defaults["network"]["default"])),
        node_size=defaults["node_size"],
        notes=tuple(notes),
    )


def device_names() -> list[str]:
    """Return all ids and aliases of the catalogue."""
    return [*read_data("defaults.toml")["alias"], *(entry["id"] for entry in read_data("devices.toml")["device"])]


def load_link(name: str) -> Link:
    """Load a network between nodes by id, with the share of its line rate that messages reach."""
    figures = plain(find(read_data("devices.toml")["link"], name, "link"))
    return _link(name, figures["one_way_bytes_per_s"], read_data("curves.toml")["network"]["efficiency"])


def _aliases(defaults: dict[str, Any]) -> list[dict[str, Any]]:
    """Return aliases as entries, so that suggestions include them."""
    return [{"id": alias} for alias in defaults["alias"]]


def _attention(name: str, peak: float, kernel: str) -> tuple[Attention, str]:
    curves = read_data("curves.toml")["attention"]
    if kernel not in curves:
        raise UnsupportedError(
            "no measured curve of this kernel is known",
            argument="kernel",
            value=kernel,
            remedy=f"use one of {', '.join(curves)}",
        )
    curve, known = curves[kernel], curves[kernel]["efficiency"]
    note = ""
    efficiency = known.get(name)
    if efficiency is None:
        kin = read_data("defaults.toml")["kin"]
        other = kin.get(name, kin["default"])
        if other not in known:
            other = kin["default"]
        efficiency = known[other]
        note = f"no measurement of {kernel} on {name}: taken to reach the share of its peak that {other} does"
    second = curves["fa2"]
    return Attention(
        kernel=kernel,
        flops_per_s=efficiency * peak,
        softmax_dims=curve["softmax_dims"],
        ramp_full_tokens=curve["ramp_full_tokens"],
        ramp_causal_tokens=curve["ramp_causal_tokens"],
        backward_ratio=second["backward_ratio"],
        backward_ramp_full_tokens=second["backward_ramp_full_tokens"],
        backward_ramp_causal_tokens=second["backward_ramp_causal_tokens"],
        wide_head_ratio=curve.get("wide_head_ratio", 1.0),
    ), note


def _scale_up(name: str, figures: dict[str, Any]) -> Link:
    """Return the link inside a node; a ring or a single send uses one peer's share if each peer has its own link."""
    rate = figures.get("scale_up_per_peer_one_way_bytes_per_s", figures.get("scale_up_one_way_bytes_per_s"))
    link = figures.get("scale_up_link", read_data("defaults.toml")["scale_up"].get(name))
    if link is None:
        raise UnsupportedError(f"{name}: the catalogue names no link between its devices; use another device")
    if rate is None:
        rate = plain(find(read_data("devices.toml")["link"], link, "link"))["one_way_bytes_per_s"]
    reached = _link(link, rate, read_data("curves.toml")["scale_up"]["efficiency"])
    together = figures.get("scale_up_one_way_bytes_per_s", rate) / rate
    return reached._replace(exchange_bytes_per_s=reached.bytes_per_s * together)


def _link(name: str, line_rate: float, efficiency: float) -> Link:
    curve = read_data("curves.toml")["network"]
    exchange = max(efficiency, curve["exchange_efficiency"])
    return Link(
        name,
        efficiency * line_rate,
        curve["latency_s"],
        exchange * line_rate,
        curve["exchange_latency_s"],
        line_rate,
    )


def _read_calibrated(path: Path) -> Device:
    data = read_toml(path)
    try:
        attention, link = data["attention"], data["link"]
        rate, latency_s, steals = (_figure(path, link, key) for key in ("bytes_per_s", "latency_s", "steals"))
        near = Link(f"{path.stem} link", rate, latency_s, rate, latency_s, rate, steals)
        curve = {key: _figure(path, attention, key) for key in Attention._fields if key != "kernel"}
        return Device(
            id=path.stem,
            attention=Attention(kernel=str(attention["kernel"]), **curve),
            dense_flops_per_s=_figure(path, data, "dense_flops_per_s"),
            fp8_ratio=1.0,
            memory_bytes=_figure(path, data, "memory_bytes"),
            memory_bytes_per_s=_figure(path, data, "memory_bytes_per_s"),
            merge_bytes_per_s=_figure(path, data, "merge_bytes_per_s"),
            near=near,
            far=near,
            node_size=int(_figure(path, data, "node_size")),
            notes=tuple(data.get("notes", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{path} is not a calibrated device ({error!r}); write one with ringspan bench calibrate {path}"
        ) from None


def _figure(path: Path, table: dict[str, Any], key: str) -> float:
    """Read a number of a calibrated file: divisors must be above 0, additive times may be 0."""
    value = table[key]
    may_be_0 = key in MAY_BE_0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (1 / LARGEST_FIGURE <= value <= LARGEST_FIGURE or (may_be_0 and value == 0)):
        raise UnsupportedError(
            f"{path}: {key}={value!r}: expected a number {'of at least' if may_be_0 else 'above'} 0 and up to "
            f"{LARGEST_FIGURE:g}; write the file anew with ringspan bench calibrate {path}"
        )
    return float(value)
