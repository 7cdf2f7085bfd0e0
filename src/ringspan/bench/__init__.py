"""Measurements of the runtime on ranks it starts itself. What the parent process needs is free of torch."""

__all__: list[str] = []
