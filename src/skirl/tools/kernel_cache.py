"""Compiled kernels on disk, in folders named after what they were compiled from; one process compiles, others wait."""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.misc.appdirs import AppDirs

log = logging.getLogger("skirl")

PATIENCE = 60.0
"""Seconds to wait for another process: ten times what the largest kernel takes. Then it is compiled here as well."""
PAUSE = 0.01


PACKAGE = Path(__file__).parents[1]
KEPT = 4
"""Folders of one module that stay, however old: other checkouts and environments may use them."""
YOUNG = 86400.0
"""Seconds after its last use during which a folder stays in any case: a running process may use it."""

_IMPORT = re.compile(rb"^[ \t]*(?:from|import) skirl([.\w]*)", re.MULTILINE)
_VERSIONS = (numba.__version__, llvmlite.__version__, np.__version__, sys.version)


def _stamps() -> dict[Path, tuple[int, int]]:
    paths = (Path(folder, name) for folder, _, names in os.walk(PACKAGE) for name in names if name.endswith(".py"))
    return {path: _stamp(path) for path in paths}


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return -1, -1
    return found.st_mtime_ns, found.st_size


_AT_START = _stamps()
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


@cache
def _folder_of(path: Path) -> Path | None:
    """Return the folder of a module's kernels, or None if its sources have changed since this process began."""
    sources = sorted(sources_of(path))
    top = kernel_folder()
    if top is None or any(_stamp(source) != _AT_START[source] for source in sources):
        return None
    digest = hashlib.sha256(repr(_VERSIONS).encode())
    for source in sources:
        digest.update(f"\n{source.relative_to(PACKAGE)} ".encode() + _source(source)[0])
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    folder = top / f"{name}-{digest.hexdigest()[:16]}"
    try:
        os.utime(folder)
    except FileNotFoundError:
        folder.mkdir(exist_ok=True)
        _clear(top, name)
    except OSError:  # another user's
        pass
    return folder


def _clear(top: Path, name: str) -> None:
    """Remove a module's folders that have not been used for long."""
    used = sorted(((_stamp(folder)[0] / 1e9, folder) for folder in top.glob(f"{name}-*")), reverse=True)
    for last, folder in used[KEPT:]:
        if last < time.time() - YOUNG:
            shutil.rmtree(folder, ignore_errors=True)


class _Files(IndexDataCacheFile):
    """One file per signature. In Numba's index, two processes can give two signatures the same number.

    A process that finds no file has its turn to compile it until `end_turn`, or until it ends; others wait for that.
    """

    def __init__(self, folder: Path, base: str) -> None:
        super().__init__(str(folder), base, None)
        self._base = base
        self._turns: list[tuple[Path, int]] = []

    def load(self, key: Any) -> Any:
        found = self._load(key)
        if found is None:
            self._take_turn(Path(self._cache_path) / f"{self._name(key)}.turn")
            found = self._load(key)  # another process may have compiled it
            if found is not None:
                self.end_turn()
        return found

    def _take_turn(self, path: Path) -> None:
        try:
            file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return
        self._turns.append((path, file))
        until = time.monotonic() + PATIENCE
        with suppress(OSError):  # a file system without locks
            while time.monotonic() < until:
                try:
                    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(PAUSE)
            log.warning("another process has held %s for %.0f s: the kernel is compiled here as well", path, PATIENCE)

    def end_turn(self) -> None:
        while self._turns:
            path, file = self._turns.pop()
            path.unlink(missing_ok=True)  # those who wait have it open, and look for the kernel first
            os.close(file)

    def _load(self, key: Any) -> Any:
        try:
            kept, data = self._load_data(self._name(key))
        except FileNotFoundError:
            return None
        except Exception as error:  # it was cut off
            log.warning("a compiled kernel in %s cannot be read, and is compiled again: %r", self._cache_path, error)
            return None
        return data if kept == key else None

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), (key, data))

    def flush(self) -> None:
        for path in Path(self._cache_path).glob(f"{self._base}.*.nbc"):
            path.unlink(missing_ok=True)

    def _name(self, key: Any) -> str:
        return f"{self._base}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"


class _Impl(CompileResultCacheImpl):
    """The answers to Numba's cache about the place of a function."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._lineno = function.__code__.co_firstlineno
        self._py_file = function.__code__.co_filename
        self._folder = folder
        self._locator = self
        self._filename_base = f"{function.__qualname__.replace('<locals>', '')}-{self._lineno}"

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)


class KernelCache(FunctionCache):
    """Numba's cache of one function, in a folder of ours."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._name = repr(function)
        self._py_func = function
        self._impl = _Impl(function, folder)
        self._cache_path = str(folder)
        self._cache_file = _Files(folder, self._impl.filename_base)
        self.enable()

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Return a key that is the same in each process, also where a kernel calls others of the function around it."""
        return sig, codegen.magic_tuple(), repr(_content(self._py_func))

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            log.warning("a compiled kernel is not kept on disk: %s", error)
        finally:
            self._cache_file.end_turn()


def _content(value: Any) -> Any:
    """Return what a function computes by, apart from its module: its code, and what it has from functions around it."""
    function = getattr(value, "py_func", value)
    code = getattr(function, "__code__", None)
    if code is None:
        return value
    constants = [constant for constant in code.co_consts if not hasattr(constant, "co_code")]
    cells = [_content(cell.cell_contents) for cell in function.__closure__ or ()]
    return function.__qualname__, code.co_code, constants, code.co_names, cells


def cache_for(function: Callable[..., Any]) -> KernelCache | None:
    """Return a kernel's cache; None if its source is not in the package, or has changed since this process began."""
    path = Path(function.__code__.co_filename)
    folder = _folder_of(path) if path in _AT_START else None
    return None if folder is None else KernelCache(function, folder)
