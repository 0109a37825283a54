"""Backends by name: those that are not here are one sentence, and costs of one are not taken for another's."""

from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest
import torch

from skirl.cli import main
from skirl.placement.tables import backends, calibrate, fbgemm, gpu, measure, place
from skirl.placement.tables.backends import missing
from skirl.placement.tables.costs import costs_for, load_costs, save_costs, shipped
from skirl.placement.tables.measure import MeasuredTables
from skirl.placement.tables.named import BACKENDS, ON_GPU
from skirl.placement.tables.place import placed_tables
from skirl.placement.tables.problem import Ranks
from skirl.placement.tables.spec import TableSpec, specs_text
from skirl.tools.machine import machine


class Killed(Exception):
    """Ends a measurement before it is written."""


def installed(monkeypatch, *names, cuda=False):
    monkeypatch.setattr(backends, "find_spec", lambda name: ModuleSpec(name, None) if name in names else None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)


def test_what_is_missing_is_said_in_a_sentence(monkeypatch):
    installed(monkeypatch)
    assert missing("skirl-cpu") is None
    for name in ("skirl-cuda", "fbgemm-cuda"):
        assert missing(name) == (
            f"backend {name} runs on a GPU, and torch {torch.__version__} sees none: measure on a machine that has "
            f"one, or set --backend to {name.split('-')[0]}-cpu"
        )
    assert str(missing("fbgemm-cpu")).startswith("backend fbgemm-cpu needs FBGEMM, which is not installed: pip install")
    installed(monkeypatch, cuda=True)
    assert missing("skirl-cuda") == "backend skirl-cuda needs Triton, which is not installed: pip install 'skirl[gpu]'"
    assert "fbgemm-cuda needs FBGEMM, which is not installed" in str(missing("fbgemm-cuda"))
    installed(monkeypatch, "triton", cuda=True)
    assert missing("skirl-cuda") is None


def test_fbgemm_that_does_not_load_or_is_built_for_cpus_is_said(monkeypatch):
    fbgemm_gpu = pytest.importorskip("fbgemm_gpu")
    installed(monkeypatch, "fbgemm_gpu", cuda=True)
    assert missing("fbgemm-cpu") is None
    monkeypatch.setattr(fbgemm_gpu, "__variant__", "cpu")
    assert str(missing("fbgemm-cuda")).startswith(
        "backend fbgemm-cuda needs FBGEMM's CUDA build, and its CPU build is installed: pip install"
    )
    monkeypatch.setattr(fbgemm_gpu, "__variant__", "cuda")
    assert missing("fbgemm-cuda") is None
    monkeypatch.setitem(__import__("sys").modules, "fbgemm_gpu", None)
    assert "needs FBGEMM, which does not load (" in str(missing("fbgemm-cpu")) and "\n" not in str(
        missing("fbgemm-cpu")
    )


@pytest.mark.parametrize("command", ["costs", "tables"])
def test_a_device_that_is_not_there_is_one_sentence_and_nothing_is_written(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "t.json").write_text(specs_text([TableSpec(f"t{n}", 50, 8, 8, 8.0, 8.0) for n in range(4)]))
    save_costs(replace(shipped(1, 1), backend="skirl-cuda"), tmp_path / "c.json")
    flags = {"costs": ["--minutes", "1e-9"], "tables": ["t.json", "--costs", "c.json", "--check", "1s"]}[command]
    assert main(["place", command, *flags, "--backend", "skirl-cuda"]) == 1
    error = capsys.readouterr().err
    assert f"skirl place {command}: backend skirl-cuda runs on a GPU, and torch " in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "t.json"]
    if command == "tables":  # a plan needs no GPU, only to measure it does
        assert main(["place", command, *flags[:-2], "--backend", "skirl-cuda", "--seconds", "0.1", "--quiet"]) == 0


@pytest.mark.parametrize("name", BACKENDS)
def test_costs_of_one_backend_are_not_taken_for_anothers(tmp_path, name):
    path = tmp_path / "c.json"
    costs = replace(shipped(1.0, 2), backend=name)
    save_costs(costs, path)
    for other in BACKENDS:
        if other == name:
            assert costs_for(other, path, link=1.0, ranks=2).ms == costs.ms
            continue
        text = f"it is for backend '{name}', not for '{other}': measure costs for '{other}', or set --backend to {name}"
        with pytest.raises(ValueError, match=text):
            costs_for(other, path, link=1.0, ranks=2)
    if name == "skirl-cpu":
        assert costs_for(name, None, link=1.0, ranks=2).backend == name
    else:
        with pytest.raises(
            ValueError, match=f"no costs of backend {name}: measure them with `skirl place costs --backend"
        ):
            costs_for(name, None, link=1.0, ranks=2)


def test_an_arena_is_of_its_backend(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="runs on a GPU"):
        backends.arena_of("fbgemm-cuda")
    arenas = {
        "skirl-cpu": (measure, "MeasuredTables"), "fbgemm-cpu": (fbgemm, "FbgemmArena"), "skirl-cuda": (gpu, "GpuArena"),
        "fbgemm-cuda": (fbgemm, "FbgemmCudaArena"),
    }  # fmt: skip
    monkeypatch.setattr(backends, "missing", lambda name: None)
    for module, name in arenas.values():
        monkeypatch.setattr(module, name, lambda name=name: name)
    assert {name: backends.arena_of(name) for name in BACKENDS} == {name: of for name, (_, of) in arenas.items()}


def test_a_killed_measurement_does_not_go_on_with_another_backend(tmp_path, monkeypatch):
    def killed(*of):
        raise Killed

    for name, value in (("DIMS", (4,)), ("BATCHES", (8,)), ("OTHER_BATCHES", (8,)), ("_TABLES", 3), ("ROUNDS", 2)):
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(calibrate, "arena_of", lambda name: MeasuredTables(1 << 14, plain=True))
    monkeypatch.setattr(calibrate, "costs_of", killed)
    out, rounds = tmp_path / "c.json", tmp_path / "c.json.rounds"

    def measured(name):
        calibrate.machine_costs(["sgd"], 0, 4, 0, out, backend=name, quiet=True)

    with pytest.raises(Killed):
        measured("skirl-cpu")
    text = rounds.read_text()
    assert len(text.splitlines()) == 3
    with pytest.raises(ValueError, match=r"c\.json\.rounds has measurements of something else"):
        measured("fbgemm-cpu")
    with monkeypatch.context() as other, pytest.raises(ValueError, match="measurements of something else"):
        other.setattr(MeasuredTables, "device", "another GPU")
        measured("skirl-cpu")
    with pytest.raises(Killed):
        measured("skirl-cpu")
    assert rounds.read_text() == text and not out.exists()


def test_plans_are_measured_with_the_backend_of_their_costs(tmp_path, monkeypatch):
    used = []
    monkeypatch.setattr(place, "check_there", used.append)
    monkeypatch.setattr(
        place, "arena_of", lambda name="skirl-cpu": used.append(name) or MeasuredTables(1 << 14, plain=True)
    )
    tables, costs = tmp_path / "t.json", tmp_path / "c.json"
    tables.write_text(specs_text([TableSpec(f"t{n}", 50, 8, 8, 8.0, 8.0) for n in range(3)]))
    save_costs(replace(shipped(1, 1), backend="fbgemm-cuda"), costs)
    asked = place.Question(
        tables, Ranks.like(2, 1 << 30), costs, 1e9, "exact", True, 0.05, 0, None, check=0.05, backend="fbgemm-cuda"
    )
    assert placed_tables(asked)["check"] is not None and used == ["fbgemm-cuda"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("backend", ON_GPU)
def test_costs_are_measured_on_a_gpu(tmp_path, monkeypatch, backend):
    if (why := missing(backend)) is not None:
        pytest.skip(why)
    monkeypatch.setattr("skirl.placement.tables.training.EPOCHS", 3)
    out = tmp_path / "c.json"
    flags = ["--backend", backend, "--minutes", "1e-9", "--combinations", "10", "--quiet", "--out", str(out)]
    assert main(["place", "costs", *flags]) == 0
    costs = load_costs(out, link=1e9, ranks=2, backends=(backend,))
    assert costs.machine is not None and costs.machine["device"] == torch.cuda.get_device_properties(0).name
    assert sum(costs.ms["rowwise-adagrad"]) > 0 and [path.name for path in tmp_path.iterdir()] == ["c.json"]


HERE = {"processor": machine()["processor"], "device": "cpu"}


@pytest.mark.parametrize(
    ("backend", "where", "why"),
    [
        ("skirl-cpu", None, "Measured times are far from the costs: run skirl place costs --out costs.json"),
        ("skirl-cpu", HERE, "Measured times are far from the costs: run skirl place costs --out costs.json"),
        (
            "fbgemm-cpu", HERE,
            "Measured times are far from the costs: run skirl place costs --backend fbgemm-cpu --out costs.json",
        ),
        (
            "skirl-cpu", HERE | {"processor": "Z80"},
            "The costs are from another machine, Z80: run skirl place costs --out costs.json",
        ),
        (
            "fbgemm-cuda", HERE | {"device": "H9"},
            "The costs are from another machine, H9: run skirl place costs --backend fbgemm-cuda --out costs.json",
        ),
    ],
)  # fmt: skip
def test_advice_tells_which_costs_to_measure_and_why(tmp_path, monkeypatch, capsys, backend, where, why):
    arena = MeasuredTables(1 << 14, plain=True)
    monkeypatch.setattr(arena, "run_ms", lambda parts: 5.0 + 7.0 * len(parts))
    monkeypatch.setattr(place, "check_there", lambda name: None)
    monkeypatch.setattr(place, "arena_of", lambda name: arena)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "t.json").write_text(specs_text([TableSpec(f"t{n}", 50, 8, 8, 8.0, 8.0, split="no") for n in range(3)]))
    path = tmp_path / "c.json"
    save_costs(replace(shipped(1, 1), backend=backend, machine=where), path)
    assert load_costs(path, link=1.0, ranks=2, backends=(backend,)).machine == where
    flags = [
        "--backend",
        backend,
        "--costs",
        str(path),
        "--seconds",
        "0.1",
        "--quiet",
        "--out",
        str(tmp_path / "p.json"),
    ]
    assert main(["place", "tables", str(tmp_path / "t.json"), *flags, "--check", "0.01s"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{why}, and set --costs costs.json." in said
    other = where is not None and where != HERE
    assert ("not on this machine" in said) == other


def test_what_lacks_is_measured_with_its_backend(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(place, "check_there", lambda name: None)
    path, tables = tmp_path / "c.json", tmp_path / "t.json"
    costs = shipped(1, 1)
    save_costs(replace(costs, backend="fbgemm-cpu", ms={"sgd": costs.ms["sgd"]}), path)
    tables.write_text(specs_text([TableSpec("t", 50, 8, 8, 8.0, 8.0, optimizer="adagrad")]))
    flags = ["place", "tables", str(tables), "--backend", "fbgemm-cpu", "--costs", str(path)]
    assert main(flags) == 1
    assert "measure it with `skirl place costs --optimizers adagrad --backend fbgemm-cpu`" in capsys.readouterr().err
    assert main([*flags, "--link", "measured"]) == 1
    assert "measure it with `skirl place costs --exchange 2 --backend fbgemm-cpu`, or" in capsys.readouterr().err


def test_a_refused_measurement_leaves_nothing_and_blocks_no_other(tmp_path, monkeypatch):
    for name, value in (("DIMS", (4,)), ("BATCHES", (8,)), ("OTHER_BATCHES", (8,)), ("_TABLES", 3), ("ROUNDS", 2)):
        monkeypatch.setattr(calibrate, name, value)

    class Refuses(MeasuredTables):
        def ready(self, lookups, piece):
            raise ValueError("it cannot run this")

    monkeypatch.setattr(calibrate, "arena_of", lambda name: Refuses(1 << 10, plain=True))
    with pytest.raises(ValueError, match="it cannot run this"):
        calibrate.machine_costs(["sgd"], 0, 4, 0, tmp_path / "c.json", quiet=True)
    assert not list(tmp_path.iterdir())
