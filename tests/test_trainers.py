"""Several trainers of one job: they have the bits of one process, whatever their number and whatever is late."""

import itertools
import random
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import skirl
from skirl import SGD, Adam
from skirl.checkpoint.folder import numbers as numbers_of
from skirl.core.tree import block_of
from skirl.engine.window import Window
from skirl.peers.base import ON_DEVICE, Alone
from skirl.peers.job import using
from skirl.store import Record
from skirl.store.disk.store import DiskStore
from tests.cases import cases
from tests.engine.device.lazy import World
from tests.pipeline import test_shards as one
from tests.streams import stored_rows
from tests.threads_as_trainers import InProcess


@dataclass
class Case(one.Case):
    trainers: int = 2
    slow: float = 0.0
    """Most seconds that a call to other trainers is delayed."""
    timeout: float = 20.0
    device: str = "cpu"
    prefetch: int = 2
    hook: Any = None
    """Called before each call to other trainers."""
    placement: dict[str, int | dict[int, int]] | None = None
    looks: int = 0
    """Steps between two evaluations of rows; 0: none."""
    fetched: list[int] = field(default_factory=list)
    """After a run, for each trainer: the number of rows that left its cache and came back."""


def of_rank(case, peers, folder=None, until=None, store="memory"):
    """Train one trainer by the README's loop. Return its losses, dense weights and owned rows."""
    mine = block_of(peers.rank, peers.size, case.shards)
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # a GPU has one thread for the backwards of all trainers
    with using(peers):
        embeddings = skirl.EmbeddingBagCollection(
            one.TABLES, optimizer=case.optimizer, cache=case.cache, seed=7, dtype=case.dtype, store=store,
            device=case.device, placement=case.placement, resume=folder is not None,
        )  # fmt: skip
    model = one.Model(embeddings, case.dtype, dropout=0.0)
    dense, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    all_batches, lost, rare = case.data()
    numbers = [
        step * case.micros + shard * case.accumulate + i
        for step in range(case.steps)
        for shard in mine
        for i in range(case.accumulate)
    ]
    loader = [all_batches[i] for i in numbers]
    ahead = {"shards": case.shards, "accumulate": case.accumulate, "depth": case.depth, "prefetch": case.prefetch}
    with skirl.lookahead(loader, model, **ahead) as batches:
        if folder is not None and numbers_of(folder):
            skirl.load(folder, model=model, optimizers=[dense], data=batches)
            numbers = numbers[batches.step * batches.micros :]
        for i, batch in zip(numbers, batches, strict=until is None):
            loss = model.loss(batch, rare[i])
            losses.append((i, loss.item()))
            if not lost[i]:
                loss.backward()
            if batches.ends_step:
                batches.reduce()
                if case.clip:
                    nn.utils.clip_grad_norm_([model.first, model.second], 0.05)
                dense.step()
                dense.zero_grad()
                if case.looks and batches.step % case.looks == 0:  # looks at rows, as evaluation does
                    with torch.no_grad():
                        model.embeddings.eval()(batch.sparse)
                        model.embeddings.train()
                if until is not None and batches.step == until:
                    skirl.save(folder, model=model, optimizers=[dense], data=batches)
                    break
    embeddings.flush()
    case.fetched.append(embeddings.engine.counters.fetched)
    columns = {t: embeddings.pack.columns[b] for b, of in enumerate(embeddings.pack.schema.banks) for t in of.tables}
    rows = {key: (columns[key >> 48], row) for key, row in stored_rows(embeddings.engine).items()}
    embeddings.close()
    return losses, [w.detach() for w in (model.first, model.second, model.rare)], rows


def joined(found):
    """Return all rows of all trainers, with the columns of a row one after the other."""
    rows = {}
    for key in {key for _, _, owned in found for key in owned}:
        parts = sorted((owned[key] for _, _, owned in found if key in owned), key=lambda part: part[0].first)
        begins = np.cumsum([0, *(columns.dim for columns, _ in parts)]).tolist()
        assert [columns.first for columns, _ in parts] == begins[:-1], "two trainers own one number"
        row = parts[0][1]
        if len(parts) > 1:
            assert begins[-1] == one.TABLES[key >> 48].dim
            row = np.concatenate([own.reshape(-1, columns.dim) for columns, own in parts], axis=1).reshape(-1)
        rows[key] = row
    return rows


def together(case):
    """Train all trainers in threads. Return their losses in the order of one process, and all their rows."""
    naps = random.Random(case.seed)
    lock = threading.Lock()

    def nap(rank, doing):
        with lock:
            seconds = naps.random() * case.slow
        time.sleep(seconds)

    found = InProcess.run(
        case.trainers, lambda peers: of_rank(case, peers), hook=nap if case.slow else case.hook, timeout=case.timeout
    )
    losses = [loss for _, loss in sorted(pair for each, _, _ in found for pair in each)]
    for _, weights, _ in found[1:]:
        for a, b in zip(found[0][1], weights, strict=True):
            assert torch.equal(a, b)
    return losses, found[0][1], joined(found)


def check(case, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(one, "Model", lambda *given, Model=one.Model: Model(*given, dropout=0.0))
        expected = one.in_plain_python(case)
    one.check_equal(together(case), expected)


def draw_case(draw):
    trainers = draw(st.integers(1, 8))
    least = (trainers - 1).bit_length()
    universe, optimizer = draw(st.sampled_from([12, 50])), draw(st.sampled_from(one.OPTIMIZERS))
    return Case(
        trainers=trainers,
        shards=1 << draw(st.integers(least, max(least, 2 if trainers < 5 else 4))),
        accumulate=draw(st.sampled_from([1, 1, 2, 3])),
        optimizer=optimizer,
        universe=universe,
        cache=draw(st.sampled_from([40, 60] if universe == 12 else [100, 130])),
        depth=draw(st.sampled_from([1, 20, "auto", "epoch"])),
        seed=draw(st.integers(0, 999)),
        steps=draw(st.integers(1, 5)),
        lost=draw(st.sampled_from([0.0, 0.0, 0.3, 0.9])),
        clip=draw(st.booleans()),
        slow=draw(st.sampled_from([0.0, 0.003])),
        prefetch=draw(st.sampled_from([0, 1, 2, 2])),
        looks=draw(st.sampled_from([0, 0, 2, 3])),
        placement=placed(*(draw(st.integers(0, 3 * trainers)) for _ in "abc"), trainers=trainers, optimizer=optimizer),
    )


def placed(*owners, trainers, optimizer):
    """Return the trainer that looks each table up for all. A number that no trainer has means two that share its columns,
    if the optimizer allows that, and by rows from twice the number of trainers on."""
    found = {table: owner for table, owner in zip("abc", owners) if owner < trainers}
    if optimizer.by_number and trainers > 1:
        for table, owner in zip("ab", owners):
            if trainers <= owner < 2 * trainers:
                found[table] = {owner - trainers: 2, (owner + 1) % trainers: 2}
    return found


@cases(24)
@given(data=st.data())
def test_any_number_of_trainers_gives_the_bits_of_the_plain_reference(data):
    with pytest.MonkeyPatch.context() as patch:
        check(draw_case(data.draw), patch)


RETURNING = [
    Case(trainers=2, shards=2, universe=50, cache=36, steps=12, optimizer=Adam(lr=0.05)),
    Case(trainers=3, shards=4, universe=50, cache=31, steps=8, depth=1, optimizer=SGD(lr=0.1, momentum=0.9), seed=2),
]
"""Owners' caches are smaller than the rows they own, so that rows come and go."""


@pytest.mark.parametrize("case", RETURNING, ids=lambda case: f"{case.trainers} trainers")
def test_rows_that_leave_and_return(case, monkeypatch):
    check(case, monkeypatch)
    assert any(case.fetched)


@pytest.mark.parametrize("depth", [1, "auto"])
def test_caches_that_are_split_anew(depth, monkeypatch):
    anew, begin_anew = [], Window.begin_anew
    monkeypatch.setattr(Window, "begin_anew", lambda window: (anew.append(window), begin_anew(window)))
    check(Case(shards=2, universe=50, cache=30, steps=20, depth=depth, seed=3, optimizer=SGD(lr=0.1)), monkeypatch)
    assert len(anew) > 1


CUTS = {"a": {2: 2, 0: 2}, "b": {0: 2, 1: 2}}
ALL = {"a": {0: 2, 1: 2}, "b": {1: 2, 0: 2}, "c": {0: 2}}


@pytest.mark.parametrize("optimizer", [o for o in one.OPTIMIZERS if o.by_number], ids=lambda o: o.name)
def test_tables_cut_by_columns(optimizer, monkeypatch):
    check(Case(trainers=3, shards=4, cache=70, steps=6, optimizer=optimizer, placement=CUTS, looks=2), monkeypatch)


def test_columns_begin_from_those_of_an_array(monkeypatch):
    array = np.random.default_rng(0).random((50, 4), dtype=np.float32)
    monkeypatch.setattr(one, "TABLES", [replace(one.TABLES[0], init=array), *one.TABLES[1:]])
    check(Case(trainers=3, shards=4, cache=70, steps=6, optimizer=SGD(lr=0.1), placement=CUTS, looks=2), monkeypatch)


@pytest.mark.parametrize(
    ("placement", "optimizer", "says"),
    [
        (
            {"a": {0: 2, 1: 2}},
            skirl.RowwiseAdagrad(lr=0.1),
            r"RowwiseAdagrad trains a row as one, so bits would differ: .* adagrad",
        ),
        ({"a": {0: 2, 1: 2}}, SGD(lr=0.1, clip=1.0), r"its clip bounds a row as one, .* or leave clip out"),
        ({"a": {0: 1, 1: 3}}, SGD(), r"of \[1, 3\], and its dim is 4: give each but the last an even number"),
        ({"a": {0: 2, 1: 4}}, SGD(), r"of \[2, 4\], and its dim is 4"),
        ({"a": {0: 2, 2: 2}}, SGD(), r"table 'a' at trainer {0: 2, 2: 2} of 2"),
        ({"a": 2}, SGD(), "has table 'a' at trainer 2 of 2"),
        ({"d": 0}, SGD(), "has table 'd', and the tables are a, b, c"),
        *(
            ({"a": of}, SGD(), r"placement of table 'a' is .*: set it to a trainer's number, or to trainers and")
            for of in ({0: 4.0}, {"0": 4}, [0, 1], 1.5)
        ),
    ],
)
def test_a_placement_that_would_change_bits_or_is_none_is_refused(placement, optimizer, says):
    with pytest.raises((ValueError, TypeError), match=says):
        InProcess.run(2, partial(of_rank, Case(placement=placement, optimizer=optimizer)))


def test_columns_in_another_order_than_those_of_a_store_are_refused(tmp_path):
    def made(peers, placement, resume=False):
        layout = {0: Record(2), 1: Record(4), 2: Record(2)}
        store = DiskStore(tmp_path / str(peers.rank), layout, rows={0: 50, 1: 30, 2: 20})
        with using(peers):
            return skirl.EmbeddingBagCollection(
                one.TABLES, optimizer=SGD(lr=0.1), cache=70, placement=placement, resume=resume, store=store
            )

    def work(peers):
        rows = made(peers, {"a": {0: 2, np.int64(1): 2}})
        rows.set_rows("a", [3], torch.ones(1, 4))
        rows.close()
        with pytest.raises(ValueError, match=r"columns 0 to 2.*columns 2 to 4|columns 2 to 4.*columns 0 to 2"):
            made(peers, {"a": {1: 2, 0: 2}}, resume=True)

    InProcess.run(2, work)


def test_a_folder_of_rows_goes_on_under_another_cut(tmp_path):
    """A run that is killed and comes back as more or fewer trainers has a store on disk with other records."""
    case = Case(shards=4, steps=8, cache=70, optimizer=skirl.Adagrad(lr=0.1))
    stages = [(3, CUTS), (2, {"a": {1: 2, 0: 2}}), (3, {"a": 2, "b": {0: 2, 1: 2}}), (3, CUTS)]
    go_on(case, stages, tmp_path / "saved", lambda: f"disk:{tmp_path / 'rows'}")


ON_GPU = [
    Case(trainers=3, shards=4, universe=50, cache=31, steps=4, depth=1, device="interpret"),
    pytest.param(
        Case(trainers=2, shards=4, accumulate=2, steps=6, lost=0.3, looks=2, clip=True, device="interpret"),
        marks=pytest.mark.slow,
    ),
]


class Issued:
    """What each trainer's loop issues to the others for a device, in order: one list for each thread that made streams."""

    def __init__(self) -> None:
        self.of: dict[int, list[str]] = {}
        self.elsewhere: list[str] = []
        """Calls from other threads."""

    def noted(self, streams: Any) -> Any:
        self.of.setdefault(threading.get_ident(), [])
        return streams

    def call(self, rank: int, doing: str) -> None:
        if any(doing.startswith(f"channel {name}, ") for name in ON_DEVICE):
            self.of.get(threading.get_ident(), self.elsewhere).append(doing)

    def check(self) -> None:
        first, *others = self.of.values()
        assert others and first and all(each == first for each in others), self.of
        assert not self.elsewhere


@pytest.mark.parametrize("case", ON_GPU, ids=["with several sums of one", "with several micro-batches"])
@pytest.mark.parametrize("eager", [0.0, pytest.param(0.4, marks=pytest.mark.slow)])
def test_the_kernels_and_streams_of_a_gpu(case, eager, monkeypatch):
    """Streams run as late and in as odd an order as the events between them allow."""
    seeds, issued = itertools.count(), Issued()
    monkeypatch.setattr("skirl.engine.device.gpu.Streams", lambda: issued.noted(World(next(seeds), eager).streams()))
    case.hook = issued.call
    check(case, monkeypatch)
    assert any(case.fetched) or case.trainers == 2
    issued.check()


@pytest.mark.parametrize("shards", [4, 8])
def test_a_trainer_without_any_gradient_of_a_bank(shards, monkeypatch):
    check(Case(trainers=3, shards=shards, universe=50, cache=130, steps=4, lost=0.9), monkeypatch)


def test_doubles_and_weights_of_ids(monkeypatch):
    check(Case(trainers=3, dtype=torch.float64, depth="auto", seed=5), monkeypatch)


def asked_by_id(peers, state: Any = "keep", wrong=""):
    """Return the rows that each trainer asks for before, in and after a loop, and all rows at its end."""
    size, mine = max(peers.size, 2), peers.rank
    ranks = [mine] if peers.size > 1 else range(size)
    ids = {rank: np.random.default_rng(rank).integers(0, 50, 7 + 9 * rank) for rank in range(size)}
    new = np.random.default_rng(9).random((5, 4), dtype=np.float32)
    with using(peers):
        embeddings = skirl.EmbeddingBagCollection(one.TABLES, optimizer=skirl.Adagrad(lr=0.1), cache=70, seed=7)
    model = one.Model(embeddings, dropout=0.0)
    data, found = one.draw(3, 8), []

    def ask(table, among=50):
        each = {rank: ids[rank] % among for rank in range(size)}
        if peers.size > 1:
            if wrong == "step" and mine and len(found) == 2:
                table, each = "c", {mine: [1]}
            found.append({mine: embeddings.rows(table, each[mine])})
        else:
            found.append({rank: embeddings.rows(table, each[rank]) for rank in ranks})

    ask("a")
    for _ in range(2):
        with skirl.lookahead([data[4 * s + v] for s in range(2) for v in block_of(peers.rank, peers.size, 4)],
                             model, shards=4) as batches:  # fmt: skip
            for batch in batches:
                model.loss(batch).backward()
                if batches.ends_step:
                    ask("a")
                    model.zero_grad()
        values = torch.from_numpy(new) + (mine if wrong == "values" else 0)
        embeddings.set_rows("a", [3, 40, 2, 1, 8], values, state=state)
        skirl.import_rows(embeddings, {"b.weight": torch.arange(120.0).view(30, 4)})
        ask("a")
        ask("b", among=30)
    embeddings.flush()
    return found, stored_rows(embeddings.engine)


@pytest.mark.parametrize(("trainers", "state"), [(2, "keep"), (3, "reset")])
def test_rows_by_id_are_those_of_one_process(trainers, state, monkeypatch):
    monkeypatch.setattr("skirl.engine.access.PIECE", 5)  # some need more pieces than others
    monkeypatch.setattr("skirl.checkpoint.import_rows.PIECE", 7)
    expected, rows = asked_by_id(Alone(), state)
    found = InProcess.run(trainers, partial(asked_by_id, state=state))
    owned = {key: row for _, each in found for key, row in each.items()}
    one.check_equal(([], [], owned), ([], [], rows))
    for rank, (asked, each) in enumerate(found):
        assert each and len(each) < len(rows)
        for ours, theirs in zip(asked, expected, strict=True):
            assert rank > 1 or torch.equal(ours[rank], theirs[rank])


def scaled(peers, apart=0):
    """Train with a GradScaler and let a shard's dense gradients or its rows overflow."""
    mine = block_of(peers.rank, peers.size, 4)
    with using(peers):
        rows = skirl.EmbeddingBagCollection(one.TABLES, optimizer=Adam(lr=0.05), cache=80, seed=7)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0 + apart * peers.rank, growth_interval=2)
    rows.grad_scaler = scaler
    model = one.Model(rows, dropout=0.0)
    dense, data, found = torch.optim.Adam(model.parameters(), lr=0.01), one.draw(5, 32), []
    numbers = [4 * step + shard for step in range(8) for shard in mine]
    with skirl.lookahead([data[n] for n in numbers], model, shards=4, depth=3) as batches:
        for n, batch in zip(numbers, batches, strict=True):
            loss = model.loss(batch, rare=False)
            if n in (9, 22):  # in the third step and the sixth
                loss = loss + (rows(batch.sparse)["b"] if n == 9 else model.second).sum() * torch.inf
            scaler.scale(loss).backward()
            if batches.ends_step:
                scaler.step(dense)
                scaler.step(rows.optimizer)
                scaler.update()
                dense.zero_grad()
                found.append((scaler.get_scale(), *(w.detach().clone() for w in (model.first, model.second))))
    rows.flush()
    return found, stored_rows(rows.engine), rows.engine.packs[0].steps.tolist()


def test_a_step_that_overflows_on_one_trainer_is_skipped_by_all():
    expected, rows, steps = scaled(Alone())
    assert [scale for scale, *_ in expected] == [256, 512, 256, 256, 512, 256, 256, 512] and steps == [7, 7, 7]
    every = {}
    for found, owned, counted in InProcess.run(3, scaled):
        every |= owned
        assert counted == steps
        for ours, theirs in zip(found, expected, strict=True):
            assert ours[0] == theirs[0] and all(map(torch.equal, ours[1:], theirs[1:]))
    one.check_equal(([], [], every), ([], [], rows))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("step", "rank 0 reads rows of table 'a' after 2 steps, and rank 1 reads rows of table 'c' after 2 steps"),
        ("values", r"rank 0 sets rows of table 'a' \(digest \w+ .*set_rows\(\) with the same ids and values"),
    ],
)
def test_trainers_that_ask_for_other_things_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        InProcess.run(2, partial(asked_by_id, wrong=wrong))


def test_an_export_of_some_rows_as_all_is_refused(tmp_path):
    def work(peers):
        with using(peers):
            skirl.export(
                skirl.EmbeddingBagCollection(one.TABLES, optimizer=SGD(lr=0.1), cache=9), tmp_path / "a.safetensors"
            )

    with pytest.raises(ValueError, match="an export works with one trainer only, and 2 trainers share these rows"):
        InProcess.run(2, work)


def go_on(case, stages, folder, store):
    """Train two steps with each number of trainers and placement, from checkpoint to checkpoint, and check the bits."""
    losses, found = [], []
    for stage, (trainers, case.placement) in enumerate(stages, start=1):
        until = None if stage == len(stages) else 2 * stage
        found = InProcess.run(trainers, partial(of_rank, case, folder=folder, until=until, store=store()))
        losses += [loss for _, loss in sorted(pair for each, _, _ in found for pair in each)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "Model", lambda *given, Model=one.Model: Model(*given, dropout=0.0))
        one.check_equal((losses, found[0][1], joined(found)), one.in_plain_python(case))


@cases(12)
@given(seed=st.integers(0, 99), numbers=st.lists(st.integers(1, 4), min_size=2, max_size=4), on_disk=st.booleans())
def test_a_run_that_goes_on_with_other_numbers_of_trainers_and_placements(seed, numbers, on_disk, tmp_path_factory):
    case = Case(seed=seed, shards=4, steps=2 * len(numbers), optimizer=one.OPTIMIZERS[seed % 5], depth="auto")
    stages = [
        (n, placed((seed + stage) % 7, 3 * stage % 5, seed % 4, trainers=n, optimizer=case.optimizer))
        for stage, n in enumerate(numbers)
    ]
    store = lambda: f"disk:{tmp_path_factory.mktemp('rows')}" if on_disk else "memory"  # noqa: E731
    go_on(case, stages, tmp_path_factory.mktemp("run"), store)


@pytest.mark.parametrize("kind", [pytest.param("memory", marks=pytest.mark.slow), "disk"])
def test_columns_are_put_together_and_cut_anew(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("skirl.checkpoint.rows.MOST", 200)
    stages = [
        (3, CUTS),
        (3, CUTS),
        (2, {"a": {1: 2, 0: 2}, "b": 1}),
        (1, None),
        (4, {"a": 3, "b": {3: 2, 0: 2}}),
        (3, ALL),
        (1, None),
        (2, ALL),
    ]
    folders = itertools.count()
    store = lambda: "memory" if kind == "memory" else f"disk:{tmp_path / str(next(folders))}"  # noqa: E731
    case = Case(shards=4, steps=2 * len(stages), cache=70, optimizer=skirl.Adagrad(lr=0.1))
    go_on(case, stages, tmp_path / "saved", store)
    assert not [*(tmp_path / "saved").glob("reading-*")], "nothing is left behind"


@pytest.mark.parametrize("placement", [None, {"a": 2, "c": 0}, CUTS], ids=["rows", "whole", "columns"])
def test_trainers_take_the_rows_of_a_checkpoint_wherever_these_live(placement, tmp_path):
    def made(placement=None):
        return skirl.EmbeddingBagCollection(
            one.TABLES, optimizer=skirl.Adagrad(lr=0.1), cache=70, seed=7, placement=placement
        )

    def work(peers):
        with using(peers):
            rows = made(placement)
            taken = skirl.import_rows(rows, tmp_path)
            found = rows.eval()(every)
            rows.set_rows("a", [7, 3], torch.arange(8.0).reshape(2, 4))
            return taken, rows.engine.touched, found["x"], found["b"], rows.rows("a", [3, 7])

    trained = made()
    every = skirl.KeyedJagged.one_hot(one.FEATURES, torch.arange(20)[:, None].repeat(1, 4))
    sum(out.sum() for out in trained(every).values()).backward()
    skirl.save(tmp_path, model=trained)
    of_trainers = InProcess.run(3, work)
    assert sum(touched for _, touched, *_ in of_trainers) == trained.engine.touched == 60
    for taken, _, x, b, new in of_trainers:
        assert taken == {"a": 20, "b": 20, "c": 20}
        assert new.tolist() == [[4.0, 5.0, 6.0, 7.0], [0.0, 1.0, 2.0, 3.0]]
        assert torch.equal(x, trained.eval()(every)["x"]) and torch.equal(b, trained.eval()(every)["b"])
