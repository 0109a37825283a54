"""Every parser and loader under mutated input, for seconds in total, or for an hour in `make campaign`.

The cases run in their own process: a crash in native code, a hang or an allocation beyond the limit ends that process,
and the input that caused it is on disk. The time is shared evenly; a campaign's report tells how many cases that gave.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import loop
from tests.fuzz.targets import TARGETS
from tests.warm import MODULE, PIPE, Python

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "fuzz-findings"
SHORT, LONG = 6.0, 3600.0


class Fuzzer:
    """The process that judges the cases."""

    def __init__(self, python: Python, scratch: Path) -> None:
        self._scratch = scratch
        self._errors = scratch / "errors"
        reads, writes = os.pipe()
        self._requests = os.fdopen(writes, "w")
        with self._errors.open("wb") as errors:
            words = ("serve", "--scratch", str(scratch))
            self._process = python.start(
                MODULE, "tests.fuzz", *words, cwd=ROOT, stdin=reads, stdout=PIPE, stderr=errors.fileno()
            )
        os.close(reads)

    def __call__(self, target: str, seed: int, seconds: float) -> dict[str, Any]:
        """Fuzz a target, and return the result."""
        assert self._process.stdout is not None
        request = {"target": target, "seed": seed, "seconds": seconds, "findings": str(FINDINGS)}
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        answer = self._process.stdout.readline()
        if answer:
            return json.loads(answer)
        self._process.wait()
        pytest.fail(
            f"the process ended with {self._process.returncode}; {self._last()}\n{self._errors.read_text()[-5000:]}"
        )

    def _last(self) -> str:
        """Keep the case that was running, and return how to run it again."""
        for now in self._scratch.glob("*/now"):
            name, seed, case, folder = now.read_text().split(" ", 3)
            kept = FINDINGS / Path(folder).name
            shutil.copytree(f"{folder}.kept", kept, dirs_exist_ok=True)
            return f"again: python -m tests.fuzz {name} --seed {seed} --case {case}, or --input {kept}"
        return "before any case"

    def close(self) -> None:
        """End the process."""
        assert self._process.stdout is not None
        self._requests.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


@pytest.fixture(scope="module")
def fuzzer(python: Python, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Fuzzer]]:
    started: list[Fuzzer] = []

    def get() -> Fuzzer:
        if not started or not started[-1].alive:
            started.append(Fuzzer(python, tmp_path_factory.mktemp("fuzz")))
        return started[-1]

    yield get
    for one in started:
        one.close()


@pytest.mark.parametrize("target", TARGETS)
def test_a_clean_error_or_a_right_result(
    fuzzer: Callable[[], Fuzzer],
    target: str,
    campaign_seed: int,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, Any], None],
) -> None:
    campaign = pytestconfig.getoption("--hypothesis-profile") == "campaign"
    seconds = pytestconfig.getoption("--fuzz-seconds") or (LONG if campaign else SHORT)
    found = fuzzer()(target, campaign_seed, seconds / len(TARGETS))
    for name in ("cases", loop.READ, loop.REFUSED):
        record_property(name, found[name])
    assert not found["findings"], "\n".join(one["told"] for one in found["findings"])
    assert found["cases"] >= loop.WARM and found[loop.READ] + found[loop.REFUSED] == found["cases"]


# Check the loop itself: it has to find what is wrong.


class Wrong(loop.Target):
    """A parser with one bug of each kind."""

    name = "wrong"

    def draw(self, draw: Any, folder: Path) -> None:
        (folder / "file").write_text(str(draw.randrange(5)))

    def judge(self, folder: Path) -> str:
        kind = int((folder / "file").read_text())
        try:
            if kind == 0:
                raise KeyError("x")  # another class of error
            if kind == 1:
                raise ValueError("it is damaged")  # does not name the file
            if kind == 2:
                bytearray(loop.MEMORY * 2)
        except (ValueError, KeyError) as error:
            return loop.clean(error, folder, ValueError)
        assert kind != 3, "a wrong result"
        return loop.READ


def test_the_loop_finds_faults_and_keeps_their_input(tmp_path: Path) -> None:
    found = loop.run(Wrong(), 1, 0.5, tmp_path, tmp_path / "findings")
    kinds = [one.what.split(":")[0] for one in found["findings"]]
    assert sorted(kinds) == ["AssertionError", "AssertionError", "KeyError", "MemoryError"]
    for one in found["findings"]:
        folder = tmp_path / "again" / str(one.case)
        folder.mkdir(parents=True)
        Wrong().draw(loop.draw_of(Wrong(), 1, one.case), folder)
        assert (folder / "file").read_text() == (Path(one.folder) / "file").read_text()
        assert re.search(rf"python -m tests.fuzz wrong --seed 1 --case {one.case}\n", one.told())
    assert found[loop.READ] > 0 and not (tmp_path / f"wrong-1-{found['last']}").exists()


def test_a_hang_ends_the_process_with_its_input(python: Python, tmp_path: Path) -> None:
    code = """if True:
        import sys, time
        from pathlib import Path
        from tests.fuzz import loop
        class Hangs(loop.Target):
            name = "hangs"
            def draw(self, draw, folder): (folder / "file").write_text("7")
            def judge(self, folder): time.sleep(60)
        loop.HANG = 1
        loop.run(Hangs(), 0, 1, Path(sys.argv[1]), Path(sys.argv[1]) / "findings")
    """
    done = python.run(code, str(tmp_path))
    assert done.returncode == 1 and "in judge" in done.stderr
    assert (tmp_path / "hangs-0-0.kept" / "file").read_text() == "7"
    assert (tmp_path / "now").read_text().startswith("hangs 0 0 ")
