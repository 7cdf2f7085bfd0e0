"""Where does a command print its report, and how wide is it?"""

import os
from typing import Any

FILE_WIDTH = 100  # columns, if the output is not a terminal and COLUMNS is not set
LEAST_WIDTH = 40  # columns: a narrower terminal wraps lines by itself


def new_console() -> Any:
    """Standard output, as wide as the terminal but not narrower than LEAST_WIDTH."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    console.width = max(console.width, LEAST_WIDTH)
    return console
