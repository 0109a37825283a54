"""Run a fuzz target for a while, or a case again: `python -m tests.fuzz TARGET --seconds 60`, `--seed S --case N`,
`--input FOLDER`.

`serve` answers requests line by line, for the tests: importing torch once for each target would take longer than
fuzzing it.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.fuzz import loop
from tests.fuzz.targets import TARGETS


@contextmanager
def prepared(name: str, scratch: Path) -> Iterator[tuple[loop.Target, Path]]:
    """Yield a target with its seeds made, and a folder for its cases."""
    with tempfile.TemporaryDirectory(prefix="skirl-fuzz-", dir=scratch) as folder:
        (own := Path(folder) / "seeds").mkdir()
        TARGETS[name].prepare(own)
        yield TARGETS[name], Path(folder)


def serve(scratch: Path) -> None:
    """Read requests as JSON from standard input, and write the results to standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a loader prints is not an answer
    for line in sys.stdin:
        request = json.loads(line)
        with prepared(request["target"], scratch) as (target, folder):
            counts = loop.run(target, request["seed"], request["seconds"], folder, Path(request["findings"]))
        counts["findings"] = [asdict(one) | {"told": one.told()} for one in counts["findings"]]
        answers.write(json.dumps(counts) + "\n")
        answers.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=[*TARGETS, "all", "serve"], help="what to fuzz")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case only")
    parser.add_argument("--input", type=Path, help="judge this folder, which a finding left")
    parser.add_argument("--seconds", type=float, default=10.0, help="run cases of each target for so long")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where inputs that fail are put")
    parser.add_argument(
        "--scratch", type=Path, help="for inputs; the system's folder for what is temporary if not given"
    )
    args = parser.parse_args()
    if args.target == "serve":
        serve(args.scratch)
        return 0
    found = 0
    for name in TARGETS if args.target == "all" else [args.target]:
        with prepared(name, args.scratch) as (target, folder):
            case = folder / "case"
            if args.input is not None:
                shutil.copytree(args.input, case)
                print(loop.judged(target, case))
            elif args.case is not None:
                case.mkdir()
                target.draw(loop.draw_of(target, args.seed, args.case), case)
                print(loop.judged(target, case))
            else:
                counts: dict[str, Any] = loop.run(target, args.seed, args.seconds, folder, args.findings)
                found += len(counts["findings"])
                for finding in counts.pop("findings"):
                    print(finding.told())
                print(json.dumps(counts), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
