"""Run a fuzz target for a while, or a case again: `python -m tests.fuzz TARGET --seconds 60`, `--seed S --case N`,
`--input FOLDER`."""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.fuzz import loop
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS, help="what to fuzz")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case only")
    parser.add_argument("--input", type=Path, help="judge this folder, which a finding left")
    parser.add_argument("--seconds", type=float, default=10.0, help="run cases for so long")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where inputs that fail are put")
    parser.add_argument("--scratch", type=Path, help="for inputs; the system's folder for what is temporary otherwise")
    args = parser.parse_args()
    target, folder = TARGETS[args.target], Path(tempfile.mkdtemp(prefix="skirl-fuzz-", dir=args.scratch))
    (folder / "seeds").mkdir()
    target.prepare(folder / "seeds")
    if args.input is None and args.case is None:
        counts = loop.run(target, args.seed, args.seconds, folder, args.findings)
        findings = counts.pop("findings")
        print(*[finding.told() for finding in findings], json.dumps(counts), sep="\n", flush=True)
        shutil.rmtree(folder)
        return 1 if findings else 0
    case = folder / "case"
    if args.input is not None:
        shutil.copytree(args.input, case)
    else:
        case.mkdir()
        target.draw(loop.draw_of(target, args.seed, args.case), case)
    print(loop.judged(target, case))
    return 0


if __name__ == "__main__":
    sys.exit(main())
