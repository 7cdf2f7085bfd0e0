"""The page as a file: what it may load, what it escapes, how large it is, and that its figures are the planner's."""

import base64
import hashlib
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringspan.algorithms import build_schedule
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import Layout, contiguous, striped, zigzag
from ringspan.mask import causal
from ringspan.page import build_plan_page, build_simulation_page, plan_timeline
from ringspan.page.cases import MOST_RUNS
from ringspan.page.hiding import GIGABYTES_PER_S, PARTS, TOKENS, describe_hiding, time_ring
from ringspan.page.html import assemble, embed_json
from ringspan.page.lesson import describe_lesson
from ringspan.page.memory import SHARD, count_bytes
from ringspan.page.memory import TOKENS as MEMORY_TOKENS
from ringspan.page.plan_timeline import setup_timeline
from ringspan.page.report import build_report, facts, table, text
from ringspan.page.simulation import MOST_RANKS, MOST_TOKENS
from ringspan.page.traces import MOST_EVENTS, MOST_LANES
from ringspan.page.units import format_bytes, format_seconds, format_tokens
from ringspan.planner.catalog import load_device, load_model, parse_devices
from ringspan.planner.cost import Shard
from ringspan.planner.plan import Plan, Request, Setup, build_plan
from ringspan.planner.software import RINGSPAN
from ringspan.planner.timeline import schedule_timeline
from ringspan.program.problem import Problem, Shapes
from ringspan.schedule import Heads, visible_blocks
from ringspan.simulate import simulate_attention
from support.page import HOSTILE, lesson_html, payload_of

MOST_LESSON_BYTES = 400_000


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.open: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.open = tag if tag in self.texts else None
        if self.open:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self.open = None

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open][-1] += data


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_lesson_is_one_file_of_at_most_400_kilobytes_and_sixty_runs() -> None:
    page = lesson_html()
    assert len(page.encode()) <= MOST_LESSON_BYTES
    assert 40 <= len(payload_of(page)["sections"][1]["runs"]) <= MOST_RUNS


def test_the_policy_allows_this_script_and_this_style_and_nothing_else() -> None:
    elements = Elements(lesson_html())
    (policy,) = [it["content"] for tag, it in elements.found if it.get("http-equiv") == "Content-Security-Policy"]
    _, script = elements.texts["script"]
    (style,) = elements.texts["style"]
    assert policy is not None
    assert dict(part.strip().split(" ", 1) for part in policy.split(";")) == {
        "default-src": "'none'",
        "script-src": digest(script),
        "style-src": digest(style),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert elements.found.index(("meta", {"charset": "utf-8"})) < 4


def test_nothing_in_the_file_points_to_the_network() -> None:
    elements = Elements(lesson_html())
    assert not [attributes for _, attributes in elements.found if {"src", "href", "style", "srcset"} & set(attributes)]
    assert set(re.findall(r"https?://[^'\" ]+", lesson_html())) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\burl\((?!#|\$|`)", "".join(elements.texts["style"]))


def test_the_script_makes_text_nodes_only() -> None:
    _, script = Elements(lesson_html()).texts["script"]
    makers = (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "new Function",
        "fetch(",
        "import(",
    )
    for word in makers:
        assert word not in script, word


@pytest.mark.parametrize("hostile", [*HOSTILE, "\u2028\u2029", "\ud800".encode("utf-8", "replace").decode()])
def test_what_is_hostile_is_data(hostile: str) -> None:
    page = build_report(
        hostile,
        [hostile],
        [facts("a", hostile, [(hostile, hostile)]), table("b", "t", [hostile], [[hostile]]), text("c", "t", [hostile])],
        hostile,
    )
    elements = Elements(page)
    plain = Elements(build_report("x", ["x"], []))
    assert [tag for tag, _ in elements.found] == [tag for tag, _ in plain.found]
    assert elements.texts["style"] == plain.texts["style"]
    assert elements.texts["script"][1] == plain.texts["script"][1]
    assert not set("<>&") & set(elements.texts["script"][0])
    payload = payload_of(page)
    assert payload["title"] == payload["lead"][0] == payload["command"] == hostile
    assert payload["sections"][1]["rows"] == [[{"text": hostile}]]


def test_a_placeholder_in_the_data_is_not_filled() -> None:
    page = build_report("{style} {payload} {script}", ["{policy}"], [])
    assert payload_of(page)["title"] == "{style} {payload} {script}"
    assert page.count("<title>{style} {payload} {script}</title>") == 1


def test_numbers_that_json_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        embed_json({"x": float("nan")})


def test_a_payload_too_large_for_a_browser_is_refused() -> None:
    with pytest.raises(ShapeError, match="no browser shows a page"):
        assemble({"title": "x", "lead": [], "sections": ["x" * 50_000_001]})


# The time table


@pytest.fixture(scope="module")
def hiding() -> dict[str, Any]:
    return describe_hiding()


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("i", "j"), [(0, 0), (6, 5), (11, 11), (4, 9)])
def test_a_cell_of_the_time_table_is_the_timeline_of_the_real_schedule(
    hiding: dict[str, Any], name: str, i: int, j: int
) -> None:
    layout = {"contiguous": contiguous, "zigzag": zigzag}[name](TOKENS[i], 4)
    device = load_device("h100")
    device = replace(device, near=device.near._replace(bytes_per_s=GIGABYTES_PER_S[j] * 1e9))
    problem = Problem(causal(), layout, layout, Shapes((1,), Heads(32, 8), 128, 128, 2, 4))
    schedule = build_schedule("pass_kv", visible_blocks(causal(), layout))
    shard = Shard(1, 32, 8, 128, 128, 8 * 256, 2, "bf16", RINGSPAN)
    expected = schedule_timeline(schedule, problem, shard, device, 4, record=True)
    cell = hiding["cells"][i][j]
    shown = cell[name]
    assert shown["s"][0] == pytest.approx(expected.makespan_s, rel=0.005)
    assert shown["s"][2] == pytest.approx(float(expected.exposed_s.max()), rel=0.005, abs=1e-12)
    for t, moment in enumerate(expected.moments):
        assert [x * cell["unit_s"] for x in shown["begin"][t]] == pytest.approx(
            moment.begin_s.tolist(), abs=2 * expected.makespan_s * 1.01 * 2 / PARTS
        )
    assert shown["hidden"] == bool(expected.exposed_s.max() < 0.01 * expected.makespan_s)


def test_longer_sequences_and_faster_links_hide_more(hiding: dict[str, Any]) -> None:
    cells = hiding["cells"]
    hidden = [[cell["zigzag"]["hidden"] for cell in row] for row in cells]
    assert any(map(any, hidden))
    assert not all(map(all, hidden))
    for row in hidden:
        assert row == sorted(row)
    for column in zip(*hidden, strict=True):
        assert list(column) == sorted(column)
    assert time_ring([], 1.0).makespan_s == 0


def test_memory_of_the_ring_falls_with_the_ranks_and_that_of_an_all_gather_does_not() -> None:
    ring = [sum(count_bytes("pass_kv", ranks)) for ranks in (8, 16, 32)]
    assert 1.8 < ring[0] / ring[1] < 2.2
    assert 1.8 < ring[1] / ring[2] < 2.2
    kv = MEMORY_TOKENS * SHARD.kv_bytes
    assert all(count_bytes("all_gather", ranks)[1] + count_bytes("all_gather", ranks)[2] > kv for ranks in (8, 16, 32))


# Questions


def test_every_question_leads_to_a_view_of_the_page(subtests: pytest.Subtests) -> None:
    payload = describe_lesson()
    sections = {section["id"]: section for section in payload["sections"]}
    runs = {run["key"]: run for run in sections["ring"]["runs"]}
    questions = sections["questions"]["questions"]
    assert len(questions) >= 8
    for question in questions:
        with subtests.test(str(question["text"])):
            look = question["look"]
            assert look["at"] in sections
            if "run" in look:
                assert look.get("step", 0) <= runs[look["run"]]["num_steps"]
            if "choices" in question:
                assert 0 <= question["answer"] < len(question["choices"])


# Plans


@pytest.fixture(scope="module")
def plan() -> Plan:
    return build_plan(Request(load_model("llama-3.1-8b"), parse_devices("2x8xh100", None, None), "prefill", 2**17))


def test_the_plan_page_shows_the_plan(plan: Plan) -> None:
    sections = {section["id"]: section for section in payload_of(build_plan_page(plan))["sections"]}
    rows = sections["ranking"]["rows"]
    assert [row[1]["text"] for row in rows] == [str(option.setup) for option in plan.options]
    assert [row[2]["value"] for row in rows] == [option.prediction.total_s for option in plan.options]
    assert [row[3]["value"] for row in rows] == [option.memory.total for option in plan.options]
    for row, option in zip(sections["memory"]["rows"], plan.options, strict=False):
        assert row["values"] == list(option.memory)
    assert sections["memory"]["limit"]["value"] == plan.request.cluster.device.memory_bytes
    (by_length, _) = sections["curves"]["charts"]
    points = [point for line in by_length["lines"] for point in line["points"]]
    (found,) = (point for point in points if point[:2] == [plan.request.tokens, plan.best.prediction.total_s])
    assert found[2:] == pytest.approx([plan.best.low_s, plan.best.high_s])


def test_the_timeline_of_a_plan_is_that_of_the_schedule(plan: Plan) -> None:
    (chart, *_) = payload_of(build_plan_page(plan))["sections"][2]["charts"]
    timeline = setup_timeline(plan.request, plan.best.setup)
    busy = [0.0] * plan.best.setup.cp
    for lane, kind, start, stop, _, _ in chart["bars"]:
        assert 0 <= start <= stop <= chart["total_s"] * 1.0001
        busy[lane] += stop - start if kind == "compute" else 0
    assert busy == pytest.approx(timeline.compute_s.tolist(), rel=1e-3)
    names = {bar[4] for bar in chart["bars"] if bar[1] == "compute"}
    drawn = " ".join(names)
    assert all(f"q{rank}" in drawn for rank in range(plan.best.setup.cp))


def test_a_timeline_of_too_many_ranks_is_refused(plan: Plan) -> None:
    with pytest.raises(UnsupportedError, match="use at most 64"):
        setup_timeline(plan.request, Setup("pass_kv", "zigzag", 1, 128))


def test_a_simulation_of_too_many_tokens_is_refused() -> None:
    x = np.zeros((300, 2))
    run = simulate_attention(x, x, x, mask=causal(), layout=zigzag(300, 2))
    with pytest.raises(UnsupportedError, match="at most 256 tokens"):
        build_simulation_page({"run": run}, "")


# Numbers


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 µs"), (1.5e-7, "0.15 µs"), (0.00123456, "1.23 ms"), (0.9996, "1 s"), (5000, "5,000 s")],
)
def test_seconds(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


@pytest.mark.parametrize(("nbytes", "shown"), [(12, "12 bytes"), (4096, "4.1 kB"), (8e10, "80 GB"), (5e15, "5,000 TB")])
def test_bytes(nbytes: float, shown: str) -> None:
    assert format_bytes(nbytes) == shown


@pytest.mark.parametrize(("tokens", "shown"), [(1000, "1,000"), (2**17, "128K"), (2**20, "1M"), (3 * 2**19, "1536K")])
def test_tokens(tokens: int, shown: str) -> None:
    assert format_tokens(tokens) == shown


# Notebooks


def test_layouts_have_a_row_per_rank_and_a_bar_per_span() -> None:
    svg = "{http://www.w3.org/2000/svg}"
    picture = ET.fromstring(zigzag(16, 4)._repr_html_())
    assert [node.text for node in picture.iter(f"{svg}text")][:4] == [f"rank {rank}" for rank in range(4)]
    widths = [float(node.attrib["width"]) for node in picture.iter(f"{svg}rect")]
    assert widths == [72.0, 72.0, 72.0, 72.0, 72.0, 72.0, 144.0]  # zigzag's middle chunks touch
    assert len(list(ET.fromstring(striped(12, 3)._repr_html_()).iter(f"{svg}rect"))) == 12
    assert len(striped(10**6, 64)._repr_html_()) < 10_000


def test_schedules_are_tables_of_their_cells() -> None:
    schedule = build_schedule("pass_kv", visible_blocks(causal(), zigzag(16, 4)))
    shown = schedule._repr_html_()
    assert shown.count("<tr>") == 1 + schedule.num_steps
    for t, step in enumerate(schedule.steps):
        for rank in range(4):
            actions = schedule.actions(rank, t)
            assert f"<td>{'<br>'.join(map(str, (*actions.attends, *actions.sends)))}</td>" in shown
        assert step == schedule.step(t)


def test_simulations_say_what_they_sent() -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 16, 4))
    shown = simulate_attention(*x, mask=causal(), layout=zigzag(16, 4))._repr_html_()
    block = 2 * 2 * 4 * 4 * 8  # k and v of 2 heads and 4 tokens, in float64
    assert f"{4 * 3 * block:,} bytes sent in 4 steps" in shown
    assert shown.count("<svg") == shown.count("<table") == 1


def test_a_plan_of_a_hostile_model_is_escaped(plan: Plan) -> None:
    name = "<img src=x onerror=alert(1)>"
    hostile = replace(plan, request=replace(plan.request, model=replace(plan.request.model, id=name)))
    assert name not in hostile._repr_html_()
    assert "&lt;img src=x" in hostile._repr_html_()
    assert plan._repr_html_().count("<tr>") == 11
    assert payload_of(build_plan_page(hostile))["title"].startswith(f"Plan: {name}")


# Documents

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("build", [contiguous, zigzag, striped])
def test_the_pictures_of_the_documents_are_drawn_by_the_library(build: Callable[[int, int], Layout]) -> None:
    drawn = build(32, 4)._repr_html_()
    file = DOCS / "images" / f"layout-{build.__name__}.svg"
    assert file.read_text() == f"{drawn.replace('currentColor', '#7d8590')}\n"


def test_the_documents_count_what_is_in_the_lesson() -> None:
    sections = {section["id"]: section for section in describe_lesson()["sections"]}
    ring, faults, questions = (sections[key] for key in ("ring", "break", "questions"))
    says = (DOCS / "page.md").read_text()
    assert f"{len(ring['runs'])} runs of 2, 3, 4 or 8 ranks" in says
    assert len(faults["faults"]) == 7  # six mistakes, and none
    assert "Six mistakes" in says
    assert len(questions["questions"]) == 13
    assert "Thirteen, each answered" in says
    assert f"{MOST_TOKENS} tokens, {MOST_RANKS} ranks" in says
    assert f"{MOST_EVENTS:,} events, {MOST_LANES:,} ranks" in says
    assert f"up to {plan_timeline.MOST_RANKS} ranks" in says
