"""Human-readable times and rates."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time as text: ``8 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``.

    >>> duration(7.6), duration(200), duration(12_000), duration(187_000)
    ('8 s', '3 min', '3 h 20 min', '2 d 3 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def flop_rate(tflops: float) -> str:
    """A rate, given in 10^12 operations per second, as text: ``3.2 GFLOP/s``, ``412.0 TFLOP/s``.

    >>> flop_rate(0.00317), flop_rate(412)
    ('3.2 GFLOP/s', '412.0 TFLOP/s')
    """
    return f"{tflops:,.1f} TFLOP/s" if tflops >= 1 else f"{1000 * tflops:,.1f} GFLOP/s"
