"""How does a lesson show the reproducible mode? The bits of one device and of several, and the cost of equal bits."""

from collections.abc import Mapping

from rich.text import Text

from ringspan.cli.page import Page, new_table
from ringspan.program.reproducible.tree import TILE
from ringspan.simulate.lesson import Lesson, Prefill


def print_bits(page: Page, prefill: Prefill, names: Mapping[str, str]) -> None:
    """Compare every algorithm with one device."""
    page.section("The same bits on any number of devices")
    page.prose(
        "A sum of floating-point numbers depends on its order. Here it is fixed: queries and keys are cut into tiles",
        f"of {TILE} tokens, and what the tiles of keys give a tile of queries is merged in one binary tree over their",
        "numbers, whoever computed it. Every bit of out and lse, as a digest:",
    )
    table = new_table("devices", "bits", "", ">most nodes", ">bytes sent", ">by default")
    table.add_row("one", prefill.one_device_digest or "", "", "", "0", "0")
    for run in prefill.runs:
        if run.bits is None:
            continue
        table.add_row(
            f"{len(prefill.shards)}, {names[run.algorithm]}",
            run.bits.digest,
            Text("✓ the same", "green") if run.bits.is_same else Text("✗ others", "bold red"),
            str(run.bits.pending_nodes),
            f"{run.sent_bytes:,}",
            f"{run.bits.sent_bytes_by_default:,}",
        )
    page.show(table)
    page.prose(
        "Most nodes: of the tree of one tile, unfinished on one rank at a time. A part of a sum travels as such nodes,",
        "and not as one sum as by default, so its bytes differ; inputs travel as always.",
    )


def bits_verdict(lesson: Lesson, names: Mapping[str, str]) -> Text | None:
    """Whether the bits are equal; None outside the reproducible mode."""
    if not lesson.parameters.reproducible:
        return None
    if lesson.other_bits:
        others = ", ".join(names[name] for name in lesson.other_bits)
        return Text(f"✗ Not the bits of one device: {others}.", "bold red")
    algorithms = ", ".join(names[name] for name in lesson.parameters.algorithms)
    return Text(f"✓ The bits of one device: {algorithms}.", "bold green")
