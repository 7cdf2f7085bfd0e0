"""Models, devices and links by name, with a source for every figure; see `data/*.toml`."""

from ringspan.planner.catalog.constants import Constants, fitted, fitted_without
from ringspan.planner.catalog.devices import Cluster, Device, device_names, load_device, parse_devices
from ringspan.planner.catalog.kernels import AttentionCurve
from ringspan.planner.catalog.links import Link, load_network, load_scale_up
from ringspan.planner.catalog.models import load_model, model_names
from ringspan.planner.catalog.shapes import Experts, Latent, Model, Video, Window

__all__ = [
    "AttentionCurve",
    "Cluster",
    "Constants",
    "Device",
    "Experts",
    "Latent",
    "Link",
    "Model",
    "Video",
    "Window",
    "device_names",
    "fitted",
    "fitted_without",
    "load_device",
    "load_model",
    "load_network",
    "load_scale_up",
    "model_names",
    "parse_devices",
]
