"""From a schedule to one rank's instructions, and the executor that runs them. No torch."""

__all__: list[str] = []
