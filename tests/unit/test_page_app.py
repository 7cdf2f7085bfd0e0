"""The page that a server sends: the shared style, a script of its own, and requests to its own server only."""

import base64
import hashlib
import re

import pytest

from ringspan.page import build_app_page
from support.page import HOSTILE

SCRIPT = "show(document.getElementById('page'), h('h1', {}, 'Hello'));"


def hash_of(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def read(page: str, pattern: str) -> str:
    (found,) = re.findall(pattern, page, re.DOTALL)
    return str(found)


def test_the_policy_allows_this_script_and_style_and_the_own_server() -> None:
    page = build_app_page("Chat", SCRIPT, ".own { color: red; }")
    script, style = read(page, "<script>(.*?)</script>"), read(page, "<style>(.*?)</style>")
    policy = dict(part.split(" ", 1) for part in read(page, 'Policy" content="([^"]*)"').split("; "))
    assert policy["script-src"] == f"'{hash_of(script)}'"
    assert policy["style-src"] == f"'{hash_of(style)}'"
    assert policy["connect-src"] == "'self'"
    assert policy["default-src"] == "'none'"
    assert SCRIPT in script
    assert style.endswith(".own { color: red; }")


@pytest.mark.parametrize("title", HOSTILE)
def test_a_title_is_text(title: str) -> None:
    page = build_app_page(title, SCRIPT)
    assert page.count("<script") == 1
    assert "<img" not in page


def test_placeholders_in_a_title_are_not_filled() -> None:
    assert "<title>{style}{script}</title>" in build_app_page("{style}{script}", SCRIPT)


@pytest.mark.parametrize(("script", "style"), [("'</SCRIPT>'", ""), ("", "/* </style> */"), ("'<!--'", "")])
def test_a_script_that_would_end_its_element_is_refused(script: str, style: str) -> None:
    with pytest.raises(ValueError, match="would end its own element"):
        build_app_page("Chat", script, style)
