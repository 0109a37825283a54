"""Shared by all tests: reproducible settings, real data if present, and golden traces.

Tests run with one torch thread. The bits of torch's own matrix products may depend on the thread count, and one process
for each core uses the machine better than many threads for each small product.
"""

import fcntl
import gc
import hashlib
import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; subprocesses inherit it
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels for a GPU; Triton looks once, when it is imported
os.environ["SKIRL_RUNS"] = "none"  # no test leaves a run folder behind unless it asks for one

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from skirl.tools.kernel_cache import KernelCache
from tests.warm import MODULE, Process, Python, python  # noqa: F401 a fixture

torch.set_num_threads(1)
gc.disable()  # until all tests are collected; nothing of that is garbage


# A shell makes its background jobs ignore Ctrl-C, and some tests send it.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A compile or a busy neighbour makes single examples slow, and these tests are not about time.
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
# Shrinking a failure can take minutes, which looks like a hang; only a campaign shrinks.
FOUND = (Phase.explicit, Phase.generate, Phase.target)
settings.register_profile("ci", derandomize=True, database=None, phases=FOUND, **QUIET)
settings.register_profile("campaign", max_examples=2000, **QUIET)
settings.load_profile("ci")  # --hypothesis-profile comes later and wins

collect_ignore = ["preload.py", "sweep/planned.py"]  # one trains when it is imported, one needs the newest torch
GOLDEN = Path(__file__).parent / "golden"
RECORDED = pytest.StashKey[dict[str, Any]]()
GOLDEN_TOLERANCE = 1e-4  # relative, on another machine or torch than the one recorded on


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("skirl")
    group.addoption("--record-golden", action="store_true", help="write golden traces anew instead of comparing")
    group.addoption("--fuzz-seconds", type=float, help="of all fuzz targets together; 4, or 3600 in a campaign")
    group.addoption("--fuzz-case", type=int, help="run only this case of a fuzz target")


def once_on_this_machine(cache: type[KernelCache] = KernelCache) -> None:
    """Have test processes that want one kernel at once wait for the first of them to compile it."""
    load, save = cache.load_overload, cache.save_overload
    locks: dict[Path, int] = {}

    def loaded(self: KernelCache, sig: Any, target: Any) -> Any:
        if (found := load(self, sig, target)) is None:
            path = self._path(sig, target.codegen())
            folder = self.cache_path.with_name("compiling")
            folder.mkdir(exist_ok=True)
            locks[path] = os.open(folder / path.name, os.O_CREAT | os.O_RDWR)
            fcntl.flock(locks[path], fcntl.LOCK_EX)
            if (found := load(self, sig, target)) is not None:
                release(path)
        return found

    def saved(self: KernelCache, sig: Any, result: Any) -> None:
        save(self, sig, result)
        release(self._path(sig, result.codegen))

    def release(path: Path) -> None:
        fcntl.flock(locks[path], fcntl.LOCK_UN)  # closing is not enough if a fork has it too
        os.close(locks.pop(path))

    cache.load_overload, cache.save_overload = loaded, saved


once_on_this_machine()


@pytest.fixture(autouse=True)
def no_rows_of_other_tests() -> None:
    """Forget rows that an earlier test trained without a GradScaler: another test's scaler would be refused for them."""
    if optimizers := sys.modules.get("skirl.nn.optimizers"):
        optimizers.unscaled.clear()


@pytest.fixture(autouse=True)
def ctrl_c_works() -> Iterator[None]:
    """Fail the test that leaves another SIGINT handler behind, rather than the tests after it."""
    yield
    left = signal.getsignal(signal.SIGINT)
    if left is not signal.default_int_handler and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pytest.fail(f"SIGINT is left with {left}")


@pytest.fixture
def as_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Return `as_json(*words)`, which runs a command with --json and returns what it printed."""
    from skirl.cli import main

    def run(*words: str) -> dict[str, Any]:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder of real data sets whose licences do not allow us to ship them. Skip the test if it is missing."""
    folder = os.environ.get("SKIRL_DATA")
    if not folder:
        pytest.skip("needs real data: set SKIRL_DATA to the folder that holds it")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"SKIRL_DATA is {folder!r}, which is no folder: set it to the data's folder, or unset it")
    return path


@pytest.fixture(scope="session")
def campaign_seed(pytestconfig: pytest.Config) -> int:
    """Seed for tests that draw their cases themselves: 0, or the one in `make campaign SEED=`."""
    return int(pytestconfig.getoption("--hypothesis-seed") or 0)


@pytest.fixture
def golden(pytestconfig: pytest.Config) -> Callable[..., None]:
    """Return a function that compares losses with a golden trace: `golden("dlrm-tiny", losses)` reads
    tests/golden/dlrm-tiny.json.

    Every bit has to agree where machine and torch are those of the recording, else GOLDEN_TOLERANCE is granted: matrix
    products differ between CPUs. With `everywhere=True` there is none, and every bit has to agree on every machine; what is
    recorded twice in one run, by two ways to compute it, has to be the same.
    """

    def check(name: str, values: Sequence[float] | dict[str, str], everywhere: bool = False) -> None:
        path = GOLDEN / f"{name}.json"
        values = values if isinstance(values, dict) else list(values)
        if pytestconfig.getoption("--record-golden"):
            assert recorded_now.setdefault(name, values) == values, f"{name}: two ways to compute it differ"
            head = {} if everywhere else {"recorded_on": fingerprint()}
            GOLDEN.mkdir(exist_ok=True)
            path.write_text(json.dumps({**head, "values": values}, indent=1) + "\n")
            return
        recorded = json.loads(path.read_text())
        if everywhere or recorded["recorded_on"] == fingerprint():
            assert values == recorded["values"], f"{name}: bits changed; CONTRIBUTING.md says what to do"
        else:
            assert values == pytest.approx(recorded["values"], rel=GOLDEN_TOLERANCE), name

    recorded_now = pytestconfig.stash.setdefault(RECORDED, {})
    return check


def fingerprint() -> dict[str, str]:
    """Return what the bits of torch's own operations depend on, besides the thread count, which is fixed above."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = "\n".join(sorted({line for line in lines if line.startswith(("vendor_id", "model", "flags"))}))
    except OSError:
        cpu = platform.processor()
    return {
        "torch": version("torch").split("+")[0],
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cpu": hashlib.sha256(cpu.encode()).hexdigest()[:8],
    }


def pytest_collection_finish() -> None:
    gc.freeze()  # else each collection looks through 4,000 tests and their modules, for two seconds
    gc.set_threshold(10_000, 20, 20)
    gc.enable()
