"""Triton's interpreter made quicker, and its products independent of the tile.

The interpreter is made for clarity. Its products are NumPy's. There the rounding of an entry
depends on the shape of the tile around it and on which factor is transposed. On a GPU it does not:
each entry is a sum along the same row and column, in the same order. A backward pass that computes
scores again in other tiles would meet other scores in the interpreter alone.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import numpy as np
import torch


def amend() -> None:
    """Has the interpreter of this process from now on do once, or at once, what it does repeatedly.

    Products of float32 are summed in float64 and rounded once, so an entry is the same in every
    tile. In float32 a CPU adds 64 equal terms one after the other and errs by 15 units in the last
    place, always to one side. Decoding of equal entries erred by a twentieth of that on an H200.

    Reductions with a combining function of their own work on whole arrays: neighbours are combined,
    then the results, as a GPU does it, in place of one after the other. A verification of kernels
    that reduce pairs spent nine tenths of its time there. More than half of the rest went into work
    that has the same result each time. Each call of a function by a kernel searches the whole
    language for members to replace. Each operation checks the types of its shape, and describes
    its operands and its result anew.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    if interpreter.ReduceOps.generic_reduce is _reduce:
        return
    interpreter.ReduceOps.generic_reduce = _reduce
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _products(builder.create_dot)
    interpreter._patch_builtin = _patching(interpreter._patch_builtin)
    interpreter._patch_lang = _patching_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _numpy_dtypes(interpreter._get_np_dtype)
    core._type_for_tuple_values = _types_of_tuples(core._type_for_tuple_values)
    core._unwrap_shape = _unwrapping(core._unwrap_shape)
    core.block_type.__init__ = _blocks(core.block_type.__init__)
    core.tensor.__init__ = _tensors(core.tensor.__init__)
    semantics = semantic.TritonSemantic
    semantics.broadcast_impl_value = _broadcasting(semantics.broadcast_impl_value)
    options = interpreter.interpreter_builder.options
    # Each sum and product of integers is computed a second time, in more bits, for an assertion
    # that is dropped unless the interpreter debugs.
    interpreter.interpreter_builder.options = dataclasses.replace(
        options, sanitize_overflow=options.sanitize_overflow and options.debug
    )


def _reduce(operation, tensors: tuple) -> list:
    """Do what the method of `ReduceOps` does: a tensor for each of `tensors`, of equal shapes."""
    whole = operation.axis is None
    tensors, axis = operation.unravel(tensors, operation.axis)
    dtypes = [tensor.dtype for tensor in tensors]
    arrays = [np.moveaxis(tensor.handle.data, axis, -1) for tensor in tensors]
    while arrays[0].shape[-1] > 1:
        pairs = [
            operation.to_tensor(array[..., first::2], dtype)
            for first in (0, 1)
            for array, dtype in zip(arrays, dtypes, strict=True)
        ]
        combined = operation.combine_fn.fn(*pairs)
        combined = combined if isinstance(combined, tuple) else (combined,)
        arrays = [tensor.handle.data for tensor in combined]
    if whole and not operation.keep_dims:
        arrays = [array.item() for array in arrays]
    elif operation.keep_dims:
        arrays = [np.moveaxis(array, -1, axis) for array in arrays]
    else:
        arrays = [array[..., 0] for array in arrays]
    return [operation.to_tensor(*each) for each in zip(arrays, dtypes, strict=True)]


def _products(plain: Callable) -> Callable:
    """`plain`, which adds a product of two tiles to a third, in float64 if that one is float32."""
    from triton.runtime import interpreter

    @functools.wraps(plain)
    def product(self, a, b, d, *precision):
        factors, floats = (a.data, b.data), (np.float16, np.float32)
        if d.data.dtype != np.float32 or any(each.dtype not in floats for each in factors):
            return plain(self, a, b, d, *precision)
        exact = torch.matmul(*(torch.from_numpy(each.astype(np.float64)) for each in factors))
        return interpreter.TensorHandle(exact.float().numpy() + d.data, d.dtype.scalar)

    return product


def _patching(plain: Callable) -> Callable:
    """`plain`, which replaces the builtins of a module or class, without a search for them.

    The members are listed here, before any kernel runs. While a kernel runs, they are replaced by
    functions that no longer say so, and a function that it calls finds nothing to replace.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    places = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    names = {
        place: [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]
        for place in places
    }

    @functools.wraps(plain)
    def patch(place, builder, scope):
        if place not in names:
            return plain(place, builder, scope)
        # All of them are replaced, or none is.
        if tl.core.is_builtin(getattr(place, names[place][0])):
            for name in names[place]:
                interpreter._patch_attr(place, name, getattr(place, name), builder, scope)

    return patch


def _patching_once(plain: Callable) -> Callable:
    """`plain`, which replaces the language that a function sees; it stays where a caller did so."""
    from triton import language as tl
    from triton.runtime import interpreter

    @functools.wraps(plain)
    def patch(function):
        seen = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        replaced = not tl.core.is_builtin(tl.tensor.__add__)
        if seen and replaced and all(place.static_print is print for place in seen):
            return interpreter._LangPatchScope()
        return plain(function)

    return patch


def _numpy_dtypes(plain: Callable) -> Callable:
    """`plain`, which gives a type of Triton as one of NumPy, with the answers for scalars kept."""
    from triton.language import core

    known = {}

    @functools.wraps(plain)
    def numpy_dtype(dtype):
        if type(dtype) is core.block_type:
            dtype = dtype.element_ty
        if type(dtype) is not core.dtype:
            return plain(dtype)
        if dtype.name not in known:
            known[dtype.name] = plain(dtype)
        return known[dtype.name]

    return numpy_dtype


def _types_of_tuples(plain: Callable) -> Callable:
    """`plain`, which gives the type of a tuple; those of tuples of numbers, as of shapes, kept."""
    from triton.language import core

    known = {}

    @functools.wraps(plain)
    def type_of(values, fields=None):
        numbers = tuple([each.value if type(each) is core.constexpr else each for each in values])
        if fields is not None or not all(type(number) is int for number in numbers):
            return plain(values, fields)
        if numbers not in known:
            known[numbers] = plain(values)
        return known[numbers]

    return type_of


def _unwrapping(plain: Callable) -> Callable:
    """`plain`, which gives a shape as a list of numbers; those that hold nothing else at once."""
    from triton.language import core

    @functools.wraps(plain)
    def unwrapped(shape):
        if type(shape) in (list, tuple, core.tuple):
            numbers = [each.value if type(each) is core.constexpr else each for each in shape]
            if all(type(number) is int for number in numbers):
                return numbers
        return plain(shape)

    return unwrapped


def _blocks(plain: Callable) -> Callable:
    """`plain`, which makes the type of a tile; what follows from a shape of numbers is kept."""
    from triton.language import core

    known = {}

    @functools.wraps(plain)
    def made(self, element_ty, shape):
        numbers = tuple(shape.values if type(shape) is core.tuple else shape)
        listed = type(shape) in (list, core.tuple)
        if not listed or not all(type(number) is int for number in numbers):
            plain(self, element_ty, shape)
            return
        if numbers not in known:
            plain(self, element_ty, shape)
            known[numbers] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = known[numbers]
        self.name = f"<{text}, {element_ty}>"

    return made


def _tensors(plain: Callable) -> Callable:
    """`plain`, which makes a tensor; what follows from the shape of a tile or a number is kept."""
    from triton.language import core

    known = {}

    @functools.wraps(plain)
    def made(self, handle, type):
        is_block = type.is_block()
        if is_block and not isinstance(type, core.block_type):
            plain(self, handle, type)
            return
        numbers = tuple(type.shape.values) if is_block else ()
        if numbers not in known:
            plain(self, handle, type)
            known[numbers] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[numbers]

    return made


def _broadcasting(plain: Callable) -> Callable:
    """`plain`, which brings two operands to one shape; tiles of the same shape are left at once."""
    from triton.language import core

    @functools.wraps(plain)
    def broadcast(self, lhs, rhs):
        tiles = type(lhs.type) is type(rhs.type) is core.block_type
        # Equal shapes of numbers are one object.
        if tiles and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return plain(self, lhs, rhs)

    return broadcast
