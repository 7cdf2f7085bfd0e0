"""Answers to single questions, on the terminal and as data."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ringspan.cli.formats import format_seconds
from ringspan.cli.page import Page, new_table
from ringspan.cli.plan.as_json import as_plain, option_as_json
from ringspan.cli.plan.text import describe, describe_cost, describe_devices, format_range, gigabytes
from ringspan.planner.plan import Answer, Request, cost_of
from ringspan.planner.plan.questions import MOST_DEVICES


def print_answer(
    question: str, request: Request, answer: Answer | None, target: str | None, price: float | None, console: Console
) -> None:
    """One line first, then the way and its memory."""
    page = Page(console)
    device = request.cluster.device
    if answer is None:
        text = f"✗ not even a batch of 1 fits on these {device.id}"
        if question == "target_ttft":
            text = f"✗ no number of {device.id} up to {MOST_DEVICES:,} reaches {target}"
        elif question == "max_context":
            text = f"✗ not even one token fits on these {device.id}"
        console.print(Text(text, "bold red"))
        return
    asked, option = answer.request, answer.option
    found = {
        "target_ttft": f"{asked.cluster.num_devices} {device.id} reach {target}",
        "max_context": f"{asked.tokens:,} tokens is the longest sequence that fits",
        "max_batch": f"{asked.batch:,} is the largest batch that fits",
    }[question]
    console.print(Text(f"✓ {found}: {describe(option, asked)}, {format_range(option)}", "bold green"))
    is_barely = option.memory.fits_barely(device.memory_bytes)
    rows = [
        ("model", f"{asked.model.id}, {asked.phase}, {asked.tokens:,} tokens, batch {asked.batch:,}"),
        ("devices", describe_devices(asked.cluster)),
        ("software", f"{asked.software.name} with {asked.cluster.device.attention.kernel}"),
        ("estimate", format_seconds(option.prediction.total_s)),
        (
            "memory",
            f"{gigabytes(option.memory.total)} of {gigabytes(device.memory_bytes)} on each{', barely' * is_barely}",
        ),
    ]
    limit = asked.model.max_tokens
    if limit is not None and asked.tokens > limit:
        rows.append(("note", f"the model was made for {limit:,} tokens"))
    if price is not None:
        rows.append(("cost", describe_cost(cost_of(asked, option, price), asked)))
    page.facts(rows)


def print_sweep(answers: Sequence[Answer], price: float | None, console: Console) -> None:
    """A row for every length and cluster."""
    page = Page(console)
    request = answers[0].request
    console.print(Text(f"{request.model.id}: {request.phase}, the best way for each", "bold"))
    columns = ("devices", ">tokens", "way", ">time", ">memory", "fits", *((">cost",) if price is not None else ()))
    table = new_table(*columns)
    for asked, option in ((answer.request, answer.option) for answer in answers):
        cluster = asked.cluster
        cells = [
            f"{cluster.nodes}x{cluster.per_node}x{cluster.device.id}",
            f"{asked.tokens:,}",
            describe(option, asked),
            format_range(option) if option.fits else "",
            gigabytes(option.memory.total),
            "✓" if option.fits else "✗",
        ]
        if price is not None:
            cells.append(f"{cost_of(asked, option, price).per_unit:.4g}" if option.fits else "")
        table.add_row(*cells)
    page.show(table)


def answer_as_json(answer: Answer, price: float | None) -> dict[str, Any]:
    """The request that answers, its best way, and what it costs."""
    asked = answer.request
    return {
        "tokens": asked.tokens,
        "batch": asked.batch,
        "nodes": asked.cluster.nodes,
        "per_node": asked.cluster.per_node,
        "device": asked.cluster.device.id,
        "option": option_as_json(answer.option),
        "cost": None if price is None else as_plain(cost_of(asked, answer.option, price)),
    }
