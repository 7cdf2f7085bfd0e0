"""How is a simulation printed in full? In short sections: a sentence or two, then the numbers."""

import math
import re
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from ringspan.algorithms import ALGORITHMS, find_algorithm
from ringspan.algorithms.choose import KV_RING, Q_RING, RINGS
from ringspan.cli.console import format_bar, format_count, format_level, format_list, format_percent
from ringspan.cli.page import NO_BREAK, TABLE_RANKS, Page, explain_grid, new_table
from ringspan.cli.simulate.bits_text import bits_verdict, print_bits
from ringspan.simulate.lesson import (
    Check,
    Choices,
    Decode,
    DecodeRun,
    LayoutWork,
    Lesson,
    LessonShard,
    OneQuery,
    Parameters,
    Reference,
    Run,
)

COLUMN_RANKS = 8  # ranks, steps or spans side by side
STRIP_WIDTH = 64
RANK_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
RANK_STYLES = ("cyan", "yellow", "magenta", "blue")  # green and red mean right and wrong

CONTENTS = {"q": "q", "kv": "k, v", "out": "out, lse"}


def print_lesson(lesson: Lesson, console: Console) -> None:
    page, parameters, prefill = Page(console), lesson.parameters, lesson.prefill
    print_title(page, parameters)
    _print_reference(page, prefill.reference)
    _print_shards(page, prefill.shards, parameters.seq_len)
    _print_work(page, prefill.work, parameters)
    told: set[str] = set()
    for run in prefill.runs:
        _print_run(page, run, parameters, told)
        if run.algorithm == KV_RING and prefill.one_query is not None and len(prefill.one_query.meetings) > 1:
            _print_one_query(page, prefill.one_query)
    _print_traffic(page, prefill.runs)
    if parameters.reproducible:
        print_bits(page, prefill, _labels())
    _print_decode(page, lesson.decode, parameters)
    _print_choices(page, lesson.choices)
    print_verdict(page, lesson)
    page.console.print(Text(f"Try also {', '.join(_other_options(parameters))}.", "dim"))


def print_title(page: Page, parameters: Parameters) -> None:
    p = parameters
    page.console.print(Text(f"Exact attention on {format_count(p.world_size, 'simulated device')}", "bold"))
    page.prose(
        "A sequence too long for one device is split over several. Each computes the attention of its own part;",
        "the blocks it needs from others travel.",
    )
    heads = f"{format_count(p.num_heads, 'head')} over {format_count(p.num_kv_heads, 'KV head')}"
    direction = "" if p.direction is None else f"; direction {p.direction}"
    mesh = "" if p.mesh is None else f"; mesh {p.mesh[0]}×{p.mesh[1]}"
    page.facts(
        [
            ("size", f"{format_count(p.seq_len, 'token')}, {heads}, head_dim {p.head_dim}, {p.dtype}, seed {p.seed}"),
            ("mask", p.mask),
            ("layout", p.layout),
            ("algorithms", ", ".join(map(_label, p.algorithms)) + direction + mesh),
            *([("mode", "reproducible: the same bits on any number of devices")] if p.reproducible else []),
        ]
    )


def _print_reference(page: Page, reference: Reference) -> None:
    page.section("The reference")
    page.prose("Dense attention over every pair of tokens at once, in float64. Every result below is compared with it.")
    share = format_percent(reference.visible_pairs / reference.all_pairs, 0)
    sample = " ".join(f"{value:.4f}" for value in reference.out_sample)
    scale = f"dense attention in float32 is {_error(reference.float32_error)} off"
    page.facts(
        [
            ("visible pairs", f"{reference.visible_pairs:,} of {reference.all_pairs:,} ({share})"),
            ("output", f"last token, head 0: {sample} ..."),
            ("accepted", f"{reference.tolerance:.0e} off at most; {scale}"),
        ]
    )


def _print_shards(page: Page, shards: Sequence[LessonShard], seq_len: int) -> None:
    page.section("Who holds which tokens")
    has_strip = len(shards) <= len(RANK_LETTERS)
    shown = "Token by token" if seq_len <= STRIP_WIDTH else f"For {STRIP_WIDTH} of the {seq_len:,} tokens"
    page.prose(
        "A device, or rank, holds q, k and v of its own tokens and of no others. 0:8 is tokens 0 to 7.",
        "A third number is a step." if any(span.count(":") == 2 for shard in shards for span in shard.spans) else "",
        f"{shown}, the rank that holds each:" if has_strip else "",
    )
    if has_strip:
        page.show(token_strip(shards, seq_len))
    table = new_table("rank", ">tokens", "positions")
    for shard in shards[:TABLE_RANKS]:
        positions = format_list(shard.spans, COLUMN_RANKS) or "none"
        table.add_row(Text(str(shard.rank), _rank_style(shard.rank)), f"{len(shard.positions):,}", positions)
    page.show(table)
    page.note_hidden(len(shards))


def token_strip(shards: Sequence[LessonShard], seq_len: int) -> Text:
    """The sequence from left to right, one character per token: the rank that holds it."""
    owners = {position: shard.rank for shard in shards for position in shard.positions}
    width = min(seq_len, STRIP_WIDTH)
    strip = Text()
    for i in range(width):
        rank = owners[i * seq_len // width]
        strip.append(RANK_LETTERS[rank], _rank_style(rank))
    return strip


def _print_work(page: Page, works: Sequence[LayoutWork], parameters: Parameters) -> None:
    world_size = parameters.world_size
    page.section("Who works how much")
    shows_steps = 1 < world_size <= TABLE_RANKS
    page.prose(
        "Work is counted in visible (query, key) pairs. A ring waits for its busiest rank at every step.",
        "The last column shows, step by step, how busy a rank is beside that one." if shows_steps else "",
        "With a causal mask the first token sees itself and the last one sees all, so contiguous shards leave the"
        " first ranks idle. Zigzag gives every rank an early and a late chunk."
        if parameters.mask == "causal()" and world_size > 1
        else "",
    )
    table = new_table("layout", "rank", ">pairs", "work", *(["busy, by step"] if shows_steps else []))
    most = max(max(work.pairs_per_rank) for work in works)
    for work in works:
        for rank, pairs in list(enumerate(work.pairs_per_rank))[:TABLE_RANKS]:
            name = work.layout if rank == 0 else ""
            busy = [_busy(work, rank)] if shows_steps else []
            table.add_row(name, str(rank), f"{pairs:,}", Text(format_bar(pairs, most), "cyan"), *busy)
    page.show(table)
    page.note_hidden(world_size)
    times = ", ".join(f"{work.layout} {work.imbalance:.2f}" for work in works)
    page.prose(f"Time of a KV ring, if 1 is without any waiting: {times}.")


def _busy(work: LayoutWork, rank: int) -> Text:
    """A rank's work at every step, relative to the busiest rank."""
    levels = [format_level(pairs[rank], max(pairs)) for pairs in work.pairs_per_step]
    return Text(" ".join(levels), "cyan")


def _print_run(page: Page, run: Run, parameters: Parameters, told: set[str]) -> None:
    page.section(f"{_label(run.algorithm)}: {find_algorithm(run.algorithm).idea}")
    page.prose(*_how_to_read(run, parameters, told))
    page.grid(run.grid)
    page.show(Text("largest difference from dense attention: ").append(format_check(run.check)))


def _how_to_read(run: Run, parameters: Parameters, told: set[str]) -> Iterator[str]:
    """Explain the symbols of the grid that no earlier section has explained."""
    for topic, sentence in explain_grid(run.grid):
        if topic not in told:
            yield sentence
    told.update(topic for topic, _ in explain_grid(run.grid))
    last = parameters.world_size - 1
    rings = [name for name in parameters.algorithms if name in RINGS and last]
    if run.algorithm in rings[:1]:
        to, sign = ("next", "-") if parameters.direction == "forward" else ("previous", "+")
        origin = f"(r {sign} t) mod {parameters.world_size}".replace(" ", NO_BREAK)
        yield f"Blocks go to the {to} rank, so rank r at step t has the block of rank {origin}."
    num_messages = {traffic.kind: traffic.num_messages for traffic in run.traffic}
    if run.algorithm in rings[:1] and max(num_messages.values(), default=0) < last * (last + 1):
        yield "A block is not sent on if no later rank needs it."


def _print_one_query(page: Page, query: OneQuery) -> None:
    shares = [f"kv{it.kv_owner} {format_percent(it.weight_fraction)}" for it in query.meetings[:COLUMN_RANKS]]
    if len(query.meetings) > COLUMN_RANKS:
        shares.append(format_count(len(query.meetings) - COLUMN_RANKS, "more block"))
    page.prose(
        f"Follow token {query.position} on rank {query.rank}. Every block of keys gives it a partial output, and an",
        f"lse that tells the block's share of the softmax weight. In head {query.head}, step by step:",
    )
    page.show(Text(" + ".join(shares) + " = 100 %"))
    page.prose(
        "The parts are averaged with these weights; added as they are, they would be off by",
        f"{query.added_error:.2g}.",
    )


def _print_traffic(page: Page, runs: Sequence[Run]) -> None:
    page.section("What travels")
    page.prose("The size of a message is heads × tokens × elements × bytes per element.")
    table = new_table("algorithm", ">messages", "of", "largest message", ">bytes", ">bytes in all")
    for run in runs:
        if not run.traffic:
            table.add_row(_label(run.algorithm), "0", "", "", "0", "0")
        for i, traffic in enumerate(run.traffic):
            heads, tokens, _ = traffic.shapes[0][-3:]
            elements = "+".join(str(shape[-1]) for shape in traffic.shapes)
            elements = f"({elements})" if len(traffic.shapes) > 1 else elements
            table.add_row(
                _label(run.algorithm) if i == 0 else "",
                f"{traffic.num_messages:,}",
                CONTENTS[traffic.kind],
                f"{heads}×{tokens}×{elements}×{traffic.bytes_per_element}",
                f"{traffic.largest_bytes:,}",
                f"{traffic.total_bytes:,}",
            )
    page.show(table)
    busiest = ", ".join(f"{_label(run.algorithm)} {run.largest_rank_step_bytes:,}" for run in runs)
    page.prose(f"Most that one rank sends in one step, in bytes: {busiest}.")
    sent = {run.algorithm: run.sent_bytes for run in runs}
    ratio = sent.get(Q_RING, 0) / max(1, sent.get(KV_RING, 0))
    if KV_RING in sent and ratio > 1:
        page.prose(
            f"Here {_label(Q_RING)} moves {ratio:.3g} times the bytes of {_label(KV_RING)};",
            "below is when that turns round.",
        )


def _print_decode(page: Page, decode: Decode, parameters: Parameters) -> None:
    page.section("Decoding: the cache stays, new tokens are dealt to the ranks in turn")
    one, batch = decode.one_sequence, decode.batch
    if parameters.reproducible:
        page.prose("Decoding has no reproducible mode; these are the bits of this number of devices.")
    if one is None:
        page.prose("The mask's documents end with the sequence, so it has no next token.")
    else:
        page.prose(
            "The sequence goes on. Every rank has the new token's query, q*, attends it to its part of the cache, and",
            "one exchange merges the parts on all ranks.",
        )
        page.grid(one.grid)
        _print_decode_steps(page, one)
    page.prose(
        f"{format_count(batch.num_sequences, 'sequence')} of {format_count(batch.prompt_tokens, 'cached token')}"
        f" each: sequence b gives its new token at step i to rank (b + i) mod {parameters.world_size}. Each rank then"
        " has its own queries, and they go round the ring as in pass-Q. A sequence sees all of itself and no other.",
    )
    _print_decode_steps(page, batch)


def _print_decode_steps(page: Page, run: DecodeRun) -> None:
    table = new_table("step", "new tokens to rank", "cached tokens per rank", ">bytes sent", "error")
    for step in run.steps:
        held = step.cache_tokens_per_rank
        per_rank = " ".join(map(str, held)) if len(held) <= COLUMN_RANKS else f"{min(held)} to {max(held)}"
        ranks = " ".join(map(str, step.new_token_ranks))
        table.add_row(str(step.step), ranks, per_rank, f"{step.sent_bytes:,}", format_check(step.check))
    page.show(table)
    spread, unrotated = (
        max(held) - min(held) for held in (run.steps[-1].cache_tokens_per_rank, run.unrotated_cache_tokens_per_rank)
    )
    if unrotated > spread:
        page.prose(
            f"Fullest and emptiest rank differ by {format_count(spread, 'token')}; if all new tokens of a sequence",
            f"went to one rank, they would differ by {unrotated}.",
        )


def _print_choices(page: Page, choices: Choices | None) -> None:
    page.section("pass-KV or pass-Q? It depends on how much is cached")
    if choices is None:
        page.prose("A single device sends nothing, so there is nothing to choose; try --devices 4.")
        return
    needed = math.ceil(choices.new_tokens_to_hide_kv)
    page.prose(
        "Only tokens that miss the cache bring queries: the fewer, the lighter is Q beside KV. By the rules of arXiv",
        f"2411.01783, pass-KV is best where compute hides its messages, which takes {needed:,} new tokens here.",
        "With fewer, pass-Q is best below a miss rate at which it still pays to send its outputs home. For"
        f" {choices.num_keys:,} tokens in all, {choices.world_size} ranks, {choices.num_heads} heads over"
        f" {choices.num_kv_heads} KV heads, {choices.bytes_per_element} bytes per element and"
        f" {choices.flops_per_byte:,.0f} FLOPs of compute per byte of bandwidth:",
    )
    table = new_table(">miss rate", ">new tokens", "algorithm 5", "because", "algorithm 1")
    for row in choices.rows:
        sign = "<" if row.algorithm_5 == Q_RING else "≥"
        because = f"{format_percent(row.miss_rate)} {sign} {format_percent(row.miss_rate_limit)}"
        if row.new_tokens >= needed:
            because = f"KV hidden: {row.new_tokens:,} ≥ {needed:,}"
        picks = _pick(row.algorithm_5), Text(because), _pick(row.algorithm_1)
        table.add_row(format_percent(row.miss_rate), f"{row.new_tokens:,}", *picks)
    page.show(table)
    page.prose(
        f"Algorithm 5 changes over {_crossing(choices.crossing_miss_rate_5)}; algorithm 1, which does not count the",
        f"way home of the outputs, {_crossing(choices.crossing_miss_rate_1)}.",
    )
    in_words = (
        [row.reason_5 for row in choices.rows if row.algorithm_5 == Q_RING],
        [row.reason_5 for row in choices.rows if row.new_tokens >= needed],
    )
    for reasons in in_words:
        page.prose(*map(_spelled, reasons[:1]))


def _crossing(miss_rate: float) -> str:
    return f"at {format_percent(miss_rate)}" if miss_rate <= 1 else "nowhere"


def _pick(algorithm: str) -> Text:
    return Text(_label(algorithm), "magenta" if algorithm == Q_RING else "cyan")


def print_verdict(page: Page, lesson: Lesson) -> None:
    page.console.print()
    if not lesson.failures:
        message = Text(f"✓ All {lesson.num_checks} results agree with dense attention.", "bold green")
    else:
        failures = ", ".join(map(_spelled, lesson.failures))
        message = Text(
            f"✗ {len(lesson.failures)} of {lesson.num_checks} results differ from dense attention: {failures}.",
            "bold red",
        )
    page.console.print(message)
    bits = bits_verdict(lesson, _labels())
    if bits is not None:
        page.console.print(bits)


def _other_options(p: Parameters) -> list[str]:
    """Options that show other parts of the subject than this run does."""
    options = {
        "--layout contiguous": p.layout != "contiguous",
        "--mask 'causal & window:16'": "sliding_window" not in p.mask,
        **{f"--algorithm {name.replace('_', '-')}": True for name in _others(p)[:1]},
        "--devices 8": p.world_size != 8,
        "--direction reverse": p.direction == "forward",
    }
    return [option for option, is_new in options.items() if is_new][:3]


def _others(p: Parameters) -> list[str]:
    """The algorithms that are not rings and run on any number of ranks and heads, if only rings were run."""
    if not set(p.algorithms) <= set(RINGS):
        return []
    return [name for name, it in ALGORITHMS.items() if name not in RINGS and not it.options & {"mesh", "heads"}]


def format_check(check: Check) -> Text:
    """The largest difference from dense attention, marked as accepted or not."""
    mark, style = ("✓", "green") if check.is_verified else ("✗ wrong:", "bold red")
    worst = None if check.out_error is None or check.lse_error is None else max(check.out_error, check.lse_error)
    return Text(f"{mark} {_error(worst)}", style)


def _error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def _spelled(text: str) -> str:
    for name, label in _labels().items():
        text = re.sub(rf"\b{name}\b", label, text)
    return text


def _label(algorithm: str) -> str:
    return find_algorithm(algorithm).label


def _labels() -> dict[str, str]:
    return {name: record.label for name, record in ALGORITHMS.items()}


def _rank_style(rank: int) -> str:
    return RANK_STYLES[rank % len(RANK_STYLES)]
