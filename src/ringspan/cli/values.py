"""How are masks, layouts, meshes and sizes written on the command line, and which of them go together?

A mask is an `|` of `&`s of the forms below. There are no brackets: any combination can be written without them.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import and_, or_
from types import MappingProxyType
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ringspan.algorithms import ALGORITHMS, Direction, Mesh, list_takers
from ringspan.cli.errors import BadInput, render_error
from ringspan.errors import LayoutError, MaskError, RingspanError, ShapeError
from ringspan.mask import Mask, blocks, causal, chunks, documents, frame_causal, full, prefix, sliding_window
from ringspan.program.reproducible.tree import TILE
from ringspan.simulate.lesson import LAYOUTS, LayoutChoice

T = TypeVar("T")

MASK_FORMS = (
    "full, causal, window:LEFT[:RIGHT], prefix:N, documents:N,N,..., frames:TOKENS[:START], chunks:TOKENS, "
    "blocks:START,STOP:..."
)
MAX_SECONDS = 1_000_000  # eleven days; much longer waits overflow in Python
MAX_MASK_FORMS = 100  # a mask is a nested description, and Python recurses into it


class Spelled(click.Choice):  # type: ignore[type-arg]  # click 8.1 has no Choice[str]
    """A choice in any case, with `-` or `_` (as Python and JSON write it), or by another name."""

    def __init__(self, choices: Iterable[str], others: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(list(choices))
        self._others = others

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The choice as the list spells it; an unknown one is refused as it was typed."""
        spelled = str(value).lower().replace("_", "-")
        choice = self._others.get(spelled, spelled)
        return super().convert(choice if choice in self.choices else value, param, ctx)


class AlgorithmName(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no ParamType[str]
    """An algorithm that is registered when the option is read or its help printed.

    `is_flat` leaves out algorithms that take a mesh.
    """

    name = "algorithm"

    def __init__(self, *, is_flat: bool = False) -> None:
        self._is_flat = is_flat

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name as the command line spells it."""
        return self._registered().convert(value, param, ctx)

    def get_metavar(self, *args: Any, **kwargs: Any) -> str | None:
        """All names; click 8.1 and 8.2 pass different arguments."""
        return self._registered().get_metavar(*args, **kwargs)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The names that begin with the typed letters."""
        return self._registered().shell_complete(ctx, param, incomplete)

    def _registered(self) -> Spelled:
        takers = list_takers("mesh") if self._is_flat else []
        return Spelled(spell_algorithm(name) for name in ALGORITHMS if name not in takers)


ALGORITHM = AlgorithmName()
FLAT_ALGORITHM = AlgorithmName(is_flat=True)


class OptionOfSome(click.Option):
    """An option that only some algorithms take. `TAKERS` in its help stands for their names."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        found = super().get_help_record(ctx)
        if found is None or self.name is None:
            return found
        *others, last = map(spell_algorithm, list_takers(self.name))
        takers = f"{', '.join(others)} and {last}" if others else last
        return found[0], found[1].replace("TAKERS", takers)


def parse_mask(text: str) -> Mask:
    """The mask that an expression such as `causal & window:16 | prefix:4` describes."""
    num_forms = 1 + text.count("&") + text.count("|")
    if num_forms > MAX_MASK_FORMS:
        raise MaskError(f"{num_forms:,} masks are joined here, and {MAX_MASK_FORMS} is the limit", argument="mask")
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
        case "chunks", [[tokens]], 1:
            return chunks(tokens)
        case "blocks", [_, *_], _ if all(len(span) == 2 for span in numbers):
            return blocks([(start, stop) for start, stop in numbers])
    raise MaskError(
        "there is no such mask",
        argument="mask",
        value=text.strip() or "''",
        remedy=f"use {MASK_FORMS}, or several of them joined by & and |",
    )


def parse_layout(text: str) -> LayoutChoice:
    """A layout by name, for `striped` with an optional block size: `striped:16`."""
    found = re.fullmatch(r"(?P<name>[a-z]+)(?::(?P<block>[0-9]{1,9}))?", text.strip())
    if found is None or found["name"] not in LAYOUTS or (found["block"] and found["name"] != "striped"):
        raise LayoutError(
            "there is no such layout",
            argument="layout",
            value=text,
            remedy="use contiguous, zigzag, striped[:BLOCK] or balanced",
        )
    block = int(found["block"] or 1)
    if not block:
        raise LayoutError("a block has at least 1 token", argument="layout", value=text, remedy="use striped:1")
    return LayoutChoice(found["name"], block)


def parse_tokens(text: str, most: int | None = None) -> int:
    """A number of tokens; 16K is 16 · 2¹⁰ and 1M is 2²⁰."""
    found = re.fullmatch(r"([0-9]{1,12})([KM]?)", text.strip().upper())
    tokens = int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]] if found else 0
    if not tokens:
        raise ShapeError(
            "expected a number of tokens of at least 1",
            argument="tokens",
            value=text,
            remedy="use a number such as 4096, 16K or 1M (2^20)",
        )
    if most is not None and tokens > most:
        raise ShapeError(
            f"{tokens:,} tokens are too many here", argument="tokens", value=text, remedy=f"use at most {most:,}"
        )
    return tokens


def parse_seconds(text: str) -> float:
    """A time to wait."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_SECONDS:
        raise ShapeError(
            "expected a time in seconds",
            argument="timeout_s",
            value=text,
            remedy=f"use a number above 0 and up to {MAX_SECONDS:,}, such as 600",
        )
    return seconds


def parse_mesh(text: str) -> Mesh:
    """A mesh written as OUTERxINNER."""
    found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", text.strip())
    if found is None:
        raise LayoutError("expected a mesh", argument="mesh", value=text, remedy="use OUTERxINNER, such as 2x4")
    return Mesh(int(found[1]), int(found[2]))


def parse_sides(text: str) -> tuple[int, int]:
    """Height and width in pixels."""
    found = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", text.strip())
    if found is None:
        raise ShapeError("expected a size; use HEIGHTxWIDTH, such as 720x1280")
    return int(found[1]), int(found[2])


def parsed_by(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """A callback that parses the value of an option; an error names the option."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> T | None:
        try:
            return None if value is None else parse(value)
        except RingspanError as error:
            if error.argument == param.name:
                raise BadInput(render_error(error, ctx.command)) from error
            raise BadInput(f"{param.opts[0]} {value}: {error}") from error

    return convert


mask_option = click.option(
    "--mask",
    callback=parsed_by(parse_mask),
    metavar="MASK",
    default="causal",
    help=f"Who attends to whom: {MASK_FORMS}, or several joined by & and |.",
)

layout_option = click.option(
    "--layout",
    callback=parsed_by(parse_layout),
    metavar="LAYOUT",
    default="zigzag",
    help="Who holds which token: contiguous, zigzag, striped[:BLOCK] or balanced.",
)

direction_option = click.option(
    "--direction",
    cls=OptionOfSome,
    type=click.Choice(["forward", "reverse"]),
    help="Which way blocks travel in TAKERS.  [default: forward]",
)

mesh_option = click.option(
    "--mesh",
    cls=OptionOfSome,
    callback=parsed_by(parse_mesh),
    metavar="OUTERxINNER",
    help="Ranks in two dimensions, for TAKERS.",
)


def check_mask(mask: Mask, tokens: int) -> None:
    """Refuse documents that end before the sequence."""
    known = mask.num_positions
    if known < tokens:
        raise click.UsageError(
            f"--mask: its documents have {known:,} tokens, but --tokens is {tokens:,}; "
            f"add a document of {tokens - known:,}, or use --tokens {known}"
        )


def check_layout(layout: LayoutChoice, reproducible: bool) -> None:
    """Refuse a layout that splits a tile of the reproducible mode."""
    if reproducible and layout.name == "striped" and layout.block % TILE:
        nearest = max(1, round(layout.block / TILE)) * TILE
        raise click.UsageError(
            f"--reproducible, --layout {layout}: a tile of {TILE} tokens must lie on one rank; "
            f"use --layout striped:{nearest}"
        )


def check_options(algorithms: Sequence[str], direction: Direction | None, mesh: Mesh | None, world_size: int) -> None:
    """Refuse an option that none of the algorithms takes, and a mesh that is missing or not of these ranks."""
    spelled = " and ".join(spell_algorithm(name) for name in algorithms)
    given = (("direction", direction), ("mesh", None if mesh is None else f"{mesh.outer}x{mesh.inner}"))
    for name, value in given:
        takers = list_takers(name)
        if value is not None and not set(takers) & set(algorithms):
            has = "has" if len(algorithms) == 1 else "have"
            raise click.UsageError(
                f"--{name} {value}: {spelled} {has} no {name}; leave it out, or use --algorithm "
                f"{' or '.join(map(spell_algorithm, takers))}"
            )
    inners = [n for n in range(1, world_size + 1) if world_size % n == 0]
    needing = [name for name in algorithms if "mesh" in ALGORITHMS[name].options]
    if needing and mesh is None:
        inner = inners[len(inners) // 2]
        raise click.UsageError(
            f"--algorithm {spell_algorithm(needing[0])} runs on ranks in two dimensions; "
            f"add --mesh OUTERxINNER, such as --mesh {world_size // inner}x{inner}"
        )
    if mesh is not None and mesh.outer * mesh.inner != world_size:
        legal = ", ".join(f"{world_size // n}x{n}" for n in inners)
        raise click.UsageError(
            f"--mesh {mesh.outer}x{mesh.inner}: outer × inner must be the {world_size} ranks of the group; "
            f"use one of {legal}"
        )


def spell_algorithm(algorithm: str) -> str:
    """The name as the command line writes it."""
    return algorithm.replace("_", "-")
