"""tests/ mirrors src/skirl: each module is tested in the file of its name, or by tests of its room that import it.

Any other module is listed here by name, with the tests that cover it and why.
"""

import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import skirl

SOURCE = Path(skirl.__file__).parent
TESTS = Path(__file__).parent

ELSEWHERE = {
    "lightning.py": "habits/test_lightning.py",
    "torchrec.py": "placement/torchrec/test_planner.py",
    # Parts of a checkpoint, which is right or wrong as a whole.
    "checkpoint/export_as.py checkpoint/own_rows.py checkpoint/votes.py": "checkpoint/test_checkpoint.py",
    "checkpoint/decoding.py": "checkpoint/test_codec.py",
    "checkpoint/other_formats.py": "checkpoint/test_commands.py",
    "checkpoint/load_run.py": "checkpoint/test_parts.py",
    "checkpoint/cached_rows.py checkpoint/definition.py": "checkpoint/test_saving.py",
    "checkpoint/whole.py": "store/test_frozen.py",
    "checkpoint/keeper.py": "train/test_trainers.py",
    "checkpoint/of_sweep.py": "sweep/test_judged.py",
    # Nouns that every test uses; these tests are about them.
    "core/jagged.py core/shared.py": "core/test_find.py",
    "core/stretches.py": "core/test_windows.py",
    "core/batch.py": "data/test_share.py",
    "core/item.py": "pipeline/test_window.py",
    "core/optimizer_names.py": "test_cli.py",
    "core/half.py": "engine/device/test_half.py",
    "core/tree.py": "engine/kernels/test_cpu.py",
    "core/given.py": "habits/test_rows.py",
    "core/keys.py": "oracle/test_loops.py",
    # Sources and their held-out parts: batches are compared.
    "data/held_out.py data/source.py": "data/test_training.py",
    "data/encodings.py data/open.py": "data/test_vocab.py",
    # Files are read in full, and malformed ones refused.
    "data/files/repeats.py": "data/files/test_encode.py",
    "data/files/dataset.py data/files/identity.py": "data/files/test_stream.py",
    "data/files/find.py": "data/files/test_text.py",
    "data/files/columns.py data/files/labels.py": "data/test_malformed.py",
    "data/files/numbered.py": "train/test_predict.py",
    "data/vocabulary/origins.py data/vocabulary/probing.py": "data/vocabulary/test_growing.py",
    # Whole folders are compared with a plain sort, and with the same rows in another layout.
    "dedup/projected.py": "dedup/test_analyze.py",
    "dedup/asked.py dedup/folders.py dedup/how_far.py dedup/plan.py": "dedup/test_by_session.py",
    "dedup/tasks.py": "dedup/test_spark.py",
    "dedup/shifting.py dedup/training.py": "measure/bench/test_dedup.py",
    # Bits of a device and its kernels equal the reference's, whatever file they are computed in.
    "engine/cache_split.py": "engine/test_capacity.py",
    "engine/counters.py": "engine/test_engine.py",
    "engine/shared_gradients.py": "test_exact.py",
    "engine/exchange.py": "test_trainers.py",
    "engine/device/bags_of_samples.py engine/device/gpu_backward.py engine/device/gpu_moves.py "
    "engine/device/transfers.py": "engine/device/test_gpu.py",
    "engine/kernels/gpu_tree.py": "engine/kernels/test_gpu.py",
    "engine/kernels/wide_tree.py": "engine/kernels/test_hot_rows.py",
    "engine/kernels/shares.py": "test_exact.py",
    # Benchmarks: their output.
    "measure/bench/helpers.py measure/bench/loops.py": "measure/bench/test_disk.py",
    "measure/bench/nodes.py": "measure/bench/test_faults.py",
    "measure/bench/owners.py": "measure/bench/test_movement.py",
    "measure/bench/serve_node.py": "measure/bench/test_serve.py",
    "measure/bench/stalls.py": "measure/bench/test_train.py",
    "measure/info/checkpoint.py measure/info/files.py measure/info/look.py measure/info/plans.py "
    "measure/info/text.py": "measure/info/test_commands.py",
    "measure/sizing/picture.py": "measure/sizing/test_size.py",
    "models/deep_cross.py": "models/test_all.py",
    # The parts that the modules are made of.
    "nn/accumulation.py nn/alone.py nn/anchor.py nn/current_step.py nn/looked_up.py nn/lookup.py "
    "nn/optimizers.py nn/output.py nn/same_batch.py nn/sequences.py": "nn/test_collection.py",
    "nn/by_id.py": "test_trainers.py",
    # Policies are compared with a search of the whole window.
    "oracle/policies/lfu.py oracle/policies/lru.py oracle/policies/minimum.py "
    "oracle/policies/ttl.py": "oracle/test_policies.py",
    # What ranks know about each other.
    "peers/job.py": "peers/test_launch.py test_trainers.py",
    "peers/notes.py": "peers/test_start.py",
    "pipeline/one_pass.py": "pipeline/test_lookahead.py",
    # A plan is compared with the counts of an executed run.
    "placement/calibrate.py placement/flags.py placement/place.py": "placement/test_commands.py",
    "placement/tables/balance.py": "placement/tables/test_check.py",
    "placement/tables/asked.py placement/tables/bench_model.py": "placement/tables/test_measure.py",
    "placement/tables/gloo.py": "placement/tables/test_nets.py",
    "placement/tables/commands.py placement/tables/from_data.py": "placement/tables/test_tables.py",
    # A store is held to its promises as a whole, and killed at each call that it makes.
    "store/checkpoint_rows.py store/cut.py store/frozen_keys.py": "store/conformance.py",
    "store/disk/frozen.py store/disk/logs.py": "store/disk/test_crash.py",
    "store/disk/errors.py store/disk/lock.py": "store/disk/test_store.py",
    "store/memory/frozen.py store/memory/mapped.py": "store/memory/test_store.py",
    "store/placed/before.py": "store/placed/test_store.py",
    "store/placed/mixed.py": "store/placed/test_store.py",
    "store/remote/started.py": "measure/bench/test_serve.py",
    "store/remote/bits.py store/remote/warm.py store/remote/warm_disk.py store/remote/wire.py": "store/remote/test_node.py",
    # Variants are compared with their lone runs, and wrong loops get a clear sentence each.
    "sweep/names.py": "sweep/test_checkpoint.py",
    "sweep/entrant.py sweep/planned.py sweep/run.py sweep/shown.py sweep/table.py "
    "sweep/folder.py sweep/resumed.py sweep/verify_command.py": "sweep/test_command.py",
    "sweep/crew.py": "sweep/test_crews.py",
    "sweep/diverged.py sweep/models.py": "sweep/test_refused.py",
    "sweep/contender.py sweep/dense.py sweep/fleet.py sweep/overrides.py": "sweep/test_sweep.py",
    "sweep/variants_file.py": "sweep/test_variants.py",
    # Small tools, tested where they are used; their examples run as tests.
    "tools/durations.py": "dedup/test_by_session.py",
    "tools/lanes.py": "engine/kernels/test_wide.py",
    "tools/sizes.py": "engine/test_cache.py",
    "tools/os_errors.py tools/progress.py": "habits/test_failing_disks.py",
    "tools/parent.py": "peers/test_processes.py",
    "tools/patience.py": "peers/test_start.py",
    "tools/command_line.py": "test_cli.py",
    "tools/lazily.py": "test_names.py",
    "tools/shape_of.py": "train/test_origin.py",
    "tools/in_thread.py": "train/test_scored.py",
    # Commands: their output is tested, and so are the pages they draw.
    "train/resumed.py": "habits/test_resume.py",
    "train/flags.py": "test_cli.py",
    "train/chosen.py train/same_data.py train/saved_run.py": "train/test_predict.py",
    "train/diverged.py train/kept.py": "train/test_train.py",
    "train/verify_nodes.py train/verify_trainer.py": "train/test_verify_trainers.py",
    "train/report/hyperparameters.py train/report/missing.py train/report/since.py": "train/report/test_run_folder.py",
}
"""Modules that no test of their room imports, with the files that test them."""

BY_HAND = {
    "measure/bench/checkpoint.py",
    "placement/bench_stores.py",
    "placement/tables/bench_tables.py",
    "placement/tables/bench_transfer.py",
    "sweep/bench_wall.py",
}
"""Measurements that print figures of this machine: run by hand, as docs/benchmarks.md says, and not by tests."""

FILES = {
    ".".join((root.name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__"): path
    for root in (SOURCE, TESTS)
    for path in root.rglob("*.py")
}
"""The file of each module, of skirl and of its tests."""


@cache
def modules() -> list[str]:
    """Return all modules that hold more than a docstring and re-exports."""
    return sorted(
        str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.py") if p.name not in ("__init__.py", "__main__.py")
    )


def mirrored(module: str) -> bool:
    """Return whether a test file has the module's name."""
    path = Path(module)
    return (TESTS / path.parent / f"test_{path.name}").is_file()


IMPORT = re.compile(
    r"""^[ \t]*from[ ]((?:skirl|tests)[\w.]*)[ ]import[ ](\([^)]*\)|.*)  # names of a module
    | ^[ \t]*import[ ]((?:skirl|tests)[\w.]*)
    | "(skirl\.[\w.]+)(?::\w+)?"  # the module of a command, of a process, of what a test puts elsewhere""",
    re.MULTILINE | re.VERBOSE,
)


@cache
def imports_of(path: Path) -> frozenset[Path]:
    """Return the files that a file imports, including in code for a process that it starts, or names as text."""
    names: list[str] = []
    for module, parts, alone, command in IMPORT.findall(path.read_text()):
        names += [f"{module}.{part}" for part in re.findall(r"\w+", parts)] if module else [alone or command]
    return frozenset(found for name in names if (found := _file(name)) is not None)


def _file(name: str) -> Path | None:
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return FILES.get(name)


@cache
def reached(path: Path) -> set[Path]:
    """Return all files that a file needs, directly or not."""
    found, left = set(), [path]
    while left:
        if (path := left.pop()) not in found:
            found.add(path)
            left += imports_of(path)
    return found


@cache
def imported_in(room: str) -> frozenset[Path]:
    """Return what the tests of a room import directly."""
    return frozenset(found for path in (TESTS / room).rglob("*.py") for found in imports_of(path))


def by_its_room(module: str) -> bool:
    """Return whether a test of the module's room imports it."""
    path = Path(module)
    return len(path.parts) > 1 and SOURCE / path in imported_in(path.parts[0])


@cache
def listed() -> dict[str, list[str]]:
    """Return each listed module with the files that test it."""
    return {module: files.split() for names, files in ELSEWHERE.items() for module in names.split()}


def test_every_module_is_tested_by_its_name_by_its_room_or_by_what_is_listed() -> None:
    missing = [m for m in modules() if not (mirrored(m) or by_its_room(m) or m in {*listed(), *BY_HAND})]
    assert not missing, f"write tests/.../test_NAME.py, or list where these are tested: {missing}"


def test_the_list_names_each_module_once_and_none_that_is_gone() -> None:
    names = [*BY_HAND, *(module for names in ELSEWHERE for module in names.split())]
    assert len(set(names)) == len(names)
    assert [m for m in names if m not in modules()] == []


def test_what_is_listed_needs_its_module() -> None:
    for module, files in listed().items():
        for file in files:
            assert (TESTS / file).is_file(), f"{file}: there is no such file"
            assert SOURCE / module in reached(TESTS / file), f"{file} does not come to {module}"


def test_the_design_names_every_readme_of_a_format() -> None:
    text = (TESTS.parent / "docs" / "design.md").read_text()
    named = re.search(r"`README\.md` in (.*?)\. \[", text, re.DOTALL)
    assert named is not None
    readmes = [str(path.parent.relative_to(SOURCE)) for path in SOURCE.rglob("README.md")]
    assert sorted(re.findall(r"`([\w/]+)`", named[1])) == sorted(readmes)


@pytest.mark.parametrize(
    ("readme", "module", "version"),
    [
        ("checkpoint", "checkpoint.folder", "FORMAT_VERSION"),
        ("checkpoint", "checkpoint.parts", "FORMAT_VERSION"),
        ("data/files", "dedup.by_session", "VERSION"),
        ("store/disk", "store.disk.manifest", "FORMAT_VERSION"),
        ("sweep", "sweep.checkpoint", "_VERSION"),
        ("placement", "core.placement_plan", "VERSION"),
        ("placement", "placement.tables.plan_file", "VERSION"),
        ("placement", "placement.tables.costs", "VERSION"),
        ("placement", "placement.tables.spec", "VERSION"),
    ],
)
def test_a_readme_has_the_format_and_version_that_are_written(readme: str, module: str, version: str) -> None:
    found = import_module(f"skirl.{module}")
    assert re.search(rf"`{found.FORMAT}`, (?:version )?{getattr(found, version)}\b", readme_of(readme))


@pytest.mark.parametrize(
    ("readme", "entry", "module", "version"),
    [
        ("checkpoint", "`skirl-checkpoint`, 4; ", "checkpoint.folder", "OF_PARTS"),
        ("store/disk", "| `segment_format` | ", "store.disk.segment", "FORMAT_VERSION"),
        ("data/vocabulary", "| `version` | ", "data.vocabulary.vocabulary", "VERSION"),
    ],
)
def test_a_readme_has_the_version_of_an_entry(readme: str, entry: str, module: str, version: str) -> None:
    found = getattr(import_module(f"skirl.{module}"), version)
    assert re.search(rf"{re.escape(entry)}{found}\b", readme_of(readme))


def readme_of(room: str) -> str:
    """Return the README.md that describes the files of a room."""
    return (SOURCE / room / "README.md").read_text()


def test_every_room_has_its_folder_of_tests() -> None:
    rooms = {Path(module).parent for module in modules()}
    assert [str(room) for room in sorted(rooms) if not (TESTS / room).is_dir()] == []
