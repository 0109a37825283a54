"""Train variants in a sweep, alone, and over the plain reference, and compare every bit of what they leave."""

import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import skirl
from skirl import SGD, Table
from skirl.core.groups import Groups, RowOptimizers
from skirl.core.reference import Reference
from skirl.engine.access import peek
from skirl.store.memory import MemoryStore
from skirl.sweep import checkpoint
from skirl.sweep.checkpoint import HEADER
from skirl.sweep.sweep import Diverged
from skirl.train.verify import PlainEmbeddings
from tests.killed import ended, forked
from tests.runs import same_bits
from tests.streams import stored_rows
from tests.sweep.folders import kill

TABLES = (
    Table("a", 40, 3, features=("x", "y")),
    Table("b", 60, 7, pooling="mean"),
    Table("c", 50_000_000, 3),
)
BATCH = 4


@dataclass(frozen=True)
class Of:
    """The settings of one variant: everything that may differ."""

    dim: int | None = None
    lr: float = 0.1
    rule: RowOptimizers = SGD()  # noqa: RUF009 frozen
    seed: int = 0
    width: int = 4
    dropout: float = 0.0
    noise: float = 0.0
    """Scale of random numbers that no module draws."""
    norm: bool = False
    only: tuple[str, ...] = ("x", "y", "b", "c")
    """Features with a gradient."""
    nan: int | None = None
    """The batch in which its loss becomes NaN or infinite."""
    dense_lr: float = 0.01
    dropped: int | None = None
    """The batch after which it is dropped."""
    warm: bool = False
    """Whether rows of table b begin from an array."""
    init: Any = None
    """How all other rows begin, if not as usual."""

    @property
    def overrides(self) -> dict[str, Any]:
        own = {
            name: getattr(self, name)
            for name in ("lr", "seed", "width", "dropout", "noise", "norm", "only", "nan", "dense_lr")
        }
        own |= {"optimizer": self.rule}
        if self.warm or self.init:
            return own | {"tables": tables_of(self)}
        return own | ({} if self.dim is None else {"dim": self.dim})


@dataclass(frozen=True)
class Case:
    """A sweep, with all the options that must not change its bits."""

    variants: tuple[Of, ...]
    seed: int = 0
    steps: int = 10
    slots: int = 64
    """Rows of each pack."""
    nap: float = 0.0
    accumulate: int = 1
    depth: Any = 4
    prefetch: int = 2
    own_loop: bool = False
    """Whether the loop trains each variant itself, rather than calling `sweep.step`."""
    kind: str = "memory"
    """Kind of store."""
    device: str = "cpu"
    """That of the sweep; each variant alone is on the CPU."""
    resumed: int | None = None
    """The batch after which it is saved, closed, and made again."""
    killed: str | None = None
    """When a process that goes on after that is killed, so that another one goes on: as it "trains", as it "saves" again, or
    when "all" is saved except for the header."""
    folder: Any = None
    """Folder for stores on disk and checkpoints."""
    by_hand: int = 0
    """Rows of table a that one variant sets: all others have them too, at their initial values."""


class Net(nn.Module):
    """A small model that uses every setting of a variant."""

    def __init__(self, embeddings: Any, overrides: Mapping[str, Any]) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.only, self.nan, self.noise = overrides["only"], overrides["nan"], overrides["noise"]
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))  # part of a checkpoint
        dims = {name: table.dim for table in embeddings.tables for name in table.features}
        width = overrides["width"]
        self.first = nn.Linear(sum(dims[name] for name in self.only), width)
        self.norm = nn.BatchNorm1d(width) if overrides["norm"] else nn.Identity()
        self.drop = nn.Dropout(overrides["dropout"])
        self.last = nn.Linear(width, 1)

    def loss(self, batch: Any) -> Tensor:
        rows = self.embeddings(batch.sparse)
        hidden = self.norm(self.first(torch.cat([rows[name] for name in self.only], 1)))
        logits = self.last(self.drop(torch.relu(hidden))).squeeze(1)
        if self.noise:
            logits = logits + self.noise * torch.rand(())
        if self.nan == int(self.batches):
            logits = logits / torch.zeros(())
        self.batches += 1
        return binary_cross_entropy_with_logits(logits, batch.labels)


def make(variant: Any, embeddings: Any = None) -> tuple[Any, torch.optim.Optimizer]:
    model = Net(embeddings or variant.embeddings, variant.overrides)
    return model, torch.optim.Adam(
        [p for name, p in model.named_parameters() if "anchor" not in name], lr=variant.overrides["dense_lr"]
    )


@dataclass
class Left:
    losses: list[float] = field(default_factory=list)
    dense: list[bytes] = field(default_factory=list)
    """Dense state after each batch."""
    rows: dict[int, np.ndarray] = field(default_factory=dict)

    def note(self, model: nn.Module, loss: float) -> None:
        state = [t for name, t in model.state_dict().items() if isinstance(t, Tensor) and "embeddings" not in name]
        self.losses.append(loss)
        self.dense.append(b"".join(t.numpy().tobytes() for t in state))

    def compare(self, other: "Left", what: str, by_hand: int = 0) -> None:
        same_bits(f"{what}: losses", np.array(self.losses), np.array(other.losses))
        assert self.dense == other.dense, f"{what}: dense weights differ"
        keys = [key for key in sorted(self.rows) if key in other.rows or key >= by_hand]
        same_bits(f"{what}: keys", np.array(keys), np.array(sorted(other.rows)))
        for key, row in sorted(other.rows.items()):
            same_bits(f"{what}: row {key}", self.rows[key], row)


def batches_of(case: Case) -> list[Any]:
    """Return ids that crowd together, so that rows leave the caches and return; one row is in all batches."""
    rng = np.random.default_rng(case.seed)
    names = [name for table in TABLES for name in table.features]
    rows = [table.rows for table in TABLES for _ in table.features]
    found = []
    for _ in range(case.steps * case.accumulate):
        lengths = rng.integers(0, 3, (len(names), BATCH))
        pools = [np.unique(rng.integers(0, min(n, 24), size)) * (n // 40) for n, size in zip(rows, lengths.sum(1))]
        values = [rng.choice(pool, size) if size else pool for pool, size in zip(pools, lengths.sum(1))]
        sparse = skirl.KeyedJagged(
            names,
            torch.from_numpy(np.concatenate(values).astype(np.int64)),
            lengths=torch.from_numpy(lengths.reshape(-1)),
        )
        labels = torch.from_numpy(rng.integers(0, 2, BATCH).astype(np.float32))
        found.append(skirl.Batch(torch.zeros(BATCH, 0), sparse, labels))
    return found


class Kept(MemoryStore):
    """A store that sleeps, and can still be read once it is closed."""

    def __init__(self, layout: Any, nap: float, seed: int) -> None:
        super().__init__(layout)
        self._nap, self._rng = nap, np.random.default_rng(seed)

    def _read(self, kind: int, keys: Any, out: Any, found: Any) -> None:
        time.sleep(self._nap * self._rng.random())
        super()._read(kind, keys, out, found)

    def _write(self, kind: int, keys: Any, rows: Any) -> None:
        time.sleep(self._nap * self._rng.random())
        super()._write(kind, keys, rows)


def tables_of(of: Of) -> list[Table]:
    tables = [replace(table, dim=of.dim or table.dim, init=of.init or table.init) for table in TABLES]
    if of.warm:
        a, b, c = tables
        return [a, replace(b, init=np.arange(b.rows * b.dim, dtype=np.float32).reshape(b.rows, b.dim) / 99), c]
    return tables


def rules_of(of: Of) -> list[Any]:
    groups = Groups(tables_of(of), of.rule)
    return [replace(groups[t], lr=of.lr) for t in range(len(TABLES))]


def store_of(case: Case) -> Any:
    return (
        f"disk:{case.folder}/rows" if case.kind == "disk" else lambda records, rows: Kept(records, case.nap, case.seed)
    )


def rows_of(embeddings: Any) -> dict[int, np.ndarray]:
    """Return the rows of a variant that were ever used, with their states."""
    embeddings.flush()
    engine, pack = embeddings.engine, embeddings.pack
    found = {}
    for keys in engine.store.held():
        for bank, part in enumerate(engine.by_bank(keys)):
            rows = peek(engine, part, bank, pack.number)
            found |= {key: row.copy() for key, row in zip(part.tolist(), rows, strict=True)}
    return found


def train(case: Case, sweep: skirl.Sweep, batch: Any) -> None:
    if not case.own_loop:
        sweep.step(batch)
        return
    for variant in sweep:
        loss = variant.model.loss(batch)
        loss.backward()
        variant.step(loss)


def in_sweep(case: Case, made: Any = make) -> tuple[list[Left], skirl.Sweep]:
    """Train all variants in a sweep. Return what each leaves, and the sweep."""
    torch.manual_seed(99)  # the loop's own draws belong to no variant
    others: list[float] = []
    left = {f"v{n}": Left() for n in range(len(case.variants))}
    end: dict[str, dict[int, np.ndarray]] = {}
    sweep: Any = None
    saved = False
    if case.killed is None:
        sweep, saved = _part(case, made, left, end, others, case.resumed, resume=False)
    elif (told := _killed(case, made, left, end, others)) is not None:
        (left, end, others), saved = told, True
    else:  # all had diverged before it was saved
        for rows in case.folder.iterdir():
            shutil.rmtree(rows)
        sweep, _ = _part(case, made, left, end, others, None, resume=False)
    if saved:
        torch.rand(3)
        sweep, _ = _part(case, made, left, end, others, None, resume=True)
    torch.manual_seed(99)
    assert others == [float(torch.rand(())) for _ in others], "the loop's own draws were touched"
    for name, rows in end.items():
        left[name].rows = rows
    return [*left.values()], sweep


def _killed(
    case: Case, made: Any, left: dict[str, Left], end: dict[str, Any], others: list[float]
) -> tuple[Any, Any, Any] | None:
    """Train in a process that is killed. Return what it had left when it was last saved; None if it never was."""

    def child(begins: Callable[[], object]) -> None:
        begins()
        _part(case, made, left, end, others, case.resumed, resume=False)
        if (case.folder / "saved" / HEADER).is_file():  # it ended before the moment to be killed at
            os.kill(os.getpid(), signal.SIGKILL)

    code = ended(*forked(child))
    if not (case.folder / "saved" / HEADER).is_file():
        assert code == 0
        return None
    assert code == -signal.SIGKILL
    return pickle.loads((case.folder / f"told-{_step(case)}").read_bytes())


def _step(case: Case) -> int:
    return json.loads((case.folder / "saved" / HEADER).read_bytes())["step"]


def _save_and_kill(case: Case, sweep: skirl.Sweep, told: Any) -> None:
    """Save again, and be killed before all of that is on disk, or before its header is."""
    assert sweep.lookahead is not None
    (case.folder / f"told-{sweep.lookahead.step}").write_bytes(pickle.dumps(told))
    if case.killed == "all":
        checkpoint.put_whole = kill  # type: ignore[assignment]
    else:
        sweep.racing[-1].turn = kill  # type: ignore[method-assign]
    sweep.save(case.folder / "saved")


def _part(
    case: Case,
    made: Any,
    left: dict[str, Left],
    end: dict[str, Any],
    others: list[float],
    until: int | None,
    *,
    resume: bool,
) -> tuple[skirl.Sweep, bool]:
    """Train to the end, or up to a batch after which all is saved and closed. Return the sweep, and whether it was saved."""
    of = dict(zip(left, case.variants, strict=True))
    sweep = skirl.Sweep(
        made, [skirl.Variant(name, of[name].overrides | {"name": name}) for name in of], TABLES, cache=case.slots,
        store=store_of(case), resume=resume, device=case.device,
    )  # fmt: skip
    leave, begin = sweep._leave, 0

    def leave_and_read(contender: Any, why: str) -> None:
        end[contender.name] = rows_of(contender.embeddings)
        leave(contender, why)

    ahead = {"depth": case.depth, "prefetch": case.prefetch, "accumulate": case.accumulate}
    with sweep, skirl.lookahead(batches_of(case), sweep, **ahead) as batches:
        if resume:
            sweep.load(case.folder / "saved")
            begin = _step(case)
            assert case.resumed is not None and begin == batches.step > case.resumed
        sweep._leave = leave_and_read  # type: ignore[method-assign]
        for number, batch in enumerate(batches, start=begin):
            others.append(float(torch.rand(())))
            after = until is not None and number == until + 1
            if after and case.killed == "trains":  # when the last one has had its backward
                sweep.racing[-1].step = kill  # type: ignore[method-assign]
            racing, models, over = sweep.racing, {variant.name: variant.model for variant in sweep.racing}, False
            try:
                train(case, sweep, batch)
            except Diverged:
                over = True
            for variant in racing:
                left[variant.name].note(models[variant.name], variant.loss)  # type: ignore[arg-type]
                if of[variant.name].dropped == number and variant.left is None and len(sweep) > 1:
                    sweep.drop(variant.name)
            if over:
                break
            if after and case.killed is not None:
                _save_and_kill(case, sweep, (left, end, others))
            if number == until:
                sweep.save(case.folder / "saved")
                if case.killed is None:
                    return sweep, True
                (case.folder / f"told-{batches.step}").write_bytes(pickle.dumps((left, end, others)))
        batches.close()
        for variant in sweep.racing:
            end[variant.name] = rows_of(variant.embeddings)
    return sweep, False


def alone(case: Case, of: Of, steps: int, *, plain: bool, made: Any = make) -> Left:
    """Train one variant alone, over its own embeddings or the plain reference, and return what it leaves."""
    found, reference = Left(), Reference(tables_of(of), rules_of(of), seed=of.seed)
    names = [table.name for table in TABLES]
    embeddings: Any = PlainRules(reference)
    if not plain:
        embeddings = skirl.EmbeddingBagCollection(
            tables_of(of), optimizer=dict(zip(names, rules_of(of))), cache=case.slots, seed=of.seed
        )
    torch.manual_seed(of.seed)
    model, dense = made(SimpleNamespace(embeddings=embeddings, overrides=of.overrides))

    def train(batches: Iterable[Any]) -> None:
        for number, batch in enumerate(batches):
            loss = model.loss(batch)
            loss.backward()
            if (number + 1) % case.accumulate == 0:
                dense.step()
                dense.zero_grad()
            found.note(model, float(loss.detach()))

    batches = batches_of(case)[:steps]
    if plain:
        train(batches)
        found.rows = dict(reference.rows)
        return found
    with skirl.lookahead(batches, model, accumulate=case.accumulate) as ahead:
        train(ahead)
    embeddings.flush()
    found.rows = stored_rows(embeddings.engine)
    return found


class PlainRules(PlainEmbeddings):
    """Uses a reference whose tables have different optimizers."""

    def __init__(self, reference: Reference) -> None:
        super().__init__(Reference(reference.tables, SGD()))
        self.reference = reference
        self.optimizer: Any = SimpleNamespace(param_groups=[{"lr": None}])


def check(case: Case, *, plain: bool = True, made: Any = make) -> skirl.Sweep:
    """Check that every variant leaves what it leaves alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours, sweep = in_sweep(case, made)
        for number, (of, found) in enumerate(zip(case.variants, ours, strict=True)):
            steps = len(found.losses)
            assert of.nan is None or steps <= of.nan + 1, f"variant {number} was trained after it had diverged"
            if of.nan is None and of.dropped is None:
                assert steps == case.steps * case.accumulate or any(v.nan is not None for v in case.variants)
            for reference in (False, True) if plain and case.accumulate == 1 else (False,):
                lone = alone(case, of, steps, plain=reference, made=made)
                found.compare(lone, f"variant {number}, {'plain' if reference else 'alone'}", case.by_hand)
        return sweep
    finally:
        torch.set_num_threads(threads)
