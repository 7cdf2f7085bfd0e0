"""Numbers as people read them: seconds, bytes, tokens."""

_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def format_seconds(seconds: float) -> str:
    """Three digits in s, ms or µs."""
    for unit, size in _SECONDS:
        if abs(float(f"{seconds / size:.3g}")) >= 1:
            return f"{float(f'{seconds / size:.3g}'):,g} {unit}"
    return f"{float(f'{seconds * 1e6:.3g}'):g} µs"


def format_bytes(nbytes: float) -> str:
    """Three digits with an SI prefix; small numbers in full."""
    for unit, size in _BYTES:
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes / size < 1000 else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes:,.0f} bytes"


def format_tokens(tokens: int) -> str:
    """128K is 128 · 2¹⁰, 1M is 2²⁰; other numbers in full."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"
