"""How does a payload become one HTML file that opens from disk and asks nothing of the network?

The file holds a style sheet, a script and the payload. Its Content-Security-Policy allows exactly that style sheet and
that script, by their hashes, and nothing else: no request, no other script, no form. The payload is JSON in which no
character can end the element that holds it; the script only ever makes text nodes of it.
"""

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from ringspan.errors import ShapeError

SCRIPTS = (
    *("dom.js", "state.js", "matrix.js", "ringpicture.js", "follow.js", "player.js", "chooser.js", "ring.js"),
    *("balance.js", "faults.js", "gantt.js", "hiding.js", "report.js", "questions.js", "main.js"),
)
MOST_BYTES = 50_000_000  # of a payload; a browser is slow to open more

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_POLICY = "default-src 'none'; script-src '{script}'; style-src '{style}'; base-uri 'none'; form-action 'none'"


def assemble(payload: dict[str, Any]) -> str:
    payload = {**payload, "version": version("ringspan")}
    parts = {"header": _header(payload["title"], payload["lead"]), "payload": embed_json(payload)}
    return _fill("page.html", payload["title"], _script(), _style(), **parts)


def _header(title: str, lead: Iterable[str]) -> str:
    """The title and the first sentences; they stand in the file, so that they are painted before any script runs."""
    sentences = "".join(f'<p class="lead">{html.escape(sentence)}</p>' for sentence in lead)
    return f"<header><h1>{html.escape(title)}</h1>{sentences}</header>"


def build_app_page(title: str, script: str, style: str = "") -> str:
    """A page for a server to send: the shared style sheet and the functions of `dom.js`, and a script of its own.

    `script` fills the element with the id `page`. It may use `h`, `show`, `format` and the other functions of `dom.js`,
    and may send requests to the server that the page came from, to no other. `style` follows the shared style sheet.
    """
    return _fill("app.html", title, _wrap(_read("dom.js"), script), _style() + style, connects="connect-src 'self'; ")


def embed_json(value: Any) -> str:
    """JSON for a script element: none of its characters ends the element or is read as markup."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if len(text) > MOST_BYTES:
        raise ShapeError(
            f"the data has {len(text):,} characters, and no browser shows a page of more than {MOST_BYTES:,} with ease",
            remedy="show fewer ranks, steps or events",
        )
    for character, escaped in _ESCAPES.items():
        text = text.replace(character, escaped)
    return text


def _fill(skeleton: str, title: str, script: str, style: str, *, connects: str = "", **body: str) -> str:
    """The skeleton with its parts put in, once each and in order, so that no part is searched for another."""
    if "</script" in script.lower() or "<!--" in script or "</style" in style.lower():
        raise ValueError("a script or style sheet of the package would end its own element")
    policy = connects + _POLICY.format(script=_hash(script), style=_hash(style))
    parts = {"policy": policy, "title": html.escape(title), "style": style, **body, "script": script}
    page, filled = _read(skeleton), []
    for name, part in parts.items():
        before, mark, after = page.partition(f"{{{name}}}")
        if mark:
            filled += [before, part]
            page = after
    return "".join([*filled, page])


@lru_cache(maxsize=1)
def _script() -> str:
    return _wrap(*map(_read, SCRIPTS))


def _wrap(*scripts: str) -> str:
    return "(() => {\n'use strict';\n" + "\n".join(scripts) + "})();\n"


@lru_cache(maxsize=1)
def _style() -> str:
    return _read("page.css")


def _read(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
