"""Names of the files of a sweep: in the folder of its runs, and in that of its checkpoints."""

SWEEP, RACE, RESULT = "sweep.json", "race.jsonl", "result.json"
HEADER = "sweep-checkpoint.json"
"""Names the checkpoints of the variants that belong together."""
