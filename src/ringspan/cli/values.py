"""Masks, layouts, meshes and sizes as they are written on the command line.

A mask is an `|` of `&`s of the forms below. There are no brackets: any combination can be written without them.
"""

import re
from collections.abc import Callable
from functools import reduce
from operator import and_, or_
from typing import TypeVar

import click

from ringspan.algorithms import Mesh
from ringspan.errors import LayoutError, MaskError, RingspanError, ShapeError
from ringspan.lesson import LAYOUTS, LayoutChoice
from ringspan.mask import Mask, causal, documents, frame_causal, full, prefix, sliding_window

T = TypeVar("T")

MASK_FORMS = "full, causal, window:LEFT[:RIGHT], prefix:N, documents:N,N,..., frames:TOKENS[:START]"


def parse_mask(text: str) -> Mask:
    """The mask an expression like `causal & window:16 | prefix:4` describes."""
    return reduce(or_, (reduce(and_, map(_parse_form, part.split("&"))) for part in text.split("|")))


def _parse_form(text: str) -> Mask:
    name, *arguments = text.strip().split(":")
    try:
        numbers = [[int(number) for number in argument.split(",")] for argument in arguments]
    except ValueError:
        numbers = []
    match name, numbers, len(arguments):
        case "full", [], 0:
            return full()
        case "causal", [], 0:
            return causal()
        case "window", [[left]], 1:
            return sliding_window(left, 0)
        case "window", [[left], [right]], 2:
            return sliding_window(left, right)
        case "prefix", [[n]], 1:
            return prefix(n)
        case "documents", [lengths], 1:
            return documents(lengths)
        case "frames", [[tokens]], 1:
            return frame_causal(tokens)
        case "frames", [[tokens], [start]], 2:
            return frame_causal(tokens, start)
    raise MaskError(f"{text.strip()!r} is no mask; use {MASK_FORMS}, or several of them joined by & and |")


def parse_layout(text: str) -> LayoutChoice:
    """A layout's name, and for `striped` perhaps a block size: `striped:16`."""
    found = re.fullmatch(r"(?P<name>[a-z]+)(?::(?P<block>[0-9]{1,9}))?", text.strip())
    if found is None or found["name"] not in LAYOUTS or (found["block"] and found["name"] != "striped"):
        raise LayoutError(f"{text!r} is no layout; use contiguous, zigzag, striped[:BLOCK] or balanced")
    return LayoutChoice(found["name"], int(found["block"] or 1))


def parse_tokens(text: str) -> int:
    """A number of tokens; 16K is 16 · 2¹⁰ and 1M is 2²⁰."""
    found = re.fullmatch(r"([0-9]{1,12})([KM]?)", text.strip().upper())
    tokens = int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]] if found else 0
    if not tokens:
        raise ShapeError(f"{text!r} is no number of tokens; use one of at least 1, such as 4096, 16K or 1M (2^20)")
    return tokens


def parse_mesh(text: str) -> Mesh:
    """OUTERxINNER."""
    found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", text.strip())
    if found is None:
        raise LayoutError(f"{text!r} is no mesh; use OUTERxINNER, such as 2x4")
    return Mesh(int(found[1]), int(found[2]))


def parsed_by(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """A callback for an option, so that an error names it."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> T | None:
        try:
            return None if value is None else parse(value)
        except RingspanError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return convert
