"""Speed up Triton's interpreter, which spends half of its time on needless work at each kernel call.

It patches its own operations into Triton, searching three modules for each call of a kernel or of a function in it;
here that happens once. It also broadcasts arrays that already have the same shape, and checks for overflows that it
never reports. All results stay the same.
"""

import inspect
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

QUICK = "_of_skirls_tests"


def quicken() -> None:
    """Patch Triton's interpreter. Do nothing if this release of Triton is built differently."""
    from triton.runtime import interpreter

    module: Any = interpreter
    wanted = ("_patch_lang", "_get_np_dtype", "_LangPatchScope", "interpreter_semantic", "interpreter_builder")
    if hasattr(module, QUICK) or not all(hasattr(module, name) for name in wanted):
        return
    setattr(module, QUICK, True)
    language, patch, patched = module.tl, module._patch_lang, set()

    @cache
    def modules(function: Any) -> set[ModuleType]:
        found = (value for value in function.__globals__.values() if inspect.ismodule(value))
        return {value for value in found if value in (language, language.core)}

    def patch_lang(function: Any) -> Any:
        if not modules(function) <= patched:
            patch(function)
            patched.update(modules(function))
        return module._LangPatchScope()  # nothing to restore: all kernels of this process are interpreted

    of_pointer, of_scalar = module._get_np_dtype, cache(module._get_np_dtype)

    def numpy_type(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        return (of_pointer if isinstance(element, language.pointer_type) else of_scalar)(element)

    semantic, broadcast = module.interpreter_semantic, module.interpreter_semantic.broadcast_impl_value

    def broadcast_both(left: Any, right: Any) -> Any:
        alike = left.type.is_block() and right.type.is_block() and left.type.shape == right.type.shape
        return (left, right) if alike else broadcast(left, right)

    builder = module.interpreter_builder
    if not builder.options.debug:  # the result of this check is discarded
        builder.options = replace(builder.options, sanitize_overflow=False)
    semantic.broadcast_impl_value = broadcast_both
    module._patch_lang, module._get_np_dtype = patch_lang, numpy_type
