"""tests/ follows src/skirl: a module is tested in the file of its name, or by what is listed here, for the reason given."""

from fnmatch import fnmatch
from pathlib import Path

import skirl

SOURCE = Path(skirl.__file__).parent
TESTS = Path(__file__).parent

ELSEWHERE = {
    # Its parts mean nothing alone: the steps that they make together are compared with a search of the whole window.
    "oracle/*": "oracle/test_planner.py oracle/test_bank.py oracle/test_policies.py",
    # A store is held to its promises as a whole, and killed at each call that it makes.
    "store/*.py": "store/conformance.py",
    "store/disk/*": "store/disk/test_store.py store/disk/test_crash.py",
    "store/memory/*": "store/memory/test_store.py",
    "store/remote/*": "store/remote/test_store.py",
    "store/placed/*": "store/placed/test_store.py",
    # Bits of a device and its kernels are those of the reference, whatever file they are computed in.
    "engine/*.py": "engine/test_engine.py engine/test_cache.py",
    "engine/device/*": "engine/device/test_gpu.py test_exact.py",
    "engine/kernels/*": "engine/kernels/test_wide.py engine/kernels/test_gpu.py",
    "nn/*": "nn/test_collection.py",
    "pipeline/*": "pipeline/test_lookahead.py pipeline/test_pipeline.py",
    "torchrec.py": "nn/test_torchrec.py",
    "lightning.py": "habits/test_lightning.py",
    # What ranks have of each other: in threads, and in processes.
    "peers/*": "peers/test_in_process.py peers/test_groups.py",
    # Whole files and whole checkpoints are what can be right or malformed.
    "data/*.py": "data/test_training.py data/test_vocab.py",
    "data/files/*": "data/files/test_stream.py data/test_malformed.py",
    "data/vocabulary/*": "data/test_vocab.py data/vocabulary/test_growing.py",
    "checkpoint/*": "checkpoint/test_checkpoint.py checkpoint/test_saving.py checkpoint/test_commands.py",
    # Commands: what they print is tested, and drawn pages.
    "train/*": "train/test_train.py train/test_verify.py",
    "train/report/*": "train/report/test_report.py",
    "measure/*": "measure/bench/test_train.py measure/sizing/test_size.py",
    # Whole folders are compared with a plain sort, and with the same rows in another layout.
    "dedup/*": "dedup/test_analyze.py dedup/test_ordering.py dedup/test_by_session.py dedup/test_once.py dedup/test_same.py",
    # A plan is held to what an executed run counts.
    "placement/*": "placement/test_commands.py placement/test_shares.py",
    # Variants are held to their lone runs, and loops that are wrong to a sentence each.
    "sweep/*": "sweep/test_sweep.py sweep/test_refused.py sweep/test_command.py",
    # A plan of tables is counted cell by cell, and compared with all placements of small tasks.
    "placement/tables/*": "placement/tables/test_search.py placement/tables/test_tables.py",
    # What TorchRec is given is counted number by number, and run by it against plain torch.
    "placement/torchrec/*": "placement/torchrec/test_planner.py placement/torchrec/test_laid_out.py "
    "placement/torchrec/test_bench.py",
    # One paper a file, all of them held to the same.
    "models/*": "models/test_all.py",
    # Nouns and small tools, used by every test; their examples run as tests.
    "core/*": "core/test_ids.py core/test_reference.py test_exact.py",
    "tools/*": "test_cli.py tools/test_sealed_json.py",
}
"""Modules without a test file of their own, and the files that test them."""


def modules() -> list[str]:
    """All modules that hold more than a docstring and imports for others."""
    return sorted(
        str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.py") if p.name not in ("__init__.py", "__main__.py")
    )


def mirrored(module: str) -> bool:
    path = Path(module)
    return (TESTS / path.parent / f"test_{path.name}").is_file()


def test_every_module_is_tested_in_the_file_of_its_name_or_in_one_that_is_listed() -> None:
    missing = [m for m in modules() if not mirrored(m) and not any(fnmatch(m, pattern) for pattern in ELSEWHERE)]
    assert not missing, f"write tests/.../test_NAME.py, or list where these are tested: {missing}"


def test_the_list_names_what_there_is() -> None:
    files = {file for files in ELSEWHERE.values() for file in files.split()}
    assert [file for file in sorted(files) if not (TESTS / file).is_file()] == []
    alone = [module for module in modules() if not mirrored(module)]
    assert [pattern for pattern in ELSEWHERE if not any(fnmatch(module, pattern) for module in alone)] == []


def test_every_room_has_its_folder_of_tests() -> None:
    rooms = {Path(module).parent for module in modules()}
    assert [str(room) for room in sorted(rooms) if not (TESTS / room).is_dir()] == []
