"""Names of the files of a sweep: in the folder of its runs, and in that of its checkpoints."""

from skirl.checkpoint.of_sweep import OF_SWEEP

SWEEP, RACE, RESULT = "sweep.json", "race.jsonl", "result.json"
HEADER = OF_SWEEP
"""Names the checkpoints of the variants that belong together."""
