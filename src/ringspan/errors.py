"""The exceptions that Ringspan raises on purpose.

    RingspanError
    ├── ShapeError        (ValueError)           a tensor, count or plain argument the call cannot take
    ├── LayoutError       (ValueError)           an impossible layout, or one for other tensors or another group
    ├── MaskError         (ValueError)           an ill-formed mask, or positions outside it
    ├── ScheduleError     (ValueError)           a schedule that does not compute attention
    ├── CacheError        (ValueError)           a turn that does not fit the cache, or a cache for another model
    ├── UnsupportedError  (NotImplementedError)  a well-formed request that has no exact implementation here
    └── TransportError    (RuntimeError)         a message between ranks that did not arrive or did not fit

Each class also derives from the built-in exception in brackets, so `except ValueError` works without this file.

An error carries fields: the argument, its value, the rule it breaks and the remedy. `str(error)` joins them for Python
callers as `argument=value: rule; remedy`; the command line joins them with the names of its own options.
"""

from typing import Any, Final


class _NotGiven:
    def __repr__(self) -> str:
        return "NOT_GIVEN"

    def __reduce__(self) -> str:
        return "NOT_GIVEN"


NOT_GIVEN: Final = _NotGiven()


class RingspanError(Exception):
    """Base class.

    Attributes:
        rule: the rule that was broken, as a sentence without a full stop.
        argument: the name of the argument that broke it, such as "layout" or "q.shape", or None.
        value: the value that was passed; NOT_GIVEN if there is no single value to show.
        remedy: what to do instead, as an imperative, or None.
    """

    def __init__(
        self, rule: str, *, argument: str | None = None, value: Any = NOT_GIVEN, remedy: str | None = None
    ) -> None:
        super().__init__(rule)
        self.rule = rule
        self.argument = argument
        self.value = value
        self.remedy = remedy

    def __str__(self) -> str:
        subject = ""
        if self.argument is not None:
            shown = "" if self.value is NOT_GIVEN else f"={self.value!r}"
            subject = f"{self.argument}{shown}: "
        return f"{subject}{self.rule}{f'; {self.remedy}' if self.remedy else ''}"


class ShapeError(RingspanError, ValueError):
    """An array, a count or another plain argument has a shape or a value the call cannot take."""


class LayoutError(RingspanError, ValueError):
    """A layout is impossible, or does not fit the tensors or the group it is used with."""


class MaskError(RingspanError, ValueError):
    """A mask is ill-formed, or was asked about positions outside it."""


class ScheduleError(RingspanError, ValueError):
    """A schedule does not compute attention: it loses a block, attends to one twice, or uses one before it arrives."""


class UnsupportedError(RingspanError, NotImplementedError):
    """The request is well-formed, but no exact implementation of it exists here."""


class TransportError(RingspanError, RuntimeError):
    """A message between ranks did not arrive, or did not fit."""


class CacheError(RingspanError, ValueError):
    """A turn does not fit what a cache holds, or a cache does not fit the model."""
