"""Is an argument of the kind that its function takes?

A public function passes its arguments to `check_arguments`, each with the kind it expects. A value of another kind is a
ShapeError that names the argument, before the value is used. The function itself checks values of the right kind.
"""

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ringspan.errors import ShapeError

MOST_RANKS = 2**16
"""Upper bound of world sizes: schedules grow with the square of it, so a larger number is a slip."""


class Kind(NamedTuple):
    """The kind of value that an argument must have."""

    expected: str
    remedy: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool) and (not _is_array(value) or isinstance(value, np.integer))


def number_of(value: Any) -> float:
    """A number as a float; NaN for anything else, and for a number that is too large for a float."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.nan


def _is_array(value: Any) -> bool:
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes) and not _is_array(value)


def _is_path(value: Any) -> bool:
    if not isinstance(value, str | os.PathLike):
        return False
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | range) or (_is_array(value) and len(value.shape) == 1)


WHOLE = Kind("a whole number", "give an int", _is_whole)
RANKS = Kind(
    f"a number of ranks from 1 to {MOST_RANKS}",
    "give an int in that range",
    lambda value: _is_whole(value) and 1 <= operator.index(value) <= MOST_RANKS,
)
NUMBER = Kind("a number", "give a float", lambda value: not math.isnan(number_of(value)))
FLAG = Kind("True or False", "give a bool", lambda value: isinstance(value, bool | np.bool_))
TEXT = Kind("a name", "give a str", lambda value: isinstance(value, str))
CALLABLE = Kind("a function", "give one that can be called", callable)
PATH = Kind("a path", "give a str or a pathlib.Path", _is_path)
ARRAY = Kind("an array", "give a tensor or a NumPy array", _is_array)
LIST = Kind("a list", "give a list or a tuple", _is_list)
ITERABLE = Kind("a list", "give one", _is_iterable)


MAPPING = Kind("a mapping", "give a dict", lambda value: isinstance(value, Mapping))


def list_of(kind: Kind) -> Kind:
    """A list whose items are all of a kind."""
    return Kind(f"a list, each item {kind.expected}", "give one", lambda v: _is_list(v) and all(map(kind.holds, v)))


def instance_of(cls: type, example: str) -> Kind:
    """An instance of a class."""
    return Kind(f"a {cls.__name__}", f"give one, such as {example}", lambda value: isinstance(value, cls))


def optional(kind: Kind) -> Kind:
    """A kind that also accepts None."""
    return Kind(f"{kind.expected}, or None", kind.remedy, lambda value: value is None or kind.holds(value))


def check_arguments(**given: tuple[Kind, Any]) -> None:
    """Raise a ShapeError for the first argument that is not of its kind."""
    for name, (kind, value) in given.items():
        if not kind.holds(value):
            shown = repr(value)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
            raise ShapeError(
                f"expected {kind.expected}, got {type(value).__name__} {shown}", argument=name, remedy=kind.remedy
            )
