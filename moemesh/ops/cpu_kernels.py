"""SwiGLU, RMSNorm and rotary positions compiled for a CPU: imports numba, so it is imported late.

Arrays are C-contiguous. Activations and tables are float32, or bfloat16 as uint16 bits: numba
compiles each function for both. Functions compute in fp32 and round once; sums over rows are
float64. A call computes part `part` of `parts` of the rows: one call a thread. Compiled code is
cached next to this file, or in numba's own folder if this one is read-only.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

#: Flags of LLVM: sums in any order, fused multiply-add; NaN and infinities are still computed.
_FAST = {"contract", "reassoc"}
_LOG2_E, _LARGEST = np.float32(1.44269504), np.float32(88.0)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ONE, _HALF = np.float32(1.0), np.float32(0.5)
#: exp(r) = 1 + r + r^2 p(r) for |r| <= ln(2) / 2 (S. Moshier, Cephes, expf), highest power first.
_P5, _P4 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3)
_P3, _P2 = np.float32(8.3334519073e-3), np.float32(4.1665795894e-2)
_P1, _P0 = np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


def _compiled(function: Callable[..., Any]) -> Any:
    # error_model: a division that checks for zero would keep loops from being vectorised.
    options = {"fastmath": _FAST, "error_model": "numpy", "nogil": True}
    try:
        return njit(function, cache=True, **options)
    except RuntimeError:  # no writable folder for the cache
        return njit(function, **options)


@njit(inline="always", error_model="numpy")
def _sigmoid(x):
    """1 / (1 + exp(-x)); relative error below 3e-7 from -88 on. Smaller x have the value at -88."""
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


@njit(inline="always")
def _share(part, parts, num_rows):
    return range(part * num_rows // parts, (part + 1) * num_rows // parts)


def _number(stored):
    """A stored number in fp32."""
    raise NotImplementedError("compiled code only")


def _store(array, index, number):
    """Write an fp32 number into a row: bfloat16 rounds to nearest, ties to even; NaN stays NaN."""
    raise NotImplementedError("compiled code only")


@overload(_number)
def _number_of(stored):
    if stored == types.uint16:
        return lambda stored: np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)
    return lambda stored: stored


@overload(_store)
def _store_in(array, index, number):
    def rounded(array, index, number):
        bits = np.float32(number).view(np.uint32)
        up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        high = np.uint16((bits + up) >> np.uint32(16))
        array[index] = np.uint16(np.uint32(0x7FC0)) if number != number else high

    def plain(array, index, number):
        array[index] = number

    return rounded if array.dtype == types.uint16 else plain


@_compiled
def swiglu(part, parts, h, weights, product):
    """``silu(gate) * up * weight`` of h [B, 2 F], gate then up, into product [B, F]."""
    width = product.shape[1]
    for row in _share(part, parts, product.shape[0]):
        weight = weights[row]
        gates, ups, products = h[row, :width], h[row, width:], product[row]
        for column in range(width):
            gate, up = _number(gates[column]), _number(ups[column])
            _store(products, column, gate * _sigmoid(gate) * up * weight)


@_compiled
def swiglu_backward(part, parts, grad, h, weights, grad_h, grad_weights):
    """The gradients of h and of the weights; the recomputed product overwrites `grad` [B, F]."""
    width = grad.shape[1]
    for row in _share(part, parts, grad.shape[0]):
        weight, total = weights[row], np.float32(0.0)
        gates, ups, grads = h[row, :width], h[row, width:], grad[row]
        grad_gates, grad_ups = grad_h[row, :width], grad_h[row, width:]
        for column in range(width):
            gate, up = _number(gates[column]), _number(ups[column])
            grad_product = _number(grads[column])
            sigmoid = _sigmoid(gate)
            silu = gate * sigmoid
            total += grad_product * silu * up
            weighted = grad_product * weight
            _store(grad_gates, column, weighted * up * (sigmoid + silu * (_ONE - sigmoid)))
            _store(grad_ups, column, weighted * silu)
            _store(grads, column, silu * up * weight)
        grad_weights[row] = total


@_compiled
def rms_norm(part, parts, x, weight, epsilon, y):
    """x [B, H] over the root of its mean square, times the weight [H]."""
    size = x.shape[1]
    for row in _share(part, parts, x.shape[0]):
        numbers, result = x[row], y[row]
        squares = np.float32(0.0)
        for column in range(size):
            number = _number(numbers[column])
            squares += number * number
        root = _ONE / np.sqrt(squares / np.float32(size) + epsilon)
        for column in range(size):
            scale = _number(weight[column])
            _store(result, column, _number(numbers[column]) * root * scale)


@_compiled
def rms_norm_backward(part, parts, grad, x, weight, epsilon, grad_x, grad_weights):
    """Writes `grad_x` [B, H], and adds to row `part` of `grad_weights`, float64 [parts, H]."""
    size = x.shape[1]
    grad_weight = grad_weights[part]
    for row in _share(part, parts, x.shape[0]):
        grads, numbers, result = grad[row], x[row], grad_x[row]
        squares, product = np.float32(0.0), np.float32(0.0)
        for column in range(size):
            number = _number(numbers[column])
            squares += number * number
            product += _number(grads[column]) * _number(weight[column]) * number
        root = _ONE / np.sqrt(squares / np.float32(size) + epsilon)
        # The component of the gradient along x: the norm removes it.
        projection = root * root * root * product / np.float32(size)
        for column in range(size):
            number, grad_y = _number(numbers[column]), _number(grads[column])
            scale = _number(weight[column])
            _store(result, column, root * grad_y * scale - projection * number)
            grad_weight[column] += np.float64(grad_y * number * root)


@_compiled
def rotate(part, parts, x, cosine, sine, pairs_lie_together, sign, y):
    """Rotate the first R channels of x [P, heads, D] by tables [Q, R]; position p has their row
    ``p % Q``. `sign` -1: by the opposite angles. Pairs are channels (i, i + R/2), or (2i, 2i + 1)
    if `pairs_lie_together`."""
    num_positions, num_heads, size = x.shape
    rotated = cosine.shape[1]
    half = rotated // 2
    for position in _share(part, parts, num_positions):
        row = position % cosine.shape[0]
        cosines, sines = cosine[row], sine[row]
        for head in range(num_heads):
            numbers, result = x[position, head], y[position, head]
            # One loop for both is not vectorized: it is 12 times slower in bfloat16.
            if pairs_lie_together:
                for pair in range(half):
                    first, second = 2 * pair, 2 * pair + 1
                    low, high = _number(numbers[first]), _number(numbers[second])
                    sin, cos = sign * _number(sines[second]), _number(cosines[first])
                    _store(result, first, low * cos - high * sin)
                    _store(result, second, high * cos + low * sin)
            else:
                for first in range(half):
                    second = first + half
                    low, high = _number(numbers[first]), _number(numbers[second])
                    sin, cos = sign * _number(sines[second]), _number(cosines[first])
                    _store(result, first, low * cos - high * sin)
                    _store(result, second, high * cos + low * sin)
            for channel in range(rotated, size):
                result[channel] = numbers[channel]
