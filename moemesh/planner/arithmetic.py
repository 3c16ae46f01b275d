"""Numpy's element-wise functions for numbers that may be floats or columns.

Two floats are compared without numpy, whose call takes ten times as much time; NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: A number, or a numpy array that broadcasts to one entry per layout: formulas accept both.
Number = Any
FloatArray = NDArray[np.float64]

_where: Callable[..., Any] = np.where


def _plain(value: Any) -> Number:
    """`value` unchanged if it is a column, or a Python number if it is a numpy scalar."""
    return value if value.ndim else value.item()


def where(condition: Number, yes: Number, no: Number) -> Number:
    """`yes` where the condition holds, else `no`."""
    if type(condition) is bool and type(yes) is type(no) is float:
        return yes if condition else no
    return _plain(_where(condition, yes, no))


def maximum(left: Number, right: Number) -> Number:
    if type(left) is type(right) is float:
        return left if left >= right or left != left else right
    return _plain(np.maximum(left, right))


def minimum(left: Number, right: Number) -> Number:
    if type(left) is type(right) is float:
        return left if left <= right or left != left else right
    return _plain(np.minimum(left, right))
