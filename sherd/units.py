"""Sizes and times in words: three digits, and a unit that fits."""

from __future__ import annotations

BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def in_bytes(nbytes: float) -> str:
    """Returns `nbytes` in words, as `1.25 GiB`."""
    size, unit = abs(float(nbytes)), 0
    while size >= 999.5 and unit + 1 < len(BYTES):
        size, unit = size / 1024, unit + 1
    return f"{'-' * (nbytes < 0)}{three_digits(size) if unit else f'{size:.0f}'} {BYTES[unit]}"


def in_seconds(seconds: float) -> str:
    """Returns `seconds` in words, as `12.5 ms`."""
    size = abs(seconds)
    factor, unit = (1, "s") if size >= 1 else (1e3, "ms") if size >= 1e-3 or not size else (1e6, "µs")
    return f"{'-' * (seconds < 0)}{three_digits(size * factor)} {unit}"


def three_digits(size: float) -> str:
    """Returns `size` with three digits, and with all digits before the point."""
    return f"{size:,.0f}" if size >= 99.95 else f"{size:.1f}" if size >= 9.995 else f"{size:.2f}"
