"""Models of other libraries on ranks. An adapter and its library are loaded when the adapter is first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringspan.adapters import accelerate, diffusers, transformers

__all__ = ["accelerate", "diffusers", "transformers"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'ringspan.adapters' has no attribute {name!r}")
    try:
        return import_module(f"ringspan.adapters.{name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", name):
            raise
        raise ImportError(
            f"ringspan.adapters.{name} needs {missing}; install it, for example from a checkout with: "
            f"pip install '.[{name}]'"
        ) from None
