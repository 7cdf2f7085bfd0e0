"""The form of every page: accessible, fits a phone, prints, and shows hostile text as text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser.conftest import Opened, OpenPage
from ringspan.layout import zigzag
from ringspan.mask import causal
from ringspan.page import build_plan_page, build_simulation_page, build_trace_page
from ringspan.page.lesson import PRESETS
from ringspan.page.report import build_report, facts, table, text
from ringspan.planner.catalog import load_model, parse_devices
from ringspan.planner.plan import Plan, Request, build_plan
from ringspan.simulate import simulate_attention
from support.page import HOSTILE, lesson_html

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

WIDTHS = (360, 768, 1440)
# Boxes of the ring's cards and of the controls: what may not lie on one another.
OVERLAPS = """(selector) => {
  const boxes = [...document.querySelectorAll(selector)].filter((e) => e.checkVisibility()).map((e) => e.getBoundingClientRect());
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) => meet(a, b))).length;
}"""  # noqa: E501
# Text that sticks out of the box that is to hold it.
STICKS_OUT = """() => [...document.querySelectorAll('button, .facts > div, th, td, .card text')].filter((e) => e.checkVisibility()).filter((e) => {
  const holder = e.tagName === 'text' ? e.parentElement.querySelector('.card-box') : e;
  const [inner, outer] = [e.getBoundingClientRect(), holder.getBoundingClientRect()];
  return e.tagName === 'text' ? inner.left < outer.left - 1 || inner.right > outer.right + 1 : e.scrollWidth > e.clientWidth + 1;
}).map((e) => e.textContent)"""  # noqa: E501
# Tables that are wider than what holds them and do not scroll.
WIDE_TABLES = """() => [...document.querySelectorAll('table')].filter((e) => e.checkVisibility() && !e.closest('.scroll'))
  .filter((e) => e.getBoundingClientRect().right > e.parentElement.getBoundingClientRect().right + 1).map((e) => e.textContent)"""  # noqa: E501


def build_plan_of(name: str = "llama-3.1-8b") -> Plan:
    request = Request(load_model("llama-3.1-8b"), parse_devices("2x8xh100", None, None), "prefill", 2**17)
    plan = build_plan(request)
    return replace(plan, request=replace(request, model=replace(request.model, id=name)))


def trace_of(name: str, count: int = 40) -> dict[str, Any]:
    events = [
        {"ph": "X", "name": f"{name}{i}", "pid": i % 4, "ts": 10.0 * i, "dur": 30.0, "args": {name: name}}
        for i in range(count)
    ]
    return {"traceEvents": events, "otherData": {name: name}}


def simulation_page() -> str:
    x = np.random.default_rng(0).standard_normal((3, 19, 4))
    runs = {
        f"{name} on {ranks}": simulate_attention(*x, mask=causal(), layout=zigzag(19, ranks), algorithm=name)
        for name, ranks in (("pass_kv", 3), ("all_gather", 12))
    }
    return build_simulation_page(runs, "Two runs.")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {
        "lesson": lesson_html(),
        "plan": build_plan_page(build_plan_of()),
        "trace": build_trace_page(trace_of("q0×kv"), trace_of("q0×kv")),
        "simulation": simulation_page(),
    }


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("name", ["lesson", "plan", "trace", "simulation"])
def test_axe_finds_nothing_serious(name: str, colours: str, pages: dict[str, str], open_page: OpenPage) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    opened = open_page(pages[name], color_scheme=colours, bypass_csp=True)  # the checker is a script of its own
    found = axe.Axe().run(opened.page).response["violations"]
    serious = [it for it in found if it["impact"] in ("serious", "critical")]
    assert [(it["id"], [node["html"] for node in it["nodes"]][:3]) for it in serious] == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["lesson", "plan", "trace", "simulation"])
def test_nothing_overlaps_or_sticks_out(name: str, width: int, pages: dict[str, str], open_page: OpenPage) -> None:
    opened = open_page(pages[name], width=width)
    assert_fits(opened, width)
    if name == "lesson":
        for preset in PRESETS:
            for step in (0, 1, 99):
                opened.show(f"#run={preset[0]}&step={step}")
                assert_fits(opened, width)
    opened.assert_quiet()


def assert_fits(opened: Opened, width: int) -> None:
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    for selector in (".card, .sum", "button, select, input[type=range], .place", ".facts > div", ".stage .travelling"):
        assert opened.page.evaluate(OVERLAPS, selector) == 0, selector
    assert opened.page.evaluate(STICKS_OUT) == []
    assert opened.page.evaluate(WIDE_TABLES) == []


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_text_is_shown_and_does_nothing(hostile: str, open_page: OpenPage) -> None:
    report = build_report(
        hostile,
        [hostile],
        [
            facts("a", hostile, [(hostile, hostile)]),
            table("b", hostile, [hostile], [[hostile]]),
            text("c", "t", [hostile]),
        ],
        hostile,
    )
    for source in (report, build_trace_page(trace_of(hostile)), build_plan_page(build_plan_of(hostile))):
        opened = open_page(source, f"#run={hostile}&at={hostile}")
        for button in opened.page.locator("thead button").all()[:3]:
            button.click()
        assert opened.page.evaluate("window.hacked") is None
        assert opened.page.locator("#page script, #page img, #page b").count() == 0
        assert hostile[:40].split("\n")[0] in opened.page.locator("body").inner_text()
        opened.assert_quiet()


def test_the_policy_stops_what_an_injected_script_would_do(open_page: OpenPage) -> None:
    """The test of the test: a script without the hash does not run, and a request does not leave."""
    source = lesson_html().replace("</body>", "<script>window.hacked = 1</script></body>")
    opened = open_page(source)
    assert opened.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in complaint for complaint in opened.complaints)
    leaves = opened.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'stopped')")
    assert leaves == "stopped"


def test_a_long_trace_is_drawn_and_can_be_scrubbed(open_page: OpenPage) -> None:
    opened = open_page(build_trace_page(trace_of("q0×kv", 20_000)))
    canvas = opened.page.locator("canvas")
    before = canvas.evaluate("(e) => e.toDataURL().length")
    opened.page.get_by_label("Zoom").fill("60")
    opened.page.get_by_label("Position").fill("500")
    redrawn = "(before) => document.querySelector('canvas').toDataURL().length !== before"
    opened.page.wait_for_function(redrawn, arg=before)
    canvas.focus()
    canvas.press("ArrowRight")
    assert "q0×kv" in opened.page.locator("output.detail").inner_text()
    opened.assert_quiet()


def test_a_table_sorts_by_value(pages: dict[str, str], open_page: OpenPage) -> None:
    plan = build_plan_of()
    opened = open_page(pages["plan"])
    ranking = opened.page.locator("section[data-id=ranking]")
    show_all = ranking.get_by_role("button", name="Show all")
    if show_all.is_visible():
        show_all.click()
    ranking.get_by_role("button", name="memory").click()
    rows = ranking.locator("tbody tr").all_inner_texts()
    least = min(plan.options, key=lambda option: option.memory.total)
    assert str(least.setup) in rows[0]
    assert len(rows) == len(plan.options)
    ranking.get_by_role("button", name="memory").click()
    assert ranking.locator("th[aria-sort=descending]").count() == 1
    most = max(plan.options, key=lambda option: option.memory.total)
    assert f"\t{most.setup.tp}\t{most.setup.cp}\t" in ranking.locator("tbody tr").first.inner_text()


def test_print_leaves_the_controls_out(pages: dict[str, str], open_page: OpenPage) -> None:
    opened = open_page(pages["lesson"])
    assert opened.page.locator(".player").is_visible()
    opened.page.emulate_media(media="print")
    assert not opened.page.locator(".player").is_visible()
    assert opened.page.locator(".stage .ring-picture").is_visible()


def test_the_payload_in_the_page_is_the_payload(pages: dict[str, str], open_page: OpenPage, tmp_path: Path) -> None:
    opened = open_page(pages["simulation"])
    shown = opened.page.evaluate("JSON.parse(document.getElementById('payload').textContent)")
    assert shown == json.loads(pages["simulation"].split('id="payload">')[1].split("</script>")[0])
