"""Programs of the reproducible mode: a fixed grid of tiles, whose results are summed in a fixed tree."""

__all__: list[str] = []
