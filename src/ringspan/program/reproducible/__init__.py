"""The same for the reproducible mode: a fixed grid of tiles, summed in a fixed tree."""

__all__: list[str] = []
