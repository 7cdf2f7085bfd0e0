"""A measured denoising step as one HTML page."""

from collections.abc import Iterator

from ringspan.bench.video_result import VideoResult
from ringspan.cli.bench.video_text import (
    ABOUT_PARTS,
    ABOUT_PREDICTED,
    MEMORY,
    PARTS,
    about_times,
    checked_of,
    facts_of,
    memory_of,
    parts_of,
    predicted_of,
    times_of,
    title_of,
)
from ringspan.cli.formats import format_seconds
from ringspan.page.report import Section, bars, build_report, facts, table


def build_video_page(result: VideoResult, command: str) -> str:
    """One HTML file."""
    verdict = "Right" if result.is_verified else "WRONG"
    return build_report(title_of(result), [f"{verdict}: {checked_of(result)}"], _sections(result), command)


def _sections(result: VideoResult) -> Iterator[Section]:
    yield facts("measured", "What was measured", facts_of(result))
    yield table("times", "How fast", *times_of(result), about_times(result))
    rows = [
        (str(rank), *parts_of(part), (format_seconds(part.total_s), part.total_s))
        for rank, part in enumerate(result.by_rank)
    ]
    yield table("parts", "Where the time goes", ["rank", *(f">{name}" for name in PARTS), ">all"], rows, ABOUT_PARTS)
    memories = {"one process": result.one_process_memory}
    memories |= {f"rank {rank}": memory for rank, memory in enumerate(result.memory_by_rank)}
    stacked = [(name, (memory.weights, memory.peak)) for name, memory in memories.items()]
    yield bars("tensors", "Memory of a step", MEMORY[:2], stacked)
    rows_of_memory = [(name, *memory_of(memory)) for name, memory in memories.items()]
    yield table("memory", "Memory in numbers", ["", *(f">{name}" for name in MEMORY)], rows_of_memory)
    columns = ["devices", "fastest", ">time", ">bytes of a device", "fits"]
    yield table("gpus", "The same step on GPUs", columns, map(predicted_of, result.predicted), ABOUT_PREDICTED)
