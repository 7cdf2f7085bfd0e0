"""The chat of a server in a browser: answers, and what each turn reused; nothing is asked of another host."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.serving import Server, serving
from support.tiny_model import make_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

WAIT_MS = 60_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("served") / "tiny"
    make_model(folder)
    # Short answers, since this model never ends one by itself.
    with serving(folder, "--ranks", 2, "--no-verify", "--max-tokens", 60) as server:
        yield server


@pytest.fixture
def chat(browser: Any, server: Server) -> Iterator[Any]:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.complaints, page.hosts = [], set()
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.hosts.add(urlsplit(request.url).netloc))
    page.goto(f"http://127.0.0.1:{server.port}/")
    yield page
    context.close()


def wait_for_turn(page: Any, number: int) -> list[str]:
    """The cells of a turn, once it is through."""
    page.locator("tbody tr").nth(number - 1).wait_for()
    page.get_by_role("button", name="Send").wait_for()
    return page.locator("tbody tr").nth(number - 1).locator("td").all_inner_texts()


def test_two_turns_by_mouse_and_by_keyboard(chat: Any, server: Server) -> None:
    chat.fill("#question", "w1 w2 w3")
    chat.get_by_role("button", name="Send").click()
    turn, prompt, reused, first, _, algorithm = wait_for_turn(chat, 1)
    assert (turn, prompt, reused) == ("1", "5", "0")
    assert first.endswith("s")
    assert ": " in algorithm
    chat.locator("#question").press_sequentially("w4")
    chat.keyboard.press("Shift+Enter")
    chat.keyboard.press("w")
    assert chat.locator("#question").input_value() == "w4\nw"
    chat.keyboard.press("5")
    chat.keyboard.press("Enter")
    turn, prompt, reused, *_ = wait_for_turn(chat, 2)
    assert (turn, prompt, reused) == ("2", "69", "64")  # the last token was said, and nothing computed behind it
    said = chat.locator(".talk p").all_inner_texts()
    messages = [{"role": "user", "content": "w1 w2 w3"}]
    assert said[:3] == ["w1 w2 w3", server.chat(messages, max_tokens=60).text, "w4\nw5"]
    assert chat.complaints == []
    assert chat.hosts == {f"127.0.0.1:{server.port}"}


def test_an_answer_can_be_stopped_and_a_refusal_is_shown(chat: Any) -> None:
    chat.route("**/v1/chat/completions", lambda route: None)  # a request that never gets an answer
    chat.fill("#question", "w1")
    chat.get_by_role("button", name="Send").click()
    chat.get_by_role("button", name="Stop").click()
    chat.get_by_text("Stopped.").wait_for()
    chat.unroute("**/v1/chat/completions")
    chat.fill("#question", "w1 " * 3000)
    chat.get_by_role("button", name="Send").click()
    chat.get_by_text("Failed: a conversation has at most 2048 tokens here").wait_for()
    assert chat.locator("tbody tr").count() == 0
    assert chat.locator("#question").input_value().startswith("w1")
