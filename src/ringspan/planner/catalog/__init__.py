"""Models, devices and links by name, with a source for every figure; see `data/*.toml`."""

from ringspan.planner.catalog.devices import (
    Attention,
    Cluster,
    Device,
    Link,
    device_names,
    load_device,
    load_link,
    parse_devices,
)
from ringspan.planner.catalog.models import load_model, model_names
from ringspan.planner.catalog.shapes import Experts, Latent, Model, Video, Window

__all__ = [
    "Attention",
    "Cluster",
    "Device",
    "Experts",
    "Latent",
    "Link",
    "Model",
    "Video",
    "Window",
    "device_names",
    "load_device",
    "load_link",
    "load_model",
    "model_names",
    "parse_devices",
]
