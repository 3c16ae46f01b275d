"""SwiGLU and the backward of RMSNorm compiled for a CPU: imports numba, so it is imported late.

Arrays are C-contiguous: h [B, 2 F] holds gate, then up; x is [B, H]. bfloat16 numbers come as their
16 bits. The
compiled code is kept on disk beside this file, or in numba's own folder where that is read-only.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

# Division must not check for zero (`error_model`), or no loop is vectorised.
#: Sums may be taken in any order and products contracted; NaN and infinities keep their meaning.
_FAST = {"contract", "reassoc"}
_LOG2_E, _LARGEST = np.float32(1.44269504), np.float32(88.0)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ONE, _HALF = np.float32(1.0), np.float32(0.5)
#: exp(r) = 1 + r + r^2 p(r) for |r| <= ln(2) / 2 (S. Moshier, Cephes, expf), highest power first.
_P5, _P4 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3)
_P3, _P2 = np.float32(8.3334519073e-3), np.float32(4.1665795894e-2)
_P1, _P0 = np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


def _compiled(function: Callable[..., Any]) -> Any:
    options = {"fastmath": _FAST, "error_model": "numpy", "nogil": True}
    try:
        return njit(function, cache=True, **options)
    except RuntimeError:  # nowhere to keep the compiled code
        return njit(function, **options)


@njit(inline="always", error_model="numpy")
def _sigmoid(x):
    """1 / (1 + exp(-x)); relative error below 3e-7."""
    t = -x
    t = _LARGEST if t > _LARGEST else t
    t = -_LARGEST if t < -_LARGEST else t
    n = np.floor(t * _LOG2_E + _HALF)
    r = t - n * _LN2_HIGH - n * _LN2_LOW
    p = _P5
    p = p * r + _P4
    p = p * r + _P3
    p = p * r + _P2
    p = p * r + _P1
    p = p * r + _P0
    exp_r = p * r * r + r + _ONE
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return _ONE / (_ONE + exp_r * power)


@njit(inline="always", error_model="numpy")
def _from_bits(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(inline="always", error_model="numpy")
def _to_bits(x):
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.float32(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(np.uint32(0x7FC0)) if x != x else np.uint16(rounded)


def _forward_float32(h, weights, product):
    width = product.shape[1]
    for row in range(product.shape[0]):
        weight = weights[row]
        gates, ups, products = h[row, :width], h[row, width:], product[row]
        for column in range(width):
            gate, up = gates[column], ups[column]
            products[column] = gate * _sigmoid(gate) * up * weight


def _backward_float32(grad, h, weights, grad_h, grad_weights):
    width = grad.shape[1]
    for row in range(grad.shape[0]):
        weight, total = weights[row], np.float32(0.0)
        gates, ups, givens = h[row, :width], h[row, width:], grad[row]
        grad_gates, grad_ups = grad_h[row, :width], grad_h[row, width:]
        for column in range(width):
            gate, up, given = gates[column], ups[column], givens[column]
            slope = _sigmoid(gate)
            silu = gate * slope
            total += given * silu * up
            given_up = given * weight
            grad_gates[column] = given_up * up * (slope + silu * (_ONE - slope))
            grad_ups[column] = given_up * silu
            givens[column] = silu * up * weight
        grad_weights[row] = total


def _forward_bfloat16(h, weights, product):
    width = product.shape[1]
    for row in range(product.shape[0]):
        weight = weights[row]
        gates, ups, products = h[row, :width], h[row, width:], product[row]
        for column in range(width):
            gate, up = _from_bits(gates[column]), _from_bits(ups[column])
            products[column] = _to_bits(gate * _sigmoid(gate) * up * weight)


def _backward_bfloat16(grad, h, weights, grad_h, grad_weights):
    width = grad.shape[1]
    for row in range(grad.shape[0]):
        weight, total = weights[row], np.float32(0.0)
        gates, ups, givens = h[row, :width], h[row, width:], grad[row]
        grad_gates, grad_ups = grad_h[row, :width], grad_h[row, width:]
        for column in range(width):
            gate, up = _from_bits(gates[column]), _from_bits(ups[column])
            given = _from_bits(givens[column])
            slope = _sigmoid(gate)
            silu = gate * slope
            total += given * silu * up
            given_up = given * weight
            grad_gates[column] = _to_bits(given_up * up * (slope + silu * (_ONE - slope)))
            grad_ups[column] = _to_bits(given_up * silu)
            givens[column] = _to_bits(silu * up * weight)
        grad_weights[row] = total


def swiglu_of(*, is_bfloat16: bool) -> tuple[Any, Any]:
    """(forward, backward) for bfloat16 numbers given as bits, or for float32."""
    pair = (
        (_forward_bfloat16, _backward_bfloat16)
        if is_bfloat16
        else (_forward_float32, _backward_float32)
    )
    forward, backward = (_compiled(function) for function in pair)
    return forward, backward


def _norm_backward_float32(grad, x, weight, epsilon, grad_x, grad_weight):
    size = x.shape[1]
    for row in range(x.shape[0]):
        given, numbers, found = grad[row], x[row], grad_x[row]
        squares, product = np.float32(0.0), np.float32(0.0)
        for column in range(size):
            number = numbers[column]
            squares += number * number
            product += given[column] * weight[column] * number
        root = _ONE / np.sqrt(squares / np.float32(size) + epsilon)
        along = root * root * root * product / np.float32(size)
        for column in range(size):
            number, grad_y = numbers[column], given[column]
            found[column] = root * grad_y * weight[column] - along * number
            grad_weight[column] += np.float64(grad_y * number * root)


def _norm_backward_bfloat16(grad, x, weight, epsilon, grad_x, grad_weight):
    size = x.shape[1]
    for row in range(x.shape[0]):
        given, numbers, found = grad[row], x[row], grad_x[row]
        squares, product = np.float32(0.0), np.float32(0.0)
        for column in range(size):
            number = _from_bits(numbers[column])
            squares += number * number
            product += _from_bits(given[column]) * _from_bits(weight[column]) * number
        root = _ONE / np.sqrt(squares / np.float32(size) + epsilon)
        along = root * root * root * product / np.float32(size)
        for column in range(size):
            number, grad_y = _from_bits(numbers[column]), _from_bits(given[column])
            scale = _from_bits(weight[column])
            found[column] = _to_bits(root * grad_y * scale - along * number)
            grad_weight[column] += np.float64(grad_y * number * root)


def norm_backward_of(*, is_bfloat16: bool) -> Any:
    """Backward of RMSNorm for bfloat16 numbers given as bits, or for float32: writes `grad_x`, and
    adds to `grad_weight`, float64 [H]."""
    return _compiled(_norm_backward_bfloat16 if is_bfloat16 else _norm_backward_float32)
