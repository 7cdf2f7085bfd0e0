"""An error carries its parts as fields, and they survive pickling to another process."""

import pickle

import pytest

from ringspan import errors
from ringspan.errors import NOT_GIVEN, LayoutError, RingspanError

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RingspanError)]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (LayoutError("a layout has at least one rank"), "a layout has at least one rank"),
        (LayoutError("no rank", argument="layout"), "layout: no rank"),
        (LayoutError("no rank", argument="layout", value="x"), "layout='x': no rank"),
        (LayoutError("no rank", argument="block", value=None, remedy="use 1"), "block=None: no rank; use 1"),
        (LayoutError("no rank", remedy="use 1"), "no rank; use 1"),
    ],
)
def test_the_fields_read_as_one_line(error: RingspanError, text: str) -> None:
    assert str(error) == text


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("value", [3, NOT_GIVEN], ids=["value", "no value"])
def test_an_error_survives_pickling(kind: type[RingspanError], value: object) -> None:
    error = kind("the rule", argument="heads", value=value, remedy="use 8")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.rule, again.argument, again.value, again.remedy) == ("the rule", "heads", value, "use 8")
    assert (again.value is NOT_GIVEN) == (value is NOT_GIVEN)
    assert str(again) == str(error)


def test_the_tree_at_the_top_of_the_file_is_complete() -> None:
    assert errors.__doc__ is not None
    for kind in CLASSES:
        builtin = next((base for base in kind.__mro__ if base.__module__ == "builtins"), None)
        line = next(line for line in errors.__doc__.splitlines() if f" {kind.__name__}" in line)
        assert kind is RingspanError or f"({builtin.__name__})" in line, line  # type: ignore[union-attr]
