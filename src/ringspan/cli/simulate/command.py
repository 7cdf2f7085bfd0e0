"""`ringspan simulate`: context-parallel attention on simulated devices, shown and checked."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import click

from ringspan import __version__
from ringspan.algorithms import Direction, Mesh
from ringspan.cli.console import new_console
from ringspan.cli.errors import Command
from ringspan.cli.files import OutputFile, write_text
from ringspan.cli.page_command import command_line
from ringspan.cli.values import (
    ALGORITHM,
    check_layout,
    check_mask,
    check_options,
    direction_option,
    layout_option,
    mask_option,
    mesh_option,
    parse_tokens,
    parsed_by,
)
from ringspan.mask import Mask
from ringspan.program.reproducible.tree import TILE
from ringspan.simulate.lesson import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_SEQ_LEN,
    MAX_WORLD_SIZE,
    LayoutChoice,
    Lesson,
    LessonSettings,
    run_lesson,
)

TOKENS = 64
TILES = 8  # two for each of the devices, so that zigzag has chunks to deal

EXAMPLES = """\b
Examples:
  ringspan simulate
  ringspan simulate --layout contiguous --direction reverse
  ringspan simulate --devices 8 --tokens 200 --mask "causal & window:100"
  ringspan simulate --tokens 2K --heads 2 --mask "causal & documents:600,1448" --layout balanced
  ringspan simulate --algorithm hybrid --algorithm double-ring --mesh 2x2
  ringspan simulate --reproducible --tokens 3000 --devices 3
  ringspan simulate --lesson
  ringspan simulate --json > lesson.json
"""


@click.command(cls=Command, epilog=EXAMPLES, context_settings={"show_default": True})
@click.option("--devices", type=click.IntRange(1, MAX_WORLD_SIZE), default=4, help="Ranks in the group.")
@click.option(
    "--tokens",
    callback=parsed_by(partial(parse_tokens, most=MAX_SEQ_LEN)),
    metavar="N",
    help=f"Length of the sequence; 1K is 2^10.  [default: {TOKENS}, or {TILES * TILE} with --reproducible]",
)
@click.option("--heads", type=click.IntRange(1, MAX_HEADS), default=8, help="Query heads.")
@click.option(
    "--kv-heads",
    type=click.IntRange(1, MAX_HEADS),
    help="KV heads; they divide the query heads.  [default: 2, or 1 if --heads is odd]",
)
@click.option("--head-dim", type=click.IntRange(1, MAX_HEAD_DIM), default=32, help="Elements of a head.")
@mask_option
@layout_option
@click.option(
    "--algorithm",
    "algorithms",
    type=ALGORITHM,
    multiple=True,
    default=("pass-kv", "pass-q"),
    help="What to run; may be given several times.",
)
@direction_option
@mesh_option
@click.option(
    "--reproducible",
    is_flag=True,
    help=f"The bits do not depend on the devices: sums in tiles of {TILE} tokens; compare with one device.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the random q, k and v.")
@click.option("--lesson", is_flag=True, help="Explain every step, with traffic, decoding and the choice of algorithm.")
@click.option("--html", type=OutputFile(".html"), help="Write the runs as an interactive page.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.pass_context
def simulate(
    ctx: click.Context,
    devices: int,
    tokens: int | None,
    heads: int,
    kv_heads: int | None,
    head_dim: int,
    mask: Mask,
    layout: LayoutChoice,
    algorithms: tuple[str, ...],
    direction: Direction | None,
    mesh: Mesh | None,
    reproducible: bool,
    seed: int,
    lesson: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Run attention on simulated devices, step by step; check it.

    Shows who holds which tokens, and who computes and sends what at which step. Every result is compared with dense
    attention in float64; exit code 1 if one differs. Needs neither GPU nor torch.
    """
    tokens = tokens or (TILES * TILE if reproducible else TOKENS)
    kv_heads = kv_heads or (1 if heads % 2 else 2)
    names = tuple(dict.fromkeys(name.replace("-", "_") for name in algorithms))
    check_options(names, direction, mesh, devices)
    check_mask(mask, tokens)
    check_layout(layout, reproducible)
    sizes = (devices, tokens, heads, kv_heads, head_dim)
    if lesson and as_json:
        raise click.UsageError("--lesson and --json are two reports; --json has everything, so leave out --lesson")
    settings = LessonSettings(*sizes, mask, layout, names, direction, mesh, seed, reproducible)
    if html is not None:
        from ringspan.page import build_settings_page

        write_text(html, build_settings_page(settings, command_line(ctx)))
    result = _run(settings)
    if as_json:
        click.echo(json.dumps({"version": __version__, **dataclasses.asdict(result)}, indent=2, allow_nan=False))
    else:
        _print(result, in_full=lesson)
    if not result.is_verified:
        ctx.exit(1)


def _run(settings: LessonSettings) -> Lesson:
    """Simulate, with a progress line on a terminal."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        return run_lesson(settings, lambda doing: status.update(f"Computing: {doing}"))


def _print(lesson: Lesson, *, in_full: bool) -> None:
    from ringspan.cli.simulate.summary_text import print_summary
    from ringspan.cli.simulate.text import print_lesson

    (print_lesson if in_full else print_summary)(lesson, new_console())
