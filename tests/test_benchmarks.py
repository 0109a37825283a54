"""The scripts in benchmarks/ run with tiny flags and print one JSON object; their figures are not judged."""

import json
from pathlib import Path

import pytest

from tests.warm import Python

ROOT = Path(__file__).parents[1]
TINY = {
    "checkpoint": "--touched 3000 --batch 64 --features 3 --cache 900 --seconds 0.2 --checkpoints 2",
    "disk": "--folder {tmp}/disk --rows 3000 --batch 500 --calls 2",
    "link": "--links loopback --dense 1000 --batch 64 --dim 8 --steps 3 --rounds 1",
    "network": "--trainers 2 --numbers 3000 --rounds 2 --batch 64 --steps 3 --dim 4",
    "oracle": "--batch 256 --depth 10 --steps 5 --cache 20000",
    "readers": "--samples 2000 --peer-samples 300 --batch 256 --rounds 1 --stream-gb 0",
    "rows": "--batch 64 --dim 8 --data tiny --rows-scale 1 --rounds 2",
    "serve": "--rows 100 --held 1000 --calls 5",
    "sweep": "--part speed --data synthetic:tiny --dim 4 --batch 16 --together 2 --timed 2 --repeats 1",
    "traffic": "--trace zipf --accesses 20000 --rows 2000 --batch 256 --capacity 400",
    "train": "--data synthetic:tiny --batch 32 --dim 8 --warm 4 --slice 2 --rounds 2 --depth 4 --threads 1",
}
QUICK = "traffic"


RUN = """import runpy, sys
del sys.argv[0]
sys.path.insert(0, "benchmarks")
runpy.run_path(sys.argv[0], run_name="__main__")"""


def result(python: Python, name: str, tmp_path: Path, *words: str) -> dict:
    flags = TINY[name].format(tmp=tmp_path).split()
    done = python.run(RUN, f"benchmarks/{name}.py", *flags, "--json", *words, cwd=ROOT)
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == QUICK else pytest.mark.slow) for n in TINY])
def test_one_line_of_json(python: Python, name: str, tmp_path: Path):
    record = tmp_path / "results" / "record.json"
    found = result(python, name, tmp_path, "--record", str(record))
    assert found["bench"] == name and found["machine"]["cores"] >= 1
    kept = json.loads(record.read_text())
    assert {"date", "commit"} <= set(kept) and kept["bench"] == name
    if name == "traffic":
        assert found["skirl"] == found["min"] < found["lru"]


@pytest.mark.slow
def test_all_modes_train_the_same_model(python: Python, tmp_path: Path):
    found = result(python, "train", tmp_path)
    assert found["losses_agree"] and len(set(map(found["loss_difference"].get, ("skirl", "lru", "on_demand")))) == 1
