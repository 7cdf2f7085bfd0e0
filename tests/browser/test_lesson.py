"""The lesson in a browser: it shows what was computed, every control works, by mouse and by keyboard alone."""

import html
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from browser.conftest import Opened, OpenPage
from ringspan.cli import main
from ringspan.page.cases import ALGORITHM_CHOICES, DECODES, Combination, list_combinations, run_combination
from ringspan.page.faults import describe_faults
from ringspan.page.hiding import describe_hiding
from ringspan.page.lesson import PRESETS, describe_lesson
from ringspan.page.questions import PLAIN, RING
from ringspan.page.runs import describe_run
from ringspan.simulate import RankStep
from support.page import payload_of
from support.readings import Reading, list_readings

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

COMBINATIONS = list(list_combinations())
OTHERS = (
    "8|zigzag|causal|ulysses|",
    "4|contiguous|documents|pass_q|forward",
    "8|zigzag|causal|double_ring|",
    "4|zigzag|causal|decode_replicated|",
    "4|zigzag|causal|decode_sharded|",
)
READ_STEP = """() => {
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  const words = (cell) => [...cell.childNodes].map((node) => node.textContent);
  return {
    now: all('.tile.now').map((tile) => [tile.dataset.rank, tile.dataset.tile, tile.getAttribute('d')]),
    done: all('.tile.done').length,
    rows: all('table.ranks tbody tr').map((row) =>
      Object.fromEntries(all('td', row).map((cell) => [cell.dataset.name, words(cell)]))),
  };
}"""
NAME = "(e) => (e.ariaLabel || e.textContent || e.dataset.key || '').trim()"
INTERACTIVE = f"""[...document.querySelectorAll('button:not(:disabled), input, select, a[href], summary, canvas')]
  .filter((e) => e.offsetParent && e.type !== 'radio').map({NAME})"""
FOCUSED = f"""(() => {{
  const e = document.activeElement;
  return e === document.body ? null : [({NAME})(e), getComputedStyle(e).outlineStyle];
}})()"""


def forward(opened: Opened) -> Any:
    return opened.page.get_by_role("button", name="Forward one step")


def press(opened: Opened, button: Any) -> None:
    """By the keyboard; playwright clicks nothing that is marked as disabled."""
    button.focus()
    opened.page.keyboard.press("Enter")


def area(path: str) -> int:
    """The summed area of rectangles drawn as M x y H x V y H x Z."""
    boxes = re.findall(r"M(\d+) (\d+)H(\d+)V(\d+)H(\d+)Z", path)
    assert "".join(f"M{a} {b}H{c}V{d}H{e}Z" for a, b, c, d, e in boxes) == path
    return sum((int(right) - int(left)) * (int(bottom) - int(top)) for left, top, right, bottom, _ in boxes)


@pytest.mark.parametrize("one", COMBINATIONS, ids=lambda one: one.key)
def test_stepping_reaches_the_tiles_and_messages_of_the_schedule(
    one: Combination, lesson_file: Path, open_page: OpenPage
) -> None:
    simulation = run_combination(one)
    sent = [0] * one.ranks
    opened = open_page(lesson_file, f"#run={one.key}")
    done = 0
    for t, step in enumerate(simulation.trace):
        shown = opened.page.evaluate(READ_STEP)
        expected = {
            (str(cell.rank), f"{event.blocks[0]}×{event.blocks[1]}"): event.pairs
            for cell in step
            for event in cell.attended
        }
        assert {(rank, tile): area(path) for rank, tile, path in shown["now"]} == expected
        assert shown["done"] == done
        done += len(expected)
        for cell, row in zip(step, shown["rows"], strict=True):
            sent[cell.rank] += sum(event.nbytes for event in cell.sent)
            assert_row(cell, row, sent[cell.rank])
        assert len(simulation.schedule.step(t).attends) == one.ranks
        forward(opened).evaluate("(button) => button.click()")
    shown = opened.page.evaluate(READ_STEP)
    assert (shown["now"], shown["done"]) == ([], done)
    assert forward(opened).is_disabled()
    opened.assert_quiet()


def assert_row(cell: RankStep, row: dict[str, list[str]], sent: int) -> None:
    assert row["sends"] == [f"{event.blocks[0]}→{event.peer}" for event in cell.sent]
    assert row["pairs"] == [f"{sum(event.pairs for event in cell.attended):,}"]
    assert row["sent"] == [f"{sent:,}"]
    tiles = [f"{event.blocks[0]}×{event.blocks[1]}" for event in cell.attended]
    if len(tiles) < 3:
        assert row["computes"] == tiles


def test_the_followed_query_shows_the_errors_that_were_computed(lesson_file: Path, open_page: OpenPage) -> None:
    run = describe_run(run_combination(Combination(4, "zigzag", "causal", "pass_kv", "forward")))
    opened = open_page(lesson_file)
    for i, row in enumerate(run["queries"]["rows"]):
        opened.show(f"#query={row}")
        cells = opened.page.locator(".follow tbody tr").all_inner_texts()
        for text, lse, share, error in zip(
            cells, *(run["queries"][key][i] for key in ("lse", "share", "error")), strict=True
        ):
            _, shown_share, shown_lse, shown_error = text.split("\t")
            assert float(shown_error) == pytest.approx(error)
            assert shown_share == f"{share} %"
            assert float(shown_lse.replace("−∞", "-inf")) == (float("-inf") if lse is None else lse)


def test_every_control_changes_what_the_page_says(lesson_file: Path, open_page: OpenPage) -> None:
    opened = open_page(lesson_file, "#step=1")
    body = opened.page.locator("main")
    for name in ("2", "contiguous", "full", "pass-Q", "reverse"):
        opened.show("#step=1")
        before = body.inner_text()
        button = opened.page.locator(".control button", has_text=re.compile(f"^{re.escape(name)}$"))
        assert button.get_attribute("aria-disabled") == "false", name
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert body.inner_text() != before
    for key, label, _ in PRESETS[1:]:
        opened.page.get_by_role("button", name=re.compile(f"^{re.escape(label)}")).first.click()
        assert f"run={key.replace('|', '%7C')}" in opened.page.url
    opened.show(f"#run={RING}")
    for slider in opened.page.get_by_role("slider").all():
        before = body.inner_text(), opened.page.url
        slider.focus()
        slider.press("Home")
        slider.press("ArrowRight")
        changed = body.inner_text(), opened.page.url
        slider.press("End")
        assert (body.inner_text(), opened.page.url) != before or changed != before
    opened.assert_quiet()


def test_choices_outside_the_page_name_a_command_that_makes_them(
    lesson_file: Path, open_page: OpenPage, tmp_path: Path
) -> None:
    opened = open_page(lesson_file, f"#run={RING}")
    commands = set()
    for one in (RING, *OTHERS):
        opened.show(f"#run={one}")
        for button in opened.page.locator(".control button[aria-disabled=true]").all():
            press(opened, button)
            assert button.get_attribute("aria-pressed") == "false"
            note = opened.page.locator(".note")
            assert note.inner_text()
            if note.locator("code").count() and "--html" in note.locator("code").inner_text():
                commands.add(note.locator("code").inner_text())
    assert len(commands) > 10
    for i, command in enumerate(sorted(commands)):
        program, *arguments = shlex.split(command)
        assert (program, arguments[-1]) == ("ringspan", "run.html")
        file = tmp_path / f"run{i}.html"
        result = CliRunner().invoke(main, [*arguments[:-1], str(file), "--json"])
        assert result.exit_code == 0, f"{command}: {result.stderr}"
        assert file.exists()


def test_the_command_of_a_run_in_the_page_makes_it(lesson_file: Path, open_page: OpenPage, tmp_path: Path) -> None:
    """Every algorithm once: the page of its command has the run with the schedule that the lesson shows."""
    lesson = {run["key"]: run for run in payload_of(lesson_file.read_text(encoding="utf-8"))["sections"][1]["runs"]}
    shown = {one.algorithm: one for one in COMBINATIONS if one.mask == "causal" and one.ranks == 4}
    opened = open_page(lesson_file)
    for algorithm, one in shown.items():
        opened.show(f"#run={one.key}")
        _, *arguments, _ = shlex.split(opened.page.locator(".whole .command code").inner_text())
        file = tmp_path / "run.html"
        result = CliRunner().invoke(main, [*arguments, str(file), "--json"])
        assert result.exit_code == 0, result.stderr
        label = next(choice.label for choice in ALGORITHM_CHOICES if choice.key == algorithm)
        runs = payload_of(file.read_text(encoding="utf-8"))["sections"][0]["runs"]
        (made,) = (run for run in runs if run["key"] in (label, algorithm.replace("_", "-")))
        if algorithm not in DECODES:  # these decode one token more than the lesson's cache holds
            assert [[cell[1] for cell in step] for step in made["steps"]] == [
                [cell[1] for cell in step] for step in lesson[one.key]["steps"]
            ]
        assert made["num_steps"] == lesson[one.key]["num_steps"]


def test_the_balance_of_layouts_is_that_of_their_schedules(lesson_file: Path, open_page: OpenPage) -> None:
    opened = open_page(lesson_file)
    for layout in ("contiguous", "zigzag", "striped"):
        trace = run_combination(Combination(4, layout, "causal", "pass_kv", "forward")).trace
        pairs = [[sum(event.pairs for event in cell.attended) for cell in step] for step in trace]
        figure = opened.page.locator(f".balance[data-layout={layout}]")
        assert f"{layout}: {sum(map(max, pairs))} pairs long" in figure.inner_text()
        expected = {(str(rank), str(t), str(n)) for t, step in enumerate(pairs) for rank, n in enumerate(step) if n}
        bars = figure.locator(".work").evaluate_all("(all) => all.map((e) => [e.dataset.rank, e.dataset.step])")
        assert {tuple(bar) for bar in bars} == {(rank, t) for rank, t, _ in expected}
        assert sorted(figure.locator(".chip-name").all_text_contents()) == sorted(n for _, _, n in expected)


def test_what_the_library_refuses_says_why(lesson_file: Path, open_page: OpenPage) -> None:
    opened = open_page(lesson_file, "#run=3|zigzag|causal|pass_kv|forward")
    press(opened, opened.page.locator(".control button", has_text="Ulysses"))
    assert "must divide the query heads" in opened.page.locator(".note").inner_text()


@pytest.mark.parametrize("fault", describe_faults(), ids=lambda fault: fault["key"])
def test_a_fault_shows_its_error_and_its_refusal(fault: dict[str, Any], lesson_file: Path, open_page: OpenPage) -> None:
    opened = open_page(lesson_file)
    section = opened.page.locator("section[data-id=break]")
    section.get_by_role("button", name=fault["label"], exact=True).click()
    shown = section.inner_text()
    error = section.locator("[data-name=error]").inner_text()
    assert float(error.split()[1]) == fault["error"]
    assert error.startswith("✓" if fault["error"] < 1e-9 else "✗")
    assert section.locator("[data-name=wrong]").inner_text() == f"{fault['wrong']} of {fault['total']}"
    if fault["refusal"] is None:
        assert "accepts this schedule" in shown
    else:
        reason, *grid = fault["refusal"].split("\n")
        assert reason in shown
        marked = [line for line in grid if line.startswith("▶")]
        assert [line.rstrip("\n") for line in section.locator("pre .marked").all_inner_texts()] == marked


def test_the_time_sliders_show_the_cell_of_the_table(lesson_file: Path, open_page: OpenPage) -> None:
    table = describe_hiding()
    opened = open_page(lesson_file)
    for i, j in ((0, 0), (11, 11), (5, 7), (8, 3)):
        opened.show(f"#tokens={i}&rate={j}")
        section = opened.page.locator("section[data-id=time]")
        sentence = section.locator(".status").inner_text()
        cell = table["cells"][i][j]
        assert ("compute hides every message" in sentence) == cell["zigzag"]["hidden"]
        ratio = cell["contiguous"]["s"][0] / cell["zigzag"]["s"][0]
        assert f"{ratio:.2f} times as long" in sentence
        chart = section.locator("canvas").first
        chart.focus()
        assert "rank 0 computes q0×kv0" in section.locator("output.detail").first.inner_text()
        chart.press("ArrowDown")
        assert section.locator("output.detail").first.inner_text().startswith("rank 1")
    opened.assert_quiet()


def test_pointing_at_a_bar_tells_of_it(lesson_file: Path, open_page: OpenPage) -> None:
    opened = open_page(lesson_file)
    chart = opened.page.locator("section[data-id=time] canvas").first
    chart.scroll_into_view_if_needed()
    chart.hover(position={"x": 70, "y": 6})
    assert "rank 0 computes q0×kv0" in opened.page.locator("section[data-id=time] output.detail").first.inner_text()


def test_a_tap_tells_of_a_bar_and_keys_go_on_from_there(lesson_file: Path, open_page: OpenPage) -> None:
    opened = open_page(lesson_file, has_touch=True)
    section = opened.page.locator("section[data-id=time]")
    chart, detail = section.locator("canvas").first, section.locator("output.detail").first
    chart.tap(position={"x": 70, "y": 6})
    assert "rank 0 computes q0×kv0" in detail.inner_text()
    chart.press("ArrowDown")
    assert detail.inner_text().startswith("rank 1 ")
    chart.dispatch_event("pointerleave", {"pointerType": "mouse"})
    assert "rank" not in detail.inner_text()
    chart.press("ArrowRight")
    assert "rank 0 computes q0×kv0" in detail.inner_text()


def test_a_link_leads_to_the_same_view(lesson_file: Path, open_page: OpenPage) -> None:
    opened = open_page(lesson_file)
    opened.page.get_by_role("button", name=re.compile("^Who idles")).click()
    forward(opened).click()
    forward(opened).click()
    opened.page.get_by_role("button", name="drop the last hop").click()
    again = open_page(lesson_file, opened.page.url[opened.page.url.index("#") :])
    assert again.page.locator("main").inner_text() == opened.page.locator("main").inner_text()
    assert f"run={PLAIN.replace('|', '%7C')}" in again.page.url


def test_scrubbing_does_not_flood_the_address(lesson_file: Path, open_page: OpenPage) -> None:
    """Safari throws at the 101st change within 30 seconds; the picture must go on all the same."""
    opened = open_page(lesson_file)
    opened.page.evaluate("""() => {
      window.writes = 0;
      const replace = history.replaceState.bind(history);
      history.replaceState = (...all) => { window.writes += 1; replace(...all); };
    }""")
    slider = opened.page.get_by_label("Step", exact=True)
    slider.evaluate("""(e) => { for (let i = 0; i < 300; i += 1) {
      e.value = i % 4;
      e.dispatchEvent(new Event('input', { bubbles: true }));
    } }""")
    assert opened.page.locator(".place").inner_text() == "step 3 of 3"
    assert 0 < opened.page.evaluate("window.writes") <= 100
    opened.assert_quiet()


def test_a_page_within_another_page_works(lesson_file: Path, open_page: OpenPage) -> None:
    """A frame with `srcdoc`, as in a notebook, has no address that could be changed."""
    inner = html.escape(lesson_file.read_text(encoding="utf-8"))
    opened = open_page(f'<body data-ready><iframe width="1300" height="800" srcdoc="{inner}"></iframe>')
    frame = opened.page.frame_locator("iframe")
    frame.get_by_role("button", name="Forward one step").click()
    assert frame.locator(".place").inner_text() == "step 1 of 3"
    frame.locator(".questions li", has_text="bytes has rank 3 sent").get_by_role("link", name="Show me").click()
    assert frame.locator(".place").inner_text() == "step 2 of 3"
    assert opened.complaints == []


@pytest.mark.parametrize("fragment", ["#run=x&step=99&query=-1", "#step=%ff&run=%", "#<img src=x>", "#at=]&fault=1"])
def test_a_broken_link_shows_what_it_can(fragment: str, lesson_file: Path, open_page: OpenPage) -> None:
    opened = open_page(lesson_file, fragment)
    assert opened.page.locator("table.ranks").count() == 1
    opened.assert_quiet()


def test_playing_reaches_the_end_and_stops(lesson_file: Path, open_page: OpenPage) -> None:
    for motion in ("no-preference", "reduce"):
        opened = open_page(lesson_file, reduced_motion=motion)
        opened.page.get_by_label("Speed").select_option("fast")
        opened.page.get_by_role("button", name="Play").click()
        opened.page.locator(".place", has_text="done").wait_for()
        assert opened.page.get_by_role("button", name="Play").count() == 1
        opened.assert_quiet()


# Questions, answered by looking at the page


def ask(opened: Opened, words: str) -> Any:
    return opened.page.locator(".questions li", has_text=words)


def answer(item: Any, value: str) -> None:
    box = item.get_by_role("textbox")
    if box.count():
        box.fill(value)
    else:
        item.get_by_label(value, exact=True).check()
    item.get_by_role("button", name="Check").click()


def look(opened: Opened, item: Any) -> None:
    item.get_by_role("link", name="Show me").click()


def cell(opened: Opened, rank: int, name: str) -> str:
    return str(opened.page.locator(f"table.ranks tr[data-rank='{rank}'] td[data-name={name}]").inner_text())


def fact(opened: Opened, name: str) -> str:
    return str(opened.page.locator(".whole .facts div", has_text=name).locator("dd").inner_text())


def compare_bytes(opened: Opened) -> str:
    """The all-gather, which is being shown, against the ring."""
    gathered = fact(opened, "sent by all ranks")
    opened.page.get_by_role("button", name=re.compile("^The ring")).click()
    return "both send the same" if fact(opened, "sent by all ranks") == gathered else "the ring"


def test_questions_can_be_answered_by_looking(lesson_file: Path, open_page: OpenPage) -> None:
    opened = open_page(lesson_file)
    readings = {
        "times as long as a perfectly": lambda: (
            opened.page.locator(".balance[data-layout=contiguous]").inner_text().split(" ×")[0].split()[-1]
        ),
        "an approximation": lambda: (
            "no, only rounding is left"
            if float(fact(opened, "largest error")) < 1e-12
            else "yes, keys that are far away count less"
        ),
        "sends fewer bytes": lambda: compare_bytes(opened),
        "How many steps": lambda: fact(opened, "steps"),
        "whose keys and values": lambda: f"those of rank {cell(opened, 2, 'holds').removeprefix('kv')}",
        "bytes has rank 3 sent": lambda: cell(opened, 3, "sent"),
        "Which rank idles most": lambda: f"rank {max(range(4), key=lambda r: int(cell(opened, r, 'idle').split()[0]))}",
        "what share of the time": lambda: cell(opened, 0, "idle"),
        "window of 8 keys": lambda: str(opened.page.locator("td[data-name=sends] .tile-name").count()),
        "largest error if the last hop": lambda: (
            opened.page.locator("section[data-id=break] [data-name=error]").inner_text().split()[1]
        ),
        "Does compute hide": lambda: (
            "yes" if "hides every" in opened.page.locator("section[data-id=time] .status").inner_text() else "no"
        ),
        "From 8 ranks to 32": lambda: "it falls to about a quarter",
        "simply be added": lambda: (
            "Each was divided by the sum of its own weights, so it must first be weighted by the share of that sum."
        ),
    }
    assert opened.page.locator(".questions li").count() == len(readings)
    for words, read in readings.items():
        item = ask(opened, words)
        look(opened, item)
        answer(item, read())
        assert "✓ Right" in item.locator(".verdict").inner_text(), words
    opened.assert_quiet()


def test_a_place_is_shown_again_after_the_page_was_scrolled(lesson_file: Path, open_page: OpenPage) -> None:
    opened = open_page(lesson_file, reduced_motion="reduce")
    item = ask(opened, "bytes has rank 3 sent")
    for _ in range(2):
        look(opened, item)
        opened.page.wait_for_function("document.activeElement.textContent === 'The ring, step by step'")
        assert opened.page.locator(".place").inner_text() == "step 2 of 3"
        item.get_by_role("textbox").focus()
    forward(opened).click()
    look(opened, item)
    opened.page.go_back()
    opened.page.locator(".place", has_text="step 3 of 3").wait_for()


def test_a_wrong_or_missing_answer_is_told(lesson_file: Path, open_page: OpenPage) -> None:
    opened = open_page(lesson_file)
    (hides,) = (
        one for one in describe_lesson()["sections"][-1]["questions"] if one["text"].startswith("Does compute hide")
    )
    not_so = hides["choices"][1 - hides["answer"]]
    for words, wrong in (("How many steps", "3"), ("bytes has rank 3 sent", "many"), ("Does compute hide", not_so)):
        item = ask(opened, words)
        item.get_by_role("button", name="Check").click()
        assert "Give an answer first" in item.locator(".verdict").inner_text()
        answer(item, wrong)
        assert "✗" in item.locator(".verdict").inner_text()


# The keyboard


def test_the_keyboard_alone_can_do_everything(lesson_file: Path, open_page: OpenPage) -> None:
    opened = open_page(lesson_file)
    reached = tab_through(opened)
    interactive = opened.page.evaluate(INTERACTIVE)
    assert set(interactive) - set(reached) == set()
    opened.page.get_by_role("button", name=re.compile("^Who idles")).focus()
    opened.page.keyboard.press("Enter")
    assert "contiguous" in opened.page.url
    opened.page.keyboard.press("ArrowRight")
    assert opened.page.locator(".place").inner_text() == "step 1 of 3"
    opened.page.keyboard.press("ArrowLeft")
    assert opened.page.locator(".place").inner_text() == "step 0 of 3"
    question = ask(opened, "How many steps").get_by_role("textbox")
    question.focus()
    question.type("4")
    question.press("Enter")
    assert "✓" in ask(opened, "How many steps").locator(".verdict").inner_text()


def tab_through(opened: Opened) -> list[str]:
    """The names of what Tab reaches, each of which shows that it has the focus."""
    names: list[str] = []
    for _ in range(200):
        opened.page.keyboard.press("Tab")
        found = opened.page.evaluate(FOCUSED)
        if found is None:
            break
        name, outline = found
        assert outline != "none", name
        names.append(name)
    return names


# The table of docs/page.md

READ_HERE = {
    "bytes has rank 3 sent": "table.ranks tr[data-rank='3'] [data-name=sent]",
    "idle with a contiguous": "table.ranks tr[data-rank='0'] [data-name=idle]",
    "does rank 2 compute on": "table.ranks tr[data-rank='2'] [data-name=holds]",
    "softmax weight": ".follow tr[data-step='1'] td >> nth=0",
    "without the last hop": "section[data-id=break] [data-name=error]",
    "one receive buffer": "section[data-id=break] [data-name=wrong]",
    "contiguous take than zigzag": "section[data-id=time] .status",
}


@pytest.mark.parametrize("reading", list_readings(), ids=lambda reading: reading.question[:40])
def test_the_answers_of_the_document_stand_on_the_page(
    reading: Reading, lesson_file: Path, open_page: OpenPage
) -> None:
    opened = open_page(lesson_file, reading.view)
    if "sees 8 keys" in reading.question:
        shown = str(opened.page.locator("td[data-name=sends] .tile-name").count())
    else:
        (selector,) = (selector for words, selector in READ_HERE.items() if words in reading.question)
        shown = opened.page.locator(selector).inner_text()
    assert reading.answer in shown.replace("\u00a0", " ")
    opened.assert_quiet()
