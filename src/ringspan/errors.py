"""What can go wrong, as types a caller can catch.

Every message gives the argument and its value, the rule it breaks, and the way out. The classes also derive from the
built-in exception a Python programmer would expect, so `except ValueError` works without knowing this file.
"""


class RingspanError(Exception):
    """Base of everything this library raises on purpose."""


class ShapeError(RingspanError, ValueError):
    """An array, a count or another plain argument has a shape or a value the call cannot take."""


class LayoutError(RingspanError, ValueError):
    """A layout is impossible, or does not fit the arrays or the group it is used with."""


class MaskError(RingspanError, ValueError):
    """A mask is ill-formed, or is asked about positions it does not know."""


class ScheduleError(RingspanError, ValueError):
    """A schedule does not compute attention: something is lost, done twice, or used before it is there."""


class UnsupportedError(RingspanError, NotImplementedError):
    """The combination is well-formed, but no exact way to compute it exists here."""


class TransportError(RingspanError, RuntimeError):
    """A message between ranks did not arrive, or did not fit."""


class CacheError(RingspanError, ValueError):
    """A turn does not fit what a cache holds, or a cache does not fit the model."""
