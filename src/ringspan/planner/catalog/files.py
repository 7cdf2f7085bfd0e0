"""How are the catalogue's files read, and what is suggested for an unknown name?

A figure in TOML is { value, source, verified }. Readers get the value and can ask which figures are unconfirmed. A
missing key stays missing; it is never filled in with a default of a library.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ringspan.errors import UnsupportedError

Entry = Mapping[str, Any]


@lru_cache(maxsize=8)
def read_data(name: str) -> dict[str, Any]:
    """Read one of the package's TOML files."""
    return tomllib.loads((files("ringspan.planner.catalog") / "data" / name).read_text(encoding="utf-8"))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a user's TOML file; refuse one that cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedError(f"{path}: {error.strerror}", remedy="give a file that exists and can be read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UnsupportedError(f"{path} is not a TOML file: {error}") from None
    except RecursionError:
        raise UnsupportedError(
            f"{path}: arrays or tables nested too deeply", remedy="give a file with fewer levels"
        ) from None


def plain(entry: Entry) -> dict[str, Any]:
    """Return the values without sources."""
    return {key: value["value"] if isinstance(value, dict) else value for key, value in entry.items()}


def unverified(entry: Entry) -> tuple[str, ...]:
    """Return the keys whose figures are unconfirmed."""
    return tuple(key for key, value in entry.items() if isinstance(value, dict) and not value.get("verified", True))


def find(entries: Iterable[Entry], name: str, what: str, argument: str) -> Entry:
    """Return the entry with an id; refuse an unknown id of that argument with the nearest ones."""
    by_id = {entry["id"]: entry for entry in entries}
    if name not in by_id:
        raise UnsupportedError(
            f"the catalogue has no such {what}", argument=argument, value=name, remedy=nearest(name, by_id)
        )
    return by_id[name]


def nearest(name: str, names: Iterable[str]) -> str:
    """Suggest the names nearest to a name."""
    known = sorted(names)
    close = difflib.get_close_matches(name.lower(), known, n=4, cutoff=0.5)
    close += [other for other in known if name.lower() in other and other not in close]
    return f"did you mean {' or '.join(close[:4])}?" if close else f"use one of {', '.join(known)}"
