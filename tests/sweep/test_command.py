"""`skirl sweep`: what it prints and leaves, compared with lone runs, and what it refuses."""

import errno
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import skirl
from skirl import cli
from skirl.core.placement import Cut, PlacedTable, PlacementPlan, Site
from skirl.data import Synthetic
from skirl.sweep import checkpoint
from skirl.sweep.checkpoint import checkpoint_of
from skirl.sweep.command import SweepCommand
from skirl.sweep.flags import KeepFlags
from skirl.sweep.report import as_text, report
from skirl.tools.progress import listed
from skirl.tools.sealed_json import CheckpointError, write_sealed
from skirl.train.commands import Train
from skirl.train.recipe import Recipe
from tests.sweep.folders import race_lines, rows_of

FLAGS: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "steps": 40, "cache": "20%", "valid": "10%",
    "quiet": True, "log_every": 10,
}  # fmt: skip
VARY = ("lr=0.02,0.5", "model=dlrm-tiny,dcnv2-tiny", "dense-lr=0.001,1e30")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepCommand, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("sweep") / "s"
    command = SweepCommand.of(**FLAGS, vary=VARY, rungs="25%,50%", keep=2, run=str(folder))
    return command, command.run(), folder


def test_a_survivor_has_the_losses_and_the_scores_of_its_lone_run(ran: tuple):
    _, result, folder = ran
    stayed = [name for name, of in result["by_variant"].items() if of["left"] is None]
    assert len(stayed) == 2
    own = json.loads((folder / stayed[0] / "config.json").read_text())["flags"]
    assert own["threads"] == json.loads((folder / "sweep.json").read_text())["flags"]["threads"] == 1
    alone = Train.of(**(own | {"run": "none", "quiet": True})).run()
    found = json.loads((folder / stayed[0] / "result.json").read_text())
    for name in ("loss", "auc", "logloss", "test_auc", "test_logloss", "samples", "steps"):
        assert found[name] == alone[name]


def test_what_is_held_out_is_read_once_for_all(monkeypatch: pytest.MonkeyPatch):
    reads = []
    held_out_at = Synthetic.held_out_at

    class Counted:
        def __init__(self, batches: Any) -> None:
            self.batches = batches

        def __iter__(self) -> Any:
            reads.append(self)
            return iter(self.batches)

    monkeypatch.setattr(Synthetic, "held_out_at", lambda self, state: Counted(held_out_at(self, state)))
    result = SweepCommand.of(**FLAGS | {"steps": 4}, vary=("lr=0.02,0.5", "seed=0,1"), run="none").run()
    assert len(reads) == 1 and all(of["test_auc"] is not None for of in result["by_variant"].values())


def test_what_diverges_leaves_and_so_do_those_below_the_rung(ran: tuple):
    _, result, folder = ran
    assert result["failed"] is None
    lines = race_lines(folder)
    left = {line["variant"]: line for line in lines if line["event"] == "left"}
    assert len(left) == 6
    for name, line in left.items():
        assert (line["kind"] == "diverged") == ("1e+30" in name)
        of = result["by_variant"][name]
        assert of["left"] == line["why"]
        assert of["steps"] == line["step"] - (line["kind"] == "diverged")
    assert result["variant_steps"] == sum(left[n]["step"] if n in left else 40 for n in result["by_variant"])
    assert result["plans"] == result["read_batches"] == 40
    standing = [line["step"] for line in lines if line["event"] == "standing"]
    assert standing == [10, 20, 30, 40]


def test_the_summary_names_the_winner_and_all_others(ran: tuple):
    command, result, _ = ran
    text = listed(command.summary(json.loads(json.dumps(result))))
    assert re.search(rf"winner +{re.escape(result['winner'])}, log loss 0\.\d+ on the samples held out", text)
    for name in result["by_variant"]:
        assert name in text
    assert "40 batches, once for all variants" in text


def test_a_disk_that_refuses_the_run_folder_ends_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "w" in mode and path.parent == tmp_path / "s" and path.name.startswith(("race.jsonl", "result.json")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    flags = FLAGS | {"steps": 20, "valid": None, "run": str(tmp_path / "s")}
    command = SweepCommand.of(**flags, vary=("lr=0.02,0.5",))
    result = command.run()
    assert result["failed"] is None and result["steps"] == 20
    told = [text.partition(":")[0] for text in result["missing"]]
    assert told[:2] == ["race.jsonl is missing", "result.json is missing"]
    assert "result.json is missing: the disk is full" in listed(command.summary(result))
    assert (tmp_path / "s" / "sweep.json").is_file()


def test_a_run_that_all_leave_fails_and_says_so(tmp_path: Path):
    flags = FLAGS | {"steps": 20, "valid": None}
    result = SweepCommand.of(**flags, vary=("dense-lr=1e30,1e31",), run=str(tmp_path / "s")).run()
    assert "all 2 variants have diverged" in result["failed"]
    assert result["winner"] is None
    assert json.loads((tmp_path / "s" / "result.json").read_text())["failed"] == result["failed"]
    lines = race_lines(tmp_path / "s")
    *_, one, other, last = lines
    assert [(line["event"], line["kind"], line["step"]) for line in (one, other)] == [("left", "diverged", 2)] * 2
    assert (last["event"], last["step"], result["steps"]) == ("standing", 2, 2)
    for places in (last["places"], result["standing"]):
        assert [place["state"] for place in places] == ["diverged at step 2"] * 2
    facts = report(tmp_path / "s", None)
    text = as_text(facts)
    assert (facts["step"], text["left"], "leader" in text) == (2, "2 diverged", False)


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_placed_in_several_stores_are_those_of_one(processes: int, tmp_path: Path):
    flags = {n: v for n, v in FLAGS.items() if n not in ("valid", "rungs")} | {"steps": 12, "run": "none"}
    own = {n: flags[n] for n in ("data", "model", "dim", "batch", "steps", "cache")}
    plan = tmp_path / "plan.json"
    write_plan(plan, Recipe.of(**own), f"disk:{tmp_path / 'rows'}", "memory")
    told = ("standing", "winner", "variant_steps")
    flags |= {"vary": ("lr=0.02,0.5", "optimizer=sgd,adagrad"), "processes": processes}
    one, placed = SweepCommand.of(**flags).run(), SweepCommand.of(**flags, store=f"placed:{plan}").run()
    assert {name: one[name] for name in told} == {name: placed[name] for name in told}
    assert len([*(tmp_path / "rows").iterdir()]) == 4, "each variant has a folder of its own"


def write_plan(path: Path, recipe: Recipe, *stores: str) -> None:
    """Write a plan of rows, evenly over some stores."""
    sites, cut = tuple(Site(f"site-{n}", store) for n, store in enumerate(stores)), Cut.even(range(len(stores)))
    tables = (PlacedTable(table.name, table.rows, table.dim, cut) for table in recipe.tables())
    PlacementPlan(sites, tuple(tables)).save(path)


def test_memory_nodes_are_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "and a sweep keeps its rows in memory or on disk" in wrong(capsys, "--store", "rpc://127.0.0.1:29400")
    plan, nodes = tmp_path / "plan.json", "rpc://127.0.0.1:29400"
    write_plan(plan, Recipe.of(data="synthetic:tiny", model="dlrm-tiny"), nodes, "memory")
    said = wrong(capsys, "--store", f"placed:{plan}")
    assert f"store is 'placed:{plan}', which has {nodes}, and a sweep keeps its rows in memory or on disk" in said
    with pytest.raises(ValueError, match="a sweep keeps its rows in memory or on disk"):
        skirl.Sweep(lambda variant: None, [skirl.Variant("a")], [skirl.Table("t", 4, 2)], cache=4, store=nodes)
    assert cli.main(["sweep", "--help"]) == 0
    assert "rpc" not in capsys.readouterr().out


def wrong(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["sweep", "--data", "synthetic:tiny", "--model", "dlrm-tiny", *words]) != 0
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    return said


def test_wrong_flags_are_refused_in_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert "a sweep has no variant: set --vary, such as lr=0.01,0.02" in wrong(capsys)
    assert "batch cannot vary" in wrong(capsys, "--vary", "batch=1,2")
    assert "rungs is '5%,x'" in wrong(capsys, "--vary", "lr=1,2", "--rungs", "5%,x")
    assert "--keep is 0" in wrong(capsys, "--vary", "lr=1,2", "--keep", "0")
    (tmp_path / "sweep.json").write_text("{}")
    assert "which already holds a sweep" in wrong(capsys, "--vary", "lr=1,2", "--steps", "2", "--run", str(tmp_path))


def test_the_page_of_a_sweep_has_all_of_them(ran: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _, result, folder = ran
    page = tmp_path / "page.html"
    assert cli.main(["report", str(folder), "--page", str(page)]) == 0
    said, text = capsys.readouterr().out, page.read_text()
    assert result["winner"] in said
    for name in result["by_variant"]:
        assert name in text
    assert "diverged at step" in text and text.count("<svg") == 3
    assert cli.main(["report", str(folder / result["winner"]), "--page", str(page)]) == 0
    capsys.readouterr()
    (tmp_path / "race.jsonl").write_bytes(b'{"event": "left"}\n')
    (tmp_path / "sweep.json").write_bytes((folder / "sweep.json").read_bytes())
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "race.jsonl, line 1 is not a line of a race" in capsys.readouterr().err


@pytest.mark.parametrize("store", ["memory", pytest.param("disk", marks=pytest.mark.slow)])
def test_a_sweep_that_was_told_to_stop_goes_on_with_the_same_race(store: str, tmp_path: Path, monkeypatch):
    vary, flags = ("lr=0.02,0.5", "seed=0,1"), FLAGS | {"steps": 20, "rungs": "75%"}
    runs = {}
    for name in ("whole", "part"):
        where = {} if store == "memory" else {"store": f"disk:{tmp_path / name / 'rows'}"}
        more = {"run": str(tmp_path / name / "run"), "save": tmp_path / name / "saved", **where}
        runs[name] = SweepCommand.of(**flags, **more, vary=vary, save_every=4)
    whole = runs["whole"].run()
    assert whole["failed"] is None and whole["stopped_by"] is None
    told = {5: signal.SIGINT, 11: signal.SIGTERM}

    def stopping(self: KeepFlags, step: int, seconds: float) -> bool:
        if step in told:
            os.kill(os.getpid(), told.pop(step))
        return step % 4 == 0

    again = SweepCommand.of(**runs["part"].flat() | {"resume": True})
    with monkeypatch.context() as patch:
        patch.setattr(KeepFlags, "due", stopping)
        with pytest.raises(KeyboardInterrupt):
            runs["part"].run()
        stopped = again.run()
    assert stopped["stopped_by"] == "SIGTERM"
    assert saved_step(tmp_path / "part" / "saved") == stopped["steps"] == 12  # it came while step 11 was being saved
    again = again.run()
    assert again["steps"] == 20
    for name in ("winner", "standing", "variant_steps", "seed_noise"):
        assert again[name] == whole[name]
    for name, of in whole["by_variant"].items():
        assert again["by_variant"][name] | {"run": None} == of | {"run": None}
    lines = [race_lines(tmp_path / name / "run") for name in runs]
    assert lines[0] == lines[1]
    first, second = race_lines(tmp_path / "part" / "run", "standing", times=True)
    assert 0 < first["begun_at"] < first["step"] == 10 and (second["begun_at"], second["step"]) == (12, 20)
    goes_on_alone(tmp_path, store, [n for n, of in again["by_variant"].items() if of["left"] is None])


def saved_step(folder: Path) -> int:
    return json.loads((folder / "sweep-checkpoint.json").read_bytes())["step"]


def goes_on_alone(folder: Path, store: str, stayed: list[str]) -> None:
    """Check that a variant's rows are those of its lone run, and so is every loss when `skirl train --resume` goes on
    with it."""
    [first] = [name for name in stayed if "seed=1" in name]  # the sweep's data has another seed, which its config keeps
    part = folder / "part"
    own = json.loads((part / "run" / first / "config.json").read_text())["flags"] | {"run": "none", "quiet": True}
    assert (own["seed"], own["data_seed"]) == (1, 0)
    lone = own | {"save": str(folder / "lone"), "store": "memory"}
    Train.of(**lone).run()
    of = ((folder / "lone", None), (part / "saved", first), (part / "run", first))
    tables = [rows_of(path, variant) for path, variant in of]
    assert tables[0].num_rows > 100 and tables[0] == tables[1] == tables[2]
    where = {} if store == "memory" else {"store": f"disk:{part / 'rows' / first}"}
    alone = Train.of(**own | {"save": str(part / "saved" / first), "resume": True, "steps": 24} | where).run()
    never = Train.of(**lone | {"resume": True, "steps": 24}).run()
    assert alone["begun_at"] == never["begun_at"] == 20
    assert alone["loss"] == never["loss"] and alone["auc"] == never["auc"]


def test_a_sweep_is_saved_by_steps_and_by_the_clock(tmp_path: Path):
    flags = KeepFlags(save=tmp_path, save_every=5, save_minutes=2)
    assert [flags.due(*at) for at in ((4, 119.0), (5, 0.0), (6, 120.0))] == [False, True, True]
    with pytest.raises(ValueError, match="save_minutes is 0: set it to minutes above 0"):
        KeepFlags(save=tmp_path / "new", save_minutes=0)


def test_weights_and_biases_are_refused():
    with pytest.raises(
        ValueError, match="Weights & Biases has one run in a process: leave wandb out; TensorBoard shows"
    ):
        SweepCommand.of(data="synthetic:tiny", vary=("lr=0.1,0.2",), wandb="mine")


def test_the_variant_to_export_is_one_of_the_sweep(ran: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def said(folder: Path, name: str) -> str:
        assert cli.main(["export", str(folder), str(tmp_path / "x.parquet"), "--variant", name]) == 1
        return capsys.readouterr().err

    assert "was never saved: train it again with --save" in said(ran[2], "a")
    assert "holds no checkpoint of a sweep" in said(tmp_path, "a")
    body = {
        "format": "skirl-sweep-checkpoint",
        "format_version": 3,
        "skirl": "1",
        "variants": {},
        "left": {"lr=1": "behind"},
        "left_at": {"lr=1": 4},
    }
    write_sealed(tmp_path / "sweep-checkpoint.json", body, "0" * 16)
    assert "has no variant 'lr=2': did you mean lr=1?" in said(tmp_path, "lr=2")
    assert "variant lr=1 has left (behind) before it was saved" in said(tmp_path, "lr=1")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_variant_that_left_is_saved_as_it_was_then_unless_it_diverged(processes: int, tmp_path: Path):
    """Its rows are those of its lone run up to the step at which it left."""
    save, flags = tmp_path / "saved", FLAGS | {"steps": 12, "valid": None, "run": "none", "threads": 1}
    more = {"vary": ("lr=0.02,0.1,0.5", "dense-lr=0.001,1e30"), "rungs": "3,6", "processes": processes}
    result = SweepCommand.of(**flags, **more, save=save).run()
    left = {name: of["left"] for name, of in result["by_variant"].items() if of["left"] is not None}
    [below] = [name for name, why in left.items() if why == "dropped at step 6 by loss"]
    lr = float(below.split(",")[0].removeprefix("lr="))
    alone = {**flags, "lr": lr, "dense_lr": 0.001, "steps": 6, "save": tmp_path / "alone"}
    assert Train.of(**alone).run()["failed"] is None
    tables = [rows_of(save, below), rows_of(tmp_path / "alone")]
    assert tables[0].num_rows > 100 and tables[0] == tables[1]
    broken = next(name for name, why in left.items() if "diverged" in why)
    says = (
        f"left at step 2 (diverged at step 2), and its last checkpoint is of step 0: name {save / broken} if you want"
    )
    with pytest.raises(CheckpointError, match=re.escape(says)):
        checkpoint_of(save, broken)


def test_a_sweep_of_an_earlier_format_is_refused(tmp_path: Path):
    flags = FLAGS | {"steps": 2, "valid": None, "run": "none", "vary": ("lr=0.1,0.2",), "save": tmp_path}
    SweepCommand.of(**flags).run()
    body = checkpoint.header_at(tmp_path)
    write_sealed(tmp_path / checkpoint.HEADER, body | {"format_version": 1, "skirl": "0.0.9"}, "0" * 16)
    says = " was written by skirl 0.0.9 in format 1, .* reads format 3: use the version that wrote it, or begin"
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / checkpoint.HEADER)) + says):
        SweepCommand.of(**flags | {"steps": 4}, resume=True).run()


def test_a_disk_that_refuses_a_checkpoint_ends_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write, steps = checkpoint.write_sealed, []

    def full(path: Path, body: Any, mark: str) -> None:
        steps.append(body["step"])
        if body["step"] in (2, 4):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, body, mark)

    monkeypatch.setattr(checkpoint, "write_sealed", full)
    flags = FLAGS | {"steps": 6, "valid": None, "run": "none"}
    result = SweepCommand.of(**flags, vary=("lr=0.1,0.2",), save=tmp_path, save_every=2).run()
    assert steps == [0, 2, 4, 6] and result["failed"] is None and saved_step(tmp_path) == 6
    assert [len(list((tmp_path / name).glob("checkpoint-*"))) for name in ("lr=0.1", "lr=0.2")] == [1, 1]
    result = SweepCommand.of(
        **flags | {"steps": 8}, vary=("lr=0.1,0.2",), save=tmp_path, save_every=2, resume=True
    ).run()
    assert result["failed"] is None and saved_step(tmp_path) == 8
    again = {**flags, "vary": ("lr=0.1,0.2",), "save": tmp_path, "resume": True}
    for other, says in (
        (
            {"seed": 1},
            "--seed is 1, the run was saved with 0: go on with that, or begin another sweep in another --save",
        ),
        ({"dense_lr": 0.5}, "--dense-lr is 0.5, the run was saved with"),
        ({"rungs": "50%"}, "--rungs is 50%, the run was saved with not set"),
        ({"keep": 2}, "is of a sweep with other keep (1) than this one (2)"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            SweepCommand.of(**again | other).run()
    steps.clear()
    result = SweepCommand.of(**flags | {"steps": 4}, vary=("lr=0.1,0.2",), save=tmp_path / "new", save_every=2).run()
    assert "step 4 is not saved" in result["failed"] and "the disk is full" in result["failed"]
    assert saved_step(tmp_path / "new") == 0
