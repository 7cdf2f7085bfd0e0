"""Where does a command print its report, and how wide?"""

import os
from typing import Any

FILE_WIDTH = 100  # columns, where the output goes to no terminal and COLUMNS is not set


def new_console() -> Any:
    """Standard output, as wide as the terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console
