"""Hooks for `mkdocs build`: the navigation, links that lead out of docs/, and a check that the site loads nothing else.

The navigation lists the pages that exist in the order below and any other page behind them, so that adding a page needs
no change here. Three documents that stand elsewhere in the repository become pages. A link to any other file outside
docs/ becomes its text, because the site does not contain that file.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ORDER = (
    "index.md",
    "learn.md",
    "page.md",
    "training.md",
    "transformers.md",
    "inference.md",
    "serve.md",
    "video.md",
    "reproducible.md",
    "plan.md",
    "plan_questions.md",
    "verify.md",
    "command_line.md",
    "performance.md",
    "support.md",
    "architecture.md",
)
REFERENCE = ("index.md", "calls.md", "masks_and_layouts.md", "cache.md", "training.md", "schedules.md", "errors.md")
OUTSIDE = {"results.md": "benchmarks/RESULTS.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LOADS = re.compile(r'<(?:script|img|source|iframe|link rel="stylesheet")[^>]*(?:src|srcset|href)="(?:https?:)?//[^"]*')
LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Build the navigation from the pages that exist."""
    docs = Path(config.docs_dir)
    pages = _ordered(docs, ORDER)
    reference = [f"api/{name}" for name in _ordered(docs / "api", REFERENCE)]
    config.nav = [*pages, {"API reference": reference}, {"Project": list(OUTSIDE)}]
    return config


def _ordered(folder: Path, first: tuple[str, ...]) -> list[str]:
    names = {path.name for path in folder.glob("*.md")}
    return [name for name in first if name in names] + sorted(names - set(first))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the repository that stand outside docs/."""
    for name, path in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links to documents outside docs/ at their pages; turn links to other files outside it into text."""
    here = page.file.src_uri
    if here in OUTSIDE:
        return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", markdown)
    folder = posixpath.dirname(here)
    pages = {f"../{path}": name for name, path in OUTSIDE.items()}

    def rewrite(link: re.Match[str]) -> str:
        words, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in pages:
            return f"[{words}]({posixpath.relpath(pages[path], folder or '.')}{anchor or ''})"
        return words if path.startswith("../") else link[0]

    return LINK.sub(rewrite, markdown)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Refuse a page that loads a script, a style or a picture from another host."""
    if found := LOADS.search(output):
        raise PluginError(f"{page.file.src_uri}: the site must work offline, but the page loads {found[0]}")
    return output
