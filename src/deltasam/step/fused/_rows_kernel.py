"""The Triton kernels of :mod:`deltasam.step.fused.rows`, which imports them if Triton is installed."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def bias_kernel(out, bias, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """``out += bias`` for every row of out (rows, columns)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    values = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["in_group"])
def norm_kernel(x, scale, shift, out, means, factors, in_group, columns, eps, BLOCK: tl.constexpr):
    """One row of a layer norm, with the scale and the shift of its group; a row fits into a block."""
    row = tl.program_id(0).to(tl.int64)
    own = (row // in_group) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + row * columns + column, mask=inside, other=0.0)
    mean = tl.sum(values, 0) / columns
    centred = tl.where(inside, values - mean, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / columns + eps)
    scaled = centred * factor * tl.load(scale + own + column, mask=inside, other=0.0)
    scaled += tl.load(shift + own + column, mask=inside, other=0.0)
    tl.store(out + row * columns + column, scaled, mask=inside)
    tl.store(means + row, mean)
    tl.store(factors + row, factor)


@triton.jit(do_not_specialize=["in_group"])
def norm_backward_kernel(gradient, x, scale, means, factors, out, in_group, columns, BLOCK: tl.constexpr):
    """The gradient of one row of ``norm_kernel`` by its input."""
    row = tl.program_id(0).to(tl.int64)
    own = (row // in_group) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    mean, factor = tl.load(means + row), tl.load(factors + row)
    d = tl.load(gradient + row * columns + column, mask=inside, other=0.0)
    d = d * tl.load(scale + own + column, mask=inside, other=0.0)
    normal = tl.where(inside, (tl.load(x + row * columns + column, mask=inside, other=0.0) - mean) * factor, 0.0)
    along = tl.sum(d * normal, 0) / columns
    value = factor * (d - tl.sum(d, 0) / columns - normal * along)
    tl.store(out + row * columns + column, value, mask=inside)
