"""An OpenAI-compatible server over ranks: one HTTP process in front, one process per rank behind it."""

from ringspan.serve.settings import ServeSettings

__all__ = [
    "ServeSettings",
]
