"""The Triton kernels of :mod:`deltasam.step.fused.products`, which imports them if Triton is installed."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def split_kernel(matrix, parts, scales, columns, RIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """``deltasam.step.fused.products.split_by_torch``, with the same numbers; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    matrix += row * columns
    parts += row * (3 * columns)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(matrix + at, mask=at < columns, other=0.0)))
    exponent = tl.max(largest, 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 15), 254)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        values = tl.load(matrix + at, mask=inside, other=0.0) * factor
        high = values.to(tl.float16)
        low = (values - high.to(tl.float32)).to(tl.float16)
        if RIGHT:
            tl.store(parts + at, high, mask=inside)
            tl.store(parts + columns + at, low, mask=inside)
        else:
            tl.store(parts + at, low, mask=inside)
            tl.store(parts + columns + at, high, mask=inside)
        tl.store(parts + 2 * columns + at, high, mask=inside)
    tl.store(scales + row, ((exponent - 14) << 23).to(tl.float32, bitcast=True))


@triton.jit
def unscale_kernel(out, by_row, by_column, bias, columns, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """``out * by_column * by_row + bias`` in place."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(out + row * columns + at, mask=inside) * tl.load(by_column + at, mask=inside)
    values = values * tl.load(by_row + row)  # second: the inputs of a layer can be larger than its weights
    if HAS_BIAS:
        values = values + tl.load(bias + at, mask=inside)
    tl.store(out + row * columns + at, values, mask=inside)
