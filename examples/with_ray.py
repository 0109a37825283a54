"""A sweep on several machines: Ray Tune gives each a part of a grid, and a sweep trains that part on one stream.

It needs `pip install "ray[tune]"`. Variants of one sweep are compared on the same batches; parts are compared by the log
loss of their winners on the samples that all of them hold out. `ray.init(address="auto")` uses the machines of a cluster.
"""

from ray import tune

from skirl.cli.sweep import SweepCommand

FLAGS = {
    "data": "synthetic:tiny", "batch": 64, "steps": 200, "valid": "20%", "cache": "20%", "threads": 1,
    "run": "none", "quiet": True,
}  # fmt: skip


def sweep(part: dict) -> dict:
    """Train one part of the grid, eight variants on one stream, and return its winner with its log loss."""
    command = SweepCommand.of(**FLAGS, **part, vary=("lr=0.01,0.03,0.1,0.3", "dense-lr=0.001,0.01"), rungs="20%,40%")
    result = command.run()
    winner = result["by_variant"][result["winner"]]
    return {"logloss": winner["test_logloss"], "winner": result["winner"]}


def main() -> None:
    """Run the four parts of the grid, as many at a time as there are pairs of cores, and print the best."""
    parts = {"model": tune.grid_search(["dlrm-tiny", "dcnv2-tiny"]), "dim": tune.grid_search([8, 16])}
    tuner = tune.Tuner(
        tune.with_resources(sweep, {"cpu": 2}),
        param_space=parts,
        tune_config=tune.TuneConfig(metric="logloss", mode="min"),
    )
    best = tuner.fit().get_best_result()
    print(f"{best.metrics['logloss']:.4f} with {best.config} and {best.metrics['winner']}")


if __name__ == "__main__":
    main()
