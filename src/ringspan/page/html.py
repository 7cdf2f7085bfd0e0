"""How does a payload become one HTML file that opens from disk and asks nothing of the network?

The file holds a style sheet, a script and the payload. Its Content-Security-Policy allows exactly that style sheet and
that script, by their hashes, and nothing else: no request, no other script, no form. The payload is JSON in which no
character can end the element that holds it; the script only ever makes text nodes of it.
"""

import base64
import hashlib
import html
import json
from functools import lru_cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from ringspan.errors import ShapeError

SCRIPTS = (
    *("dom.js", "state.js", "matrix.js", "ringpicture.js", "follow.js", "player.js", "chooser.js", "ring.js"),
    *("faults.js", "gantt.js", "hiding.js", "report.js", "questions.js", "main.js"),
)
MOST_BYTES = 50_000_000  # of a payload; a browser is slow to open more

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def assemble(payload: dict[str, Any]) -> str:
    """The page of a payload."""
    style, script = _style(), _script()
    payload = {**payload, "version": version("ringspan")}
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(payload["title"]),
        "style": style,
        "payload": embed_json(payload),
        "script": script,
    }
    page = _read("page.html")
    for name, part in parts.items():
        before, after = page.split(f"{{{name}}}", 1)  # once each, and in order, so that no part is searched
        parts[name] = before + part
        page = after
    return "".join(parts.values()) + page


def embed_json(value: Any) -> str:
    """JSON that can stand in a script element: no character of it ends the element or is read as markup."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if len(text) > MOST_BYTES:
        raise ShapeError(
            f"the data has {len(text):,} characters, and no browser shows a page of more than {MOST_BYTES:,} with ease",
            remedy="show fewer ranks, steps or events",
        )
    for character, escaped in _ESCAPES.items():
        text = text.replace(character, escaped)
    return text


@lru_cache(maxsize=1)
def _script() -> str:
    return "(() => {\n'use strict';\n" + "\n".join(map(_read, SCRIPTS)) + "})();\n"


@lru_cache(maxsize=1)
def _style() -> str:
    return _read("page.css")


def _read(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
