"""Memory, bytes, time and algorithm for real models and devices, checked against published figures. No torch."""

__all__: list[str] = []
