"""Checkpoints of several trainers, here threads: each trains its own rows, and any number of trainers can resume."""

import itertools
import logging
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import skirl
from skirl.checkpoint import codec, numbers, saving
from skirl.checkpoint import folder as folders
from skirl.checkpoint.folder import Superseded
from skirl.checkpoint.import_rows import opened
from skirl.checkpoint.votes import Mismatch, agreed
from skirl.core.placement import Placement
from skirl.peers.base import PeerError, Peers
from skirl.sizing.look import describe_checkpoint as describe
from skirl.tools import sealed_json
from skirl.tools.os_errors import NotWritten
from skirl.tools.sealed_json import CheckpointError, OtherVersion
from tests.cases import cases
from tests.streams import used_rows
from tests.threads_as_trainers import InProcess

ROWS = 60
TABLES = [skirl.Table("a", ROWS, 4), skirl.Table("b", ROWS, 2)]
State = dict[int, bytes]


class Trainer:
    """One of several trainers, with its own embeddings: its batches contain only its own keys."""

    def __init__(self, peers: Peers, store: str) -> None:
        self.peers, self.placement = peers, Placement.even(peers.size)
        cache = 2 * ROWS if store == "checkpoint" else 30
        self.rows = skirl.EmbeddingBagCollection(
            TABLES, optimizer=skirl.Adagrad(lr=0.1), cache=cache, store=store, seed=4
        )
        self.rows.engine.rows.peers = peers
        self.model = nn.ModuleDict({"rows": self.rows, "top": nn.Linear(1, 1)})
        self.parts = [torch.optim.Adam(self.model["top"].parameters())]

    def train(self, seed: int, steps: int = 3) -> "Trainer":
        rng = np.random.default_rng([seed, self.peers.rank])
        own = [np.flatnonzero(self.placement.site_of(np.arange(ROWS) | t << 48) == self.peers.rank) for t in range(2)]
        for _ in range(steps):
            ids = np.stack([rng.choice(of, 6) for of in own], 1)
            out = self.rows(skirl.KeyedJagged.one_hot(["a", "b"], torch.from_numpy(ids)))
            (out["a"].sum() + out["b"].square().sum()).backward()
        with torch.no_grad():
            self.model["top"].weight.fill_(seed + 100 * self.peers.rank)
        return self

    def save(self, folder: Path, **options: Any) -> skirl.Saving:
        return skirl.save(folder, model=self.model, optimizers=self.parts, **options)

    def load(self, folder: Path) -> "Trainer":
        skirl.load(folder, model=self.model, optimizers=self.parts)
        return self

    def state(self) -> State:
        return used_rows(self.rows.engine)


def union(states: list[State]) -> State:
    found = State()
    for state in states:
        assert not found.keys() & state.keys()
        found |= state
    return found


def on(store: str, folder: Path) -> Callable[[int], str]:
    return lambda rank: store if store != "disk" else f"disk:{folder}-{rank}"


def jitter(seed: int) -> Callable[[int, str], None]:
    draw = random.Random(seed)
    return lambda rank, doing: time.sleep(draw.choice([0, 0, 0.001, 0.003]))


def saved(n: int, folder: Path, store: Callable[[int], str], seeds: tuple[int, ...], **more: Any) -> list[State]:
    """Let N trainers train and save, once for each seed. Return the rows of all of them at each save."""

    def work(peers: Peers) -> list[State]:
        trainer, states = Trainer(peers, store(peers.rank)), []
        for seed in seeds:
            trainer.train(seed)
            saving = trainer.save(folder, wait=False, keep_last=2)
            states.append(trainer.state())
            trainer.train(seed + 50, 1)  # while the checkpoint is written
            saving.wait()
            assert saving.path.is_file() and saving.bytes > 0
        trainer.rows.close()
        return states

    return [union(list(of_seed)) for of_seed in zip(*InProcess.run(n, work, **more), strict=True)]


@cases(12)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(["memory", "disk"]), st.integers(0, 1000))
def test_n_trainers_save_and_m_go_on(
    tmp_path_factory: pytest.TempPathFactory, n: int, m: int, store: str, seed: int
) -> None:
    root = tmp_path_factory.mktemp("parts")
    states = saved(n, root / "c", on(store, root / "n"), (seed, seed + 1, seed + 2), hook=jitter(seed))
    assert numbers(root / "c") == [2, 3]
    named = {f for number in (2, 3) for f in folders.files(folders.read(folders.header(root / "c", number)))}
    there = {str(p.relative_to(root / "c")) for p in [*root.glob("c/dense-*"), *root.glob("c/rows/*")]}
    assert there == named, "nothing is left behind, nothing is missing"

    def work(peers: Peers) -> dict[str, Any]:
        trainer = Trainer(peers, on(store, root / "m")(peers.rank)).load(root / "c")
        found: dict[str, Any] = {"state": trainer.state(), "steps": trainer.rows.engine.counters.steps}
        keys = np.array(list(found["state"]), np.int64)
        assert (trainer.placement.site_of(keys) == peers.rank).all()
        assert trainer.rows.engine.packs[0].steps.tolist() == [11, 11]
        assert trainer.model["top"].weight.item() == seed + 2, "what is no row is rank 0's"
        trainer.train(seed + 9).save(root / "c")
        found["after"] = trainer.state()
        trainer.rows.close()
        return found

    found = InProcess.run(m, work, hook=jitter(seed + 1))
    assert union([one["state"] for one in found]) == states[-1]
    assert {one["steps"] for one in found} == {11}
    alone = Trainer(InProcess.job(1)[0], on(store, root / "one")(0)).load(root / "c")
    assert alone.state() == union([one["after"] for one in found])
    alone.rows.close()


def test_one_process_reads_the_parts_of_several(tmp_path: Path) -> None:
    """Code that exports, inspects or evaluates a checkpoint knows nothing of trainers."""
    for store in ("memory", "disk"):
        folder = tmp_path / store
        [state] = saved(3, folder, on(store, tmp_path / f"{store} rows"), (1,))
        facts = describe(folder, check=True)
        assert facts["whole"] and (facts["trainers"], facts["step"]) == (3, 3)
        assert sum(table["held"] for table in facts["tables"]) == len(state)
        with opened(folder) as found:
            assert used_rows(found.rows.engine) == state
        reading = Trainer(InProcess.job(1)[0], "checkpoint").load(folder)
        assert used_rows(reading.rows.engine) == state
        reading.rows.close()
        folders.keep_best(folders.header(folder, 1))
        with opened(folder / "best") as found:
            assert used_rows(found.rows.engine) == state


@contextmanager
def failing(where: str, rank: int, trainer: Trainer) -> Iterator[None]:
    """Make the disk of one trainer full at one point of a save."""

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        store = trainer.rows.engine.store
        if trainer.peers.rank == rank and where == "freeze":
            patch.setattr(store, "freeze", full)
        if trainer.peers.rank == rank and where == "rows":
            real = store.freeze

            def freeze(*args: Any) -> Any:
                state = real(*args)
                patch.setattr(state, "write", full)
                return state

            patch.setattr(store, "freeze", freeze)
        yield


def test_a_trainer_that_cannot_write_stops_the_checkpoint_of_all(tmp_path: Path) -> None:
    folder, store = tmp_path / "c", "disk"
    at = [(where, rank) for where in ("freeze", "rows") for rank in (0, 1)] + [("dense", 0), ("header", 0)]

    def work(peers: Peers) -> list[str]:
        trainer, told = Trainer(peers, on(store, tmp_path / "rows")(peers.rank)).train(0), list[str]()
        trainer.save(folder)
        for where, rank in at:
            trainer.train(1)
            point["now"] = (where, rank)
            with failing(where, rank, trainer), pytest.raises(NotWritten) as error:
                trainer.save(folder)
            told.append(str(error.value))
            peers.channel("ids").exchange([np.zeros(0, np.uint8)] * 2)  # the point stays set until both have failed
        point["now"] = ("", -1)
        peers.channel("ids").exchange([np.zeros(0, np.uint8)] * 2)
        trainer.train(2).save(folder)
        state.append(trainer.state())
        trainer.rows.close()
        return told

    point: dict[str, tuple[str, int]] = {"now": ("", -1)}
    state: list[State] = []

    def if_at(where: str, real: Callable[..., Any], rank_of: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if point["now"] == (where, rank_of(*args)):
                raise OSError(28, "No space left on device")
            return real(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "write_dense", if_at("dense", codec.write_dense, lambda *args: 0))
        patch.setattr(saving, "put_whole", if_at("header", saving.put_whole, lambda *args: 0))
        told = InProcess.run(2, work)
    for (_, rank), *sentences in zip(at, *told, strict=True):
        assert sentences[1 - rank] == f"rank {rank}: {sentences[rank]}"
        assert "got no new checkpoint, the disk is full; checkpoint 1 in it stays whole" in sentences[rank]
    assert numbers(folder) == [2], "only the last one is there, and what the others wrote is swept"
    named = folders.files(folders.read(folders.header(folder, 2)))
    assert {p.name for p in (folder / "rows").iterdir()} == {Path(f).name for f in named if f.startswith("rows/")}
    assert len(list(folder.glob("dense-*"))) == 1
    found = InProcess.run(3, lambda peers: Trainer(peers, on(store, tmp_path / "m")(peers.rank)).load(folder).state())
    assert union(found) == union(state)


_watched: list[Callable[[str], None]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watched and event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"):
        _watched[0](str(args[0]) + str(args[1]))


def test_a_kill_at_any_touch_of_a_file_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The folder's content before each touch is what a kill of all trainers at that point would leave."""
    folder, store, busy, shots = tmp_path / "c", "disk", threading.RLock(), list[Path]()

    def shot(touched: str) -> None:
        if str(folder) not in touched or str(tmp_path / "shot") in touched or threading.current_thread() in inside:
            return
        with busy:
            inside.append(threading.current_thread())
            try:
                for _ in range(20):
                    try:
                        shutil.rmtree(tmp_path / "shot", ignore_errors=True)
                        shutil.copytree(folder, tmp_path / "shot")
                        break
                    except (OSError, shutil.Error):  # another thread is in the middle of a call
                        continue
                shots.append((tmp_path / "shot").rename(tmp_path / f"shot-{len(shots)}"))
            finally:
                inside.remove(threading.current_thread())

    def work(peers: Peers) -> list[State]:
        trainer = Trainer(peers, on(store, tmp_path / "rows")(peers.rank)).train(0)
        trainer.save(folder)
        states = [trainer.state()]
        if peers.rank == 0:
            _watched[:] = [shot]
        peers.channel("ids").exchange([np.zeros(0, np.uint8)] * 2)
        trainer.train(1).save(folder)
        peers.channel("ids").exchange([np.zeros(0, np.uint8)] * 2)
        _watched.clear()
        states.append(trainer.state())
        trainer.rows.close()
        return states

    inside: list[threading.Thread] = []
    sys.addaudithook(_audit)
    before, after = (union(list(states)) for states in zip(*InProcess.run(2, work), strict=True))
    assert len(shots) > 15
    found = []
    shots = [*shots[:: 1 + len(shots) // 20], shots[-1]]
    for path in shots:
        with opened(path) as rows:
            found.append(used_rows(rows.rows.engine))
    assert all(state in (before, after) for state in found)
    assert found[0] == before and found[-1] == after


def test_a_trainer_that_dies_while_all_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    [state] = saved(2, tmp_path, on("memory", tmp_path), (0,))
    for at in ("begins", "are written"):

        def dies(rank: int, doing: str, at: str = at) -> None:
            if rank == 1 and at in doing:
                raise RuntimeError("killed")

        def work(peers: Peers) -> None:
            with pytest.raises(PeerError if peers.rank == 0 else RuntimeError) as error:
                Trainer(peers, "memory").train(1).save(tmp_path)
            raise error.value

        with pytest.raises(RuntimeError, match="killed"):
            InProcess.run(2, work, hook=dies, timeout=5.0)
        assert numbers(tmp_path) == [1]
        assert union(InProcess.run(2, lambda peers: Trainer(peers, "memory").load(tmp_path).state())) == state


def test_all_take_the_checkpoint_before_if_one_finds_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = "disk"
    states = saved(2, tmp_path / "c", on(store, tmp_path / "rows"), (0, 1))
    bodies = [folders.files(folders.read(folders.header(tmp_path / "c", number))) for number in (1, 2)]
    for name, kind in zip(sorted(bodies[1] - bodies[0]), itertools.cycle(["flip", "remove"])):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "c", copy)
        path = copy / name if (copy / name).is_file() else copy / name / "model.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-3] ^= 1
        path.unlink()
        if kind == "flip":
            path.write_bytes(raw)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = InProcess.run(2, partial(_loaded_and_saved, store=store, folder=copy))
        assert union([state for state, _ in found]) == states[0], (name, kind)
        warned = [r.getMessage() for r in caplog.records if "the checkpoint before it" in r.getMessage()]
        assert len(warned) == 1 and path.name in warned[0], "one sentence, not one a trainer"
        assert numbers(copy) == [1, 3], "the damaged one is no longer one to count on"
        shutil.rmtree(copy)


def _loaded_and_saved(peers: Peers, store: str, folder: Path) -> tuple[State, int]:
    trainer = Trainer(peers, on(store, folder / "own")(peers.rank)).load(folder)
    state = trainer.state()
    saving = trainer.save(folder, keep_last=2)
    trainer.rows.close()
    return state, saving.number


def test_one_trainer_alone_sees_other_files(tmp_path: Path) -> None:
    """Separate copies of the folder do if they match: damage that one trainer sees counts for all. Different folders
    are refused."""
    states = saved(2, tmp_path / "0", on("memory", tmp_path), (0, 1))
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    body = folders.read(folders.header(tmp_path / "1", 2))
    last = body["parts"][1]["rows"]["rows"]["cache"]["segments"][-1]
    (tmp_path / "1" / "rows" / f"{last.split(' ')[0]}.rows").unlink()

    def work(peers: Peers) -> State:
        return Trainer(peers, "memory").load(tmp_path / str(peers.rank)).state()

    assert union(InProcess.run(2, work)) == states[0]
    saved(2, tmp_path / "other", on("memory", tmp_path), (7, 8))
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "other").rename(tmp_path / "1")
    with pytest.raises(CheckpointError, match="give all trainers one folder"):
        InProcess.run(2, work)


def test_what_does_not_go_together_is_refused_on_all(tmp_path: Path) -> None:
    def refused(error: type[Exception], match: str, work: Callable[[Peers], Any]) -> None:
        def each(peers: Peers) -> None:
            with pytest.raises(error, match=match):
                work(peers)

        InProcess.run(2, each)

    def other_step(peers: Peers) -> None:
        Trainer(peers, "memory").train(0, 2 + peers.rank).save(tmp_path / "a")

    refused(ValueError, "after the same step", other_step)
    assert numbers(tmp_path / "a") == []
    saved(2, tmp_path / "b", on("memory", tmp_path), (0, 1))

    def other_model(peers: Peers) -> None:
        trainer = Trainer(peers, "memory")
        if peers.rank:
            trainer.model["more"] = nn.Linear(1, 1)
        trainer.load(tmp_path / "b")

    refused(CheckpointError, "make all as it was saved", other_model)


@pytest.mark.parametrize(
    ("error", "on_others"),
    [(CheckpointError, CheckpointError), (Mismatch, Mismatch), (OtherVersion, OtherVersion),
     (folders.Superseded, folders.Superseded), (OSError, PeerError)],
)  # fmt: skip
def test_an_error_of_one_trainer_is_of_its_kind_on_all(error: type[Exception], on_others: type[Exception]):
    """Else one would look for an older checkpoint, and the others not."""

    def work(peers: Peers) -> type[Exception]:
        def fails() -> None:
            if peers.rank == 1:
                raise error("damaged")

        with pytest.raises(Exception, match="damaged") as found:
            agreed(peers, fails, "a test")
        return found.type

    assert InProcess.run(2, work) == [on_others, error]


class NewerStart:
    """A newer start of the run. When first called, it loads, trains and saves twice."""

    def __init__(self, folder: Path, trainers: int) -> None:
        self.folder, self.trainers, self.ran = folder, trainers, False
        self.state = State()

    def __call__(self) -> None:
        if self.ran:
            return
        self.ran = True

        def work(peers: Peers) -> State:
            trainer = Trainer(peers, "memory").load(self.folder).train(7)
            trainer.save(self.folder)
            trainer.train(8).save(self.folder)
            return trainer.state()

        self.state = union(InProcess.run(self.trainers, work))


def before(newer: Callable[[], None], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        newer()
        return real(*args, **more)

    return call


def after(newer: Callable[[], None], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        newer()
        return found

    return call


MOMENTS = ("header", "rename", "retain", "sweep is to be allowed", "sweep was allowed")


@pytest.mark.parametrize(
    ("moment", "trainers"), [*((moment, 2) for moment in MOMENTS), (MOMENTS[1], 1), (MOMENTS[4], 1)]
)
def test_an_older_start_changes_nothing(tmp_path: Path, moment: str, trainers: int) -> None:
    newer = NewerStart(tmp_path, trainers)

    def older(peers: Peers) -> None:
        trainer = Trainer(peers, "memory").train(0)
        trainer.save(tmp_path)
        first.wait()
        if peers.rank == 0:
            patch.setattr(*points[moment])
        try:
            trainer.train(1).save(tmp_path)
        except (Superseded, PeerError, OSError) as error:
            told.append(str(error))
        if newer.ran:  # whether or not this failed, it knows from now on
            with pytest.raises(
                (Superseded, PeerError), match="belongs to a newer start of the run, and this is start 1: end"
            ):
                trainer.train(2).save(tmp_path)

    first, told = threading.Barrier(trainers), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        points = {
            "header": (saving, "put_whole", before(newer, saving.put_whole)),
            "rename": (sealed_json.os, "replace", _at_header(newer, sealed_json.os.replace)),
            "retain": (folders, "retain", before(newer, folders.retain)),
            "sweep is to be allowed": (folders, "is_newest", before(newer, folders.is_newest)),
            "sweep was allowed": (folders, "is_newest", after(newer, folders.is_newest)),
        }
        InProcess.run(trainers, older)
    assert newer.ran
    body = folders.read(folders.header(tmp_path, numbers(tmp_path)[-1]))
    assert body["start"] == 2
    found = InProcess.run(trainers, lambda peers: Trainer(peers, "memory").load(tmp_path).state())
    assert union(found) == newer.state


def _at_header(newer: Callable[[], None], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(old: Any, new: Any) -> Any:
        if folders.is_header(Path(new)):
            newer()
        return real(old, new)

    return call


def test_a_listing_that_is_old_tells_nothing_of_a_newer_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems show stale listings. A folder that somebody has cleared still belongs to the start."""
    assert folders.claim(tmp_path) == 1 and folders.is_newest(tmp_path, 1)
    with monkeypatch.context() as patch:
        folders.claim(tmp_path)
        patch.setattr(folders, "_starts", lambda folder: [1])
        with pytest.raises(Superseded, match="belongs to a newer start of the run, and this is start 1"):
            folders.check_start(tmp_path, 1)
    (tmp_path / "start-000002").unlink()
    assert folders.is_newest(tmp_path, 2)
