"""The lesson, built once, and texts that try to be more than text."""

import json
from functools import lru_cache
from typing import Any

from ringspan.page import build_lesson

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "</script x=<script x=",
    "<img src=x onerror='window.hacked = 1'>",
    "<!--<script>",
    "javascript:window.hacked=1",
    "' onmouseover='window.hacked=1",
    '" autofocus onfocus="window.hacked=1',
    "&lt;b&gt; \\u003c ${window.hacked=1} {{window.hacked}}",
)


@lru_cache(maxsize=1)
def lesson_html() -> str:
    """What `ringspan page` writes."""
    return build_lesson()


def payload_of(page: str) -> Any:
    """What a page draws, as plain data."""
    return json.loads(page.split('id="payload">')[1].split("</script>")[0])
