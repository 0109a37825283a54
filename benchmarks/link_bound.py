"""skirl beside rows on demand where the link is the limit: runs `skirl bench train` for three caches, and plots them.

    python benchmarks/link_bound.py --plot docs/plots/link_bound.svg

The rate is low enough that bytes decide, whatever the machine: then a run on demand should take as many times as long as it
moves bytes. 0.9 of that is the bar. BagPipe reports up to 5.6 times over its baselines: the first point above it is named.
"""

import argparse
import json
from pathlib import Path

from skirl.measure.bench.train import TrainSpeed
from skirl.train.report.plot import Chart, svg

CACHES = (1, 10, 50)
HEADLINE = 5.6


def measure(percent: int, **more) -> dict:
    """One run of the benchmark with a cache of so many percent of the touched rows."""
    flags = {
        "modes": "skirl,serial,resident,on_demand,lru", "threads": 1, "link": "100Mbit,100us", "dim": 64, "rows_scale": 0.25,
        "batch": 128, "rounds": 6, "slice": 16, "warm": 450, "depth": 128,
    }  # fmt: skip
    return TrainSpeed(cache=f"touched:{percent}%", **(flags | more)).run()


def chart(results: dict[int, dict]) -> Chart:
    """Times faster than on demand over the cache."""
    lines = {
        "skirl": [(p, r["vs_on_demand"]) for p, r in results.items()],
        "LRU, synchronous": [(p, r["vs_on_demand"] / r["vs_lru"]) for p, r in results.items()],
        "~bytes saved": [(p, r["byte_ratio_on_demand"]) for p, r in results.items()],
    }
    return Chart("times faster than on demand", "cache, % of the touched rows", lines, marks=(HEADLINE,))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plot", type=Path, required=True, help="an .svg file to write")
    parser.add_argument("--caches", type=int, nargs="+", default=CACHES, help="percent of the touched rows")
    args = parser.parse_args()
    results = {}
    for percent in args.caches:
        results[percent] = measure(percent)
        print(json.dumps(results[percent]), flush=True)
    args.plot.write_text(svg([chart(results)]))
    above = [p for p, r in results.items() if r["vs_on_demand"] > HEADLINE]
    met = all(r["vs_on_demand"] >= 0.9 * r["byte_ratio_on_demand"] for r in results.values())
    first = f"a cache of {above[0]}%" if above else "no point"
    print(json.dumps({"bench": "link_bound", "met": met, "passes": HEADLINE, "at": first}))


if __name__ == "__main__":
    main()
