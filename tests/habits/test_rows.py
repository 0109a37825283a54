"""Rows by their ids, and initial values from arrays and files: PyTorch's `weight[ids]`, `weight[ids] = values` and
`from_pretrained`.

All numbers are small multiples of 1/8 and the rate is 1/2, so that sums are exact in any order, and bits can be compared.
"""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import skirl
from tests.streams import jagged

ROWS, DIM = 20, 4
EIGHTHS = torch.randint(-40, 40, (ROWS, DIM), generator=torch.Generator().manual_seed(1)) / 8


def batches(count: int = 12, seed: int = 0) -> list[skirl.KeyedJagged]:
    rng = np.random.default_rng(seed)
    return [jagged(rng, {"item": ROWS}, 2, most=2) for _ in range(count)]


def collection(
    tmp_path: Path, store: str = "memory", cache: int = 4, init: Any = EIGHTHS, **options: Any
) -> skirl.EmbeddingBagCollection:
    options.setdefault("optimizer", skirl.SGD(lr=0.5))
    where = f"disk:{tmp_path}/rows" if store == "disk" else store
    return skirl.EmbeddingBagCollection(
        [skirl.Table("item", ROWS, DIM, init=init)], cache=cache, store=where, **options
    )


FACTORS = torch.tensor([1.0, 2.0, -1.0, 3.0])


def train(embeddings: Any, ids: skirl.KeyedJagged) -> None:
    (embeddings(ids)["item"] * FACTORS).sum().backward()


class Plain:
    def __init__(self, weight: Tensor = EIGHTHS) -> None:
        self.bag = nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, mode="sum", include_last_offset=True)
        self.optimizer = torch.optim.SGD(self.bag.parameters(), lr=0.5)

    def train(self, ids: skirl.KeyedJagged) -> None:
        (self.bag(ids.values(), ids.offsets()) * FACTORS).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weight(self) -> Tensor:
        return self.bag.weight.detach()


@pytest.fixture(params=[(4, "memory"), (7, "disk"), (ROWS, "memory")], ids=lambda p: f"{p[0]}-{p[1]}")
def made(request: Any, tmp_path: Path) -> Iterator[Callable[..., skirl.EmbeddingBagCollection]]:
    """Return a function that makes collections, for several cache sizes and each store."""
    cache, store = request.param
    yield lambda **options: collection(tmp_path, store, cache, **options)


# weight[ids]


def test_weight_of_ids_is_as_after_each_step_of_a_lookahead_and_moves_nothing(made: Any) -> None:
    embeddings, plain = made(), Plain()
    ids = torch.tensor([4, 0, 4, 19, 7, 7])
    with skirl.lookahead(batches(), embeddings, sparse=lambda batch: batch) as loop:
        for batch in loop:
            out = embeddings(batch)["item"]
            assert torch.equal(embeddings.rows("item", ids), plain.weight[ids])  # before its backward
            (out * FACTORS).sum().backward()
            plain.train(batch)
            resident = embeddings.engine.caches[0].resident()
            moved = vars(embeddings.engine.counters).copy()
            assert torch.equal(embeddings.rows("item", ids), plain.weight[ids])
            after = embeddings.engine.caches[0].resident()
            assert np.array_equal(resident.keys, after.keys) and vars(embeddings.engine.counters) == moved
    assert torch.equal(embeddings.rows("item", range(ROWS)), plain.weight)


def test_weight_of_a_row_that_was_never_used_is_its_initial_value(tmp_path: Path) -> None:
    embeddings = collection(tmp_path, init=skirl.Normal(), seed=3)
    train(embeddings, batches()[0])
    fresh = collection(tmp_path, init=skirl.Normal(), seed=3)
    used = set(batches()[0].values().tolist())
    never = [row for row in range(ROWS) if row not in used]
    assert torch.equal(embeddings.rows("item", never), fresh.rows("item", never))
    assert fresh.rows("item", []).shape == (0, DIM)
    assert len(fresh.engine.store) == 0 and not fresh.engine.seen.bits.any()


# weight[ids] = values


def test_writing_weight_of_ids_before_between_and_after_lookaheads(made: Any) -> None:
    embeddings, plain = made(), Plain()
    ids, some = torch.tensor([11, 2, 5]), torch.arange(12).view(3, 4) / 8
    embeddings.set_rows("item", ids, some)
    plain.bag.weight.data[ids] = some
    for seed in (1, 2):
        with skirl.lookahead(batches(seed=seed), embeddings, sparse=lambda batch: batch) as loop:
            for batch in loop:
                train(embeddings, batch)
                plain.train(batch)
            embeddings.set_rows(
                "item", ids.numpy() + seed, (some + seed).numpy()
            )  # the lookahead is open, but its pass is over
            plain.bag.weight.data[ids + seed] = some + seed
    train(embeddings, batches()[1])  # without a lookahead
    plain.train(batches()[1])
    assert torch.equal(embeddings.rows("item", range(ROWS)), plain.weight)
    embeddings.eval()
    everything = skirl.KeyedJagged.one_hot(["item"], torch.arange(ROWS)[:, None])
    assert torch.equal(embeddings(everything)["item"], plain.weight)


def test_writing_weights_keeps_the_optimizer_state_as_pytorch_does_or_resets_it(tmp_path: Path) -> None:
    def optimizer() -> skirl.Adagrad:
        return skirl.Adagrad(lr=0.5)

    embeddings = collection(tmp_path, optimizer=optimizer(), dtype=torch.float64, cache=5)
    weight = nn.Parameter(EIGHTHS.double())
    plain = torch.optim.Adagrad([weight], lr=0.5, eps=optimizer().eps)
    ids = skirl.KeyedJagged(["item"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
    new = torch.ones(2, DIM, dtype=torch.float64)
    for state in (None, "keep", "reset"):
        if state is not None:
            embeddings.set_rows("item", [2, 1], new, state=state)
            weight.data[[2, 1]] = new
        if state == "reset":
            plain.state[weight]["sum"][[2, 1]] = 0
        (embeddings(ids)["item"] * FACTORS).sum().backward()
        bags = torch.stack([weight[1], weight[2] + weight[3]])
        (bags * FACTORS).sum().backward()
        plain.step()
        plain.zero_grad()
        torch.testing.assert_close(embeddings.rows("item", [1, 2, 3]), weight.detach()[1:4], rtol=1e-12, atol=0)


def test_a_checkpoint_after_writing_weights_has_them(made: Any, tmp_path: Path) -> None:
    embeddings, plain = made(), Plain()
    for batch in batches(4):
        train(embeddings, batch)
        plain.train(batch)
    skirl.save(tmp_path / "c", model=embeddings)
    embeddings.set_rows("item", [0, 9], EIGHTHS[:2] * 2)
    plain.bag.weight.data[[0, 9]] = EIGHTHS[:2] * 2
    skirl.save(tmp_path / "c", model=embeddings)
    embeddings.set_rows("item", [0, 9], EIGHTHS[:2] * 4)  # later changes are not in the checkpoint
    skirl.load(tmp_path / "c", model=embeddings)
    assert torch.equal(embeddings.rows("item", range(ROWS)), plain.weight)


def test_writing_weights_ends_a_step_whose_backward_has_not_come(tmp_path: Path) -> None:
    embeddings = collection(tmp_path)
    loss = embeddings(batches()[0])["item"].sum()
    with pytest.raises(IndexError):
        embeddings.set_rows("item", [ROWS], EIGHTHS[:1])  # refused before anything changes
    kept = embeddings(batches()[0])["item"].sum()
    embeddings.set_rows("item", [1], EIGHTHS[:1])
    for late in (loss, kept):
        with pytest.raises(RuntimeError, match="backward of a batch that is not current any more"):
            late.backward()


def test_writing_weights_while_a_lookahead_iterates_is_refused(tmp_path: Path) -> None:
    embeddings = collection(tmp_path)
    with skirl.lookahead(batches(), embeddings, sparse=lambda batch: batch) as loop:
        for batch in loop:
            train(embeddings, batch)
            with pytest.raises(RuntimeError, match=r"^a lookahead is iterating over .*: set rows before its loop"):
                embeddings.set_rows("item", [1], EIGHTHS[:1])


@pytest.mark.parametrize(
    ("table", "ids", "sentence"),
    [
        ("items", [1], "no table 'items': there are 'item'"),
        ("item", [0, -1], "ids of table 'item' have -1 at place 1: it has rows 0 to 19"),
        ("item", [20], "ids of table 'item' have 20 at place 0: it has rows 0 to 19"),
    ],
)
def test_rows_that_are_not_there(table: str, ids: list[int], sentence: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, IndexError), match=f"^{sentence}$"):
        collection(tmp_path).rows(table, ids)


# from_pretrained


def written(path: Path, form: str) -> Any:
    if form == "memmap":
        np.save(path / "item.npy", EIGHTHS.numpy())
        return np.load(path / "item.npy", mmap_mode="r")
    return {"tensor": EIGHTHS, "bfloat16": EIGHTHS.bfloat16()}[form]


@pytest.mark.parametrize("form", ["memmap", "tensor", "bfloat16"])
def test_from_pretrained_of_an_array_or_a_tensor(form: str, tmp_path: Path) -> None:
    given = written(tmp_path, form)
    table = skirl.Table("item", ROWS, DIM, init=given)
    again = pickle.loads(pickle.dumps(table))
    for each in (table, again):
        plain = Plain()
        embeddings = skirl.EmbeddingBagCollection([each], optimizer=skirl.SGD(lr=0.5), cache=4)
        for batch in batches():
            train(embeddings, batch)
            plain.train(batch)
        assert torch.equal(embeddings.rows("item", range(ROWS)), plain.weight)
    if form != "bfloat16":
        assert table.init.digest == again.init.digest == skirl.Table("item", ROWS, DIM, init=EIGHTHS).init.digest


def test_a_file_of_many_gigabytes_is_mapped_and_not_read(tmp_path: Path) -> None:
    rows = 1 << 25  # 8 GiB, of which no block is allocated on disk
    header = np.lib.format.open_memmap(tmp_path / "large.npy", mode="w+", dtype=np.float32, shape=(rows, 64))
    header[rows - 3] = 5.0
    del header
    table = skirl.Table("item", rows, 64, init=np.load(tmp_path / "large.npy", mmap_mode="r"))
    embeddings = skirl.EmbeddingBagCollection([table], optimizer=skirl.SGD(lr=1.0), cache=10)
    ids = skirl.KeyedJagged.one_hot(["item"], torch.tensor([[rows - 3], [7]]))
    before = _resident()
    embeddings(ids)["item"].sum().backward()
    assert embeddings.rows("item", [rows - 3, 7, 8])[:, 0].tolist() == [4.0, -1.0, 0.0]
    assert _resident() - before < 64 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_resumed_run_goes_on_from_the_array(made: Any, tmp_path: Path) -> None:
    plain, stream = Plain(), batches(16)
    embeddings = made()
    for batch in stream[:4]:
        train(embeddings, batch)
        plain.train(batch)
    skirl.save(tmp_path / "c", model=embeddings)
    for batch in stream[4:10]:
        train(embeddings, batch)  # this step never happened: rows that began here begin again
    embeddings.close()
    resumed = made(resume=True)
    skirl.load(tmp_path / "c", model=resumed)
    for batch in stream[4:]:
        train(resumed, batch)
        plain.train(batch)
    assert torch.equal(resumed.rows("item", range(ROWS)), plain.weight)
    resumed.close()


def test_a_checkpoint_is_refused_with_another_array_or_none(tmp_path: Path) -> None:
    embeddings = collection(tmp_path)
    train(embeddings, batches()[0])
    skirl.save(tmp_path / "c", model=embeddings)
    other = EIGHTHS.clone()
    other[ROWS - 1, DIM - 1] += 1
    with pytest.raises(skirl.CheckpointError, match=r"was saved with table 'item'.init.digest = "):
        skirl.load(tmp_path / "c", model=collection(tmp_path, init=other))
    with pytest.raises(skirl.CheckpointError, match=r"table 'item'\.init"):
        skirl.load(tmp_path / "c", model=collection(tmp_path, init=None))
    same = collection(tmp_path, init=written(tmp_path, "memmap"))  # whatever form they are given in
    skirl.load(tmp_path / "c", model=same)
    assert torch.equal(same.rows("item", range(ROWS)), embeddings.rows("item", range(ROWS)))


@pytest.mark.parametrize(("kind", "init"), [("disk", EIGHTHS), ("disk", None), ("memory", None)])
def test_rows_in_a_store_are_refused_with_another_seed_or_initialiser(kind: str, init: Any, tmp_path: Path) -> None:
    """Otherwise rows never used so far would begin differently from the rest."""
    store: Any = "disk"
    if kind == "memory":  # the user's own store, which outlives the embeddings
        store = skirl.store.MemoryStore({0: skirl.store.Record(DIM)})
    embeddings = collection(tmp_path, store, init=init, seed=1)
    for batch in batches(3):
        train(embeddings, batch)
    before = embeddings.rows("item", range(ROWS))
    embeddings.flush()
    if kind != "memory":
        embeddings.close()
    says = (
        r"^table 'item': .* from Uniform\(.*\), seed 1, and would now be from Uniform\(.*\), seed 2: set init and seed"
    )
    if init is None:
        with pytest.raises(ValueError, match=says):
            collection(tmp_path, store, init=None, seed=2, resume=True)
    for other in (EIGHTHS + 1, skirl.Normal(0.5), skirl.Constant(1.0)):
        with pytest.raises(ValueError, match=r"^table 'item': the rows in .* were initialized from"):
            collection(tmp_path, store, init=other, seed=1, resume=True)
    again = collection(tmp_path, store, init=init, seed=1, resume=True)
    assert torch.equal(again.rows("item", range(ROWS)), before)
    again.close()


def test_a_file_that_was_changed_is_refused_where_it_would_be_read(tmp_path: Path) -> None:
    embeddings = collection(tmp_path, init=written(tmp_path, "memmap"))
    train(embeddings, batches()[0])
    np.save(tmp_path / "item.npy", EIGHTHS.numpy() + 1)
    sentence = r"item\.npy has changed since rows were initialized from it: restore the file"
    with pytest.raises(ValueError, match=sentence):
        embeddings.rows("item", range(ROWS))
    with (
        pytest.raises(ValueError, match=sentence),
        skirl.lookahead(batches(seed=1), embeddings, sparse=lambda batch: batch) as loop,
    ):
        for batch in loop:
            train(embeddings, batch)


def test_first_values_that_would_be_rounded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^table 'item': init is float64 in the array and rows are float32: convert"):
        collection(tmp_path, init=EIGHTHS.double())
    assert collection(tmp_path, dtype=torch.float64).rows("item", [3]).dtype == torch.float64
    with pytest.raises(ValueError, match=r"init has shape \[20, 4\] in the array, but the table is \[21, 4\]"):
        skirl.Table("item", ROWS + 1, DIM, init=skirl.Table("item", ROWS, DIM, init=EIGHTHS).init)
