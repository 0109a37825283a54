"""A row as one value in a kernel: `load` it, do arithmetic on it, `store` it; and hints about memory needed soon.

`n`, and the lanes of a row, have to be constants of the kernel: literals, or variables of the function around it.
"""

import operator
from collections.abc import Callable, Sequence
from functools import cache as remember
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel, register_default
from numba.extending import intrinsic, lower_builtin, type_callable

BYTES = 64
"""Bytes of a piece: a cache line, and the widest vector of any processor. Narrower ones take 2 or 4 instructions."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
_INTO_L2, _INTO_L1 = 2, 3


_inlined: Any = intrinsic(prefer_literal=True)
"""Makes a function for kernels from its type and its instructions."""


@remember
def counts_of(n: int, most: int) -> Sequence[int]:
    """Return the numbers of each vector of a row: equal powers of two, at the end perhaps a smaller one. Nothing for a row
    that these do not fill."""
    if n < 4:
        return ()
    wide = min(most, 1 << n.bit_length() - 1)
    rest = n % wide
    return () if rest & (rest - 1) else (wide,) * (n // wide) + (rest,) * (rest > 0)


class Lanes(types.Type):
    """Numba's type of `n` floats in registers."""

    def __init__(self, dtype: Any, n: int) -> None:
        self.dtype = dtype
        self.n = n
        self.counts = counts_of(n, BYTES * 8 // dtype.bitwidth)
        if not self.counts:
            raise ValueError(f"a row of {n} {dtype} takes too many kinds of vectors: use the plain loops")
        super().__init__(f"Lanes({dtype}, {n})")

    @property
    def pieces(self) -> list[Any]:
        return [ir.VectorType(_FLOATS[self.dtype], count) for count in self.counts]


@register_default(Lanes)
class _Model(PrimitiveModel):
    """In LLVM: a struct of vectors. LLVM would cut one vector of 48 floats into twelve of four wherever branches meet."""

    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, ir.LiteralStructType(lanes.pieces))


def _cut(builder: Any, value: Any) -> list[Any]:
    return [builder.extract_value(value, i) for i in range(len(value.type.elements))]


def _joined(builder: Any, pieces: list[Any]) -> Any:
    value = ir.Constant(ir.LiteralStructType([piece.type for piece in pieces]), ir.Undefined)
    for i, piece in enumerate(pieces):
        value = builder.insert_value(value, piece, i)
    return value


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, row: Any, column: Any) -> Any:
    """Return a pointer to array[row, column] of an array in C order."""
    made = context.make_array(array_type)(context, builder, array)
    width = cgutils.unpack_tuple(builder, made.shape)[1]
    return builder.gep(made.data, [builder.add(builder.mul(row, width), column)])


def _check(array: Any) -> None:
    if array.ndim != 2 or array.layout != "C":
        raise TypeError(f"rows of {array}: pass an array of two dimensions in C order")


@_inlined
def load(typingctx, array, row, column, n):
    """Return array[row, column : column + n] as lanes."""
    _check(array)
    lanes = Lanes(array.dtype, n.literal_value)

    def codegen(context, builder, signature, args):
        start = _pointer(context, builder, array, args[0], args[1], args[2])
        pieces = []
        for i, vector in enumerate(lanes.pieces):
            place = builder.gep(start, [_I64(i * lanes.counts[0])])
            piece = builder.load(builder.bitcast(place, vector.as_pointer()))
            piece.align = lanes.dtype.bitwidth // 8
            pieces.append(piece)
        return _joined(builder, pieces)

    return lanes(array, types.intp, types.intp, n), codegen


@_inlined
def store(typingctx, array, row, column, value):
    """array[row, column : column + n] = lanes."""
    _check(array)

    def codegen(context, builder, signature, args):
        start = _pointer(context, builder, array, args[0], args[1], args[2])
        for i, piece in enumerate(_cut(builder, args[3])):
            place = builder.gep(start, [_I64(i * value.counts[0])])
            stored = builder.store(piece, builder.bitcast(place, piece.type.as_pointer()))
            stored.align = value.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, value), codegen


@_inlined
def zeros(typingctx, array, n):
    lanes = Lanes(array.dtype, n.literal_value)
    return lanes(array, n), lambda context, builder, signature, args: ir.Constant(context.get_value_type(lanes), None)


@_inlined
def filled(typingctx, like, number):
    return like(like, like.dtype), lambda context, builder, signature, args: _filled(builder, like, args[1])


def _filled(builder: Any, lanes: Lanes, number: Any) -> Any:
    made = {}
    for vector in lanes.pieces:
        if vector.count not in made:
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, _I32(0))
            made[vector.count] = _shuffled(builder, one, one, [0] * vector.count)
    return _joined(builder, [made[vector.count] for vector in lanes.pieces])


@_inlined
def root(typingctx, lanes):
    def codegen(context, builder, signature, args):
        roots = []
        for piece in _cut(builder, args[0]):
            name = f"llvm.sqrt.v{piece.type.count}f{lanes.dtype.bitwidth}"
            kind = ir.FunctionType(piece.type, [piece.type])
            roots.append(builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [piece]))
        return _joined(builder, roots)

    return lanes(lanes), codegen


def _added(builder: Any, low: Any, high: Any) -> Any:
    """Return low + high, where high may be a smaller vector, which is added to the first numbers."""
    n, count = low.type.count, high.type.count
    if n == count:
        return builder.fadd(low, high)
    first = builder.fadd(_shuffled(builder, low, low, range(count)), high)
    whole = _shuffled(builder, first, first, [i % count for i in range(n)])
    return _shuffled(builder, whole, low, [i if i < count else n + i for i in range(n)])


def _shuffled(builder: Any, a: Any, b: Any, places: Sequence[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(places)), list(places)))


@_inlined
def total(typingctx, lanes):
    """Return the sum by halves, as `tree_sum` does: the upper half is added to the lower until one is left."""

    def codegen(context, builder, signature, args):
        pieces = _cut(builder, args[0])
        while len(pieces) > 1:
            half = 1 << (len(pieces) - 1).bit_length() - 1
            folded = [_added(builder, low, high) for low, high in zip(pieces, pieces[half:])]
            pieces = folded + pieces[len(folded) : half]
        (vector,) = pieces
        n = vector.type.count
        while n > 1:
            n //= 2
            low, high = (_shuffled(builder, vector, vector, range(begin, begin + n)) for begin in (0, n))
            vector = builder.fadd(low, high)
        return builder.extract_element(vector, _I32(0))

    return lanes.dtype(lanes), codegen


@_inlined
def above(typingctx, a, b, then, other):
    """Return `then` where a > b, and `other` elsewhere, including where one of them is NaN. Each may be a number."""
    lanes = next(one for one in (a, b, then, other) if isinstance(one, Lanes))

    def codegen(context, builder, signature, args):
        rows = [
            arg if isinstance(kind, Lanes) else _filled(builder, lanes, arg) for kind, arg in zip(signature.args, args)
        ]
        pieces = zip(*(_cut(builder, row) for row in rows), strict=True)
        return _joined(builder, [builder.select(builder.fcmp_ordered(">", a, b), x, y) for a, b, x, y in pieces])

    given = [one if isinstance(one, Lanes) else lanes.dtype for one in (a, b, then, other)]
    return lanes(*given), codegen


def _operator(function: Any, operation: str) -> None:
    """Define an operator for lanes on both sides, or a number of their dtype on one."""

    @type_callable(function)
    def typed(context):
        def both(a, b):
            lanes = a if isinstance(a, Lanes) else b
            fits = isinstance(lanes, Lanes) and all(one is lanes or one is lanes.dtype for one in (a, b))
            return lanes if fits else None

        return both

    def apply(context, builder, signature, args):
        lanes = signature.return_type
        a, b = (
            _cut(builder, arg if kind is lanes else _filled(builder, lanes, arg))
            for kind, arg in zip(signature.args, args, strict=True)
        )
        return _joined(builder, [getattr(builder, operation)(x, y) for x, y in zip(a, b, strict=True)])

    for kinds in ((Lanes, Lanes), (Lanes, types.Float), (types.Float, Lanes)):
        lower_builtin(function, *kinds)(apply)


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


def _hinting(level: int, writes: int) -> Callable[..., Any]:
    def typed(typingctx, array, row, n):
        _check(array)
        size = n.literal_value * array.dtype.bitwidth // 8

        def codegen(context, builder, signature, args):
            start = builder.bitcast(_pointer(context, builder, array, args[0], args[1], _I64(0)), _I8.as_pointer())
            kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            for offset in range(0, size, BYTES):
                builder.call(function, [builder.gep(start, [_I64(offset)]), _I32(writes), _I32(level), _I32(1)])
            return context.get_dummy_value()

        return types.void(array, types.intp, n), codegen

    return typed


soon = _inlined(_hinting(_INTO_L1, 0))
"""soon(array, row, n): array[row, :n] will be read after some tens of other rows; start fetching it."""

later = _inlined(_hinting(_INTO_L2, 0))
"""Like `soon`, for rows further ahead: into L2, which can wait for more at once."""

written_soon = _inlined(_hinting(_INTO_L1, 1))
"""Like `soon`, for a row that will also be written."""
