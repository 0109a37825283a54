"""Compiled kernels on disk, each in a file named after what it was compiled from."""

import hashlib
import logging
import os
import pickle
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import config, serialize
from numba.core.compiler import CompileResult
from numba.misc.appdirs import AppDirs

log = logging.getLogger("skirl")

PACKAGE = Path(__file__).parents[1]
KEPT = 30 * 86400.0
"""Seconds after which a file may go, once another kernel of its module is compiled."""

_IMPORT = re.compile(rb"^[ \t]*(?:from|import) skirl([.\w]*)", re.MULTILINE)
_VERSIONS = (numba.__version__, llvmlite.__version__, np.__version__, sys.version)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return -1, -1
    return found.st_mtime_ns, found.st_size


_AT_START = {path: _stamp(path) for path in PACKAGE.rglob("*.py")}
"""The sources when this process began. One that changes later may have been imported before or after its change."""


@cache
def _source(path: Path) -> tuple[bytes, tuple[Path, ...]]:
    """Return the digest of a source, and the files that it imports: of a package, all, since any of them may be meant."""
    text, imports = path.read_bytes(), list[Path]()
    for name in {match.decode() for match in _IMPORT.findall(text)}:
        place = PACKAGE.joinpath(*name.split(".")[1:])
        module = place.with_suffix(".py")
        imports += [module] if module in _AT_START else [of for of in _AT_START if place in of.parents]
    return hashlib.sha256(text).digest(), tuple(imports)


def sources_of(path: Path) -> set[Path]:
    """Return the files of the package that can affect a kernel defined in this one: itself and all that it imports."""
    found, todo = set[Path](), [path]
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += _source(path)[1]
    return found


@cache
def _digest_of(path: Path) -> bytes | None:
    """Return a digest of a module's sources, or None if one has changed since this process began."""
    digest = hashlib.sha256(repr(_VERSIONS).encode())
    for source in sorted(sources_of(path)):
        if _stamp(source) != _AT_START[source]:
            return None
        digest.update(f"\n{source.relative_to(PACKAGE)} ".encode() + _source(source)[0])
    return digest.digest()


@cache
def kernel_folder() -> Path | None:
    """Return the folder for compiled kernels, or None.

    It is the first one that can be written to of NUMBA_CACHE_DIR, next to the package, and the user's cache.
    """
    places = [PACKAGE / "__pycache__" / "kernels", Path(AppDirs("skirl", appauthor=False).user_cache_dir) / "kernels"]
    if config.CACHE_DIR:  # pyright: ignore[reportAttributeAccessIssue]
        places.insert(0, Path(config.CACHE_DIR).absolute() / "skirl-kernels")  # pyright: ignore[reportAttributeAccessIssue]
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
        except OSError:
            continue
        return place
    log.warning("kernels are compiled again in each process: no folder can be written to, set NUMBA_CACHE_DIR to one")
    return None


class KernelCache:
    """What Numba asks for the compiled code of a function. Its own cache knows no sources but the function's, and numbers
    files, so that two processes can give two signatures the same number."""

    def __init__(self, function: Callable[..., Any], folder: Path, module: str, digest: bytes) -> None:
        self.cache_path = folder
        self._function, self._module, self._digest = function, module, digest

    def load_overload(self, sig: Any, target: Any) -> CompileResult | None:
        target.refresh()
        path = self._path(sig, target.codegen())
        try:
            found = pickle.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except Exception as error:  # it was cut off
            log.warning("the compiled kernel %s cannot be read, and is compiled again: %r", path, error)
            return None
        return CompileResult._rebuild(target, *found)

    def save_overload(self, sig: Any, result: Any) -> None:
        path = self._path(sig, result.codegen)
        draft = path.with_suffix(f".{secrets.token_hex(4)}")
        try:
            if not result.library.has_dynamic_globals:
                draft.write_bytes(serialize.dumps(result._reduce()))
                os.replace(draft, path)
                for old in self.cache_path.glob(f"{self._module}.*"):
                    if time.time() - _stamp(old)[0] / 1e9 > KEPT:
                        old.unlink(missing_ok=True)
        except OSError as error:
            log.warning("a compiled kernel is not kept on disk: %s", error)
            draft.unlink(missing_ok=True)

    def _path(self, sig: Any, codegen: Any) -> Path:
        key = repr((sig, codegen.magic_tuple(), _content(self._function))).encode()
        name = self._function.__qualname__.replace("<locals>", "")
        return self.cache_path / f"{self._module}.{name}-{hashlib.sha256(self._digest + key).hexdigest()[:32]}.nbc"


def _content(value: Any) -> Any:
    """Return what a function computes by, apart from its module: its code, and what it has from functions around it. It is
    the same in each process."""
    function = getattr(value, "py_func", value)
    code = getattr(function, "__code__", None)
    if code is None:
        return value
    constants = [constant for constant in code.co_consts if not hasattr(constant, "co_code")]
    cells = [_content(cell.cell_contents) for cell in function.__closure__ or ()]
    return function.__qualname__, code.co_code, constants, code.co_names, cells


def cache_for(function: Callable[..., Any]) -> KernelCache | None:
    """Return a kernel's cache; None if its source is not in the package, or has changed since this process began."""
    path, folder = Path(function.__code__.co_filename), kernel_folder()
    digest = _digest_of(path) if path in _AT_START else None
    if folder is None or digest is None:
        return None
    return KernelCache(function, folder, ".".join(path.relative_to(PACKAGE).with_suffix("").parts), digest)
