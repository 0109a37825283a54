"""Rows in half precision: they move as bits, are computed in float32, and are rounded so that a run is repeatable."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import skirl
from skirl import SGD, Adam, KeyedJagged, RowwiseAdagrad, Table
from skirl.cli.train import Train
from skirl.core.initial import first_rows
from skirl.engine.access import peek
from skirl.engine.device import expanded, packed, words
from tests.cases import cases

HALVES = [torch.bfloat16, torch.float16]
TABLE = Table("a", 300, 5)


ROWS = arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(1, 9)), elements=st.floats(width=32))


@given(ROWS, st.sampled_from(HALVES))
@cases(100)
def test_numbers_are_rounded_once_and_bits_travel(rows, half):
    records = packed(rows, half)
    assert records.dtype == np.float32 and records.shape == (len(rows), words(rows.shape[1]))
    expected = torch.from_numpy(rows).to(half).to(torch.float32).numpy()
    np.testing.assert_array_equal(expanded(records, rows.shape[1], half), expected)
    again = packed(expanded(records, rows.shape[1], half), half)
    assert np.isnan(rows).any() or again.tobytes() == records.tobytes()


def loader(seed=0, steps=8):
    rng = np.random.default_rng(seed)
    return [KeyedJagged.one_hot(["a"], torch.from_numpy(rng.integers(0, 60, (8, 1)))) for _ in range(steps)]


def embeddings_of(half, cache, optimizer=None, seed=3, **options):
    return skirl.EmbeddingBagCollection(
        [TABLE], optimizer=optimizer or SGD(lr=0.01), cache=cache, seed=seed, dtype=half, device="interpret", **options
    )


def train(embeddings, batches, until=None, saved=None):
    """Save after step `until`, or go on from what was saved."""
    losses = []
    with skirl.lookahead(batches, embeddings, sparse=lambda ids: ids, depth=3) as ahead:
        if saved and not until:
            skirl.load(saved, model=embeddings, optimizers=[], data=ahead)
        for ids in ahead:
            out = embeddings(ids)["a"]
            assert out.dtype == torch.float32
            loss = ((out - 1) ** 2).sum()
            loss.backward()
            losses.append(loss.item())
            if ahead.step == until:
                skirl.save(saved, model=embeddings, optimizers=[], data=ahead)
                break
    embeddings.flush()
    keys = np.sort(np.concatenate(list(embeddings.engine.store.held())))
    return losses, keys, peek(embeddings.engine, keys, 0)


OPTIMIZERS = [SGD(lr=0.01), RowwiseAdagrad(lr=0.05), Adam(lr=0.01)]
EACH = [
    pytest.param(half, optimizer, marks=[pytest.mark.slow] * ((n + k) % 2))
    for n, half in enumerate(HALVES)
    for k, optimizer in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("half", "optimizer"), EACH)
def test_the_bits_do_not_depend_on_the_cache(half, optimizer):
    tight, roomy = (train(embeddings_of(half, cache, optimizer), loader()) for cache in (12, 300))
    assert tight[0] == roomy[0]
    np.testing.assert_array_equal(tight[2], roomy[2])
    other = train(embeddings_of(half, 12, optimizer, seed=4), loader()[:2])
    assert other[0] != tight[0][:2]


@pytest.mark.parametrize("half", HALVES)
def test_a_step_is_that_of_float32_to_one_of_the_two_neighbours(half):
    """The reference is float32 arithmetic in numpy on the numbers as stored."""
    embeddings = embeddings_of(half, 100)
    start = torch.from_numpy(first_rows(range(60), TABLE.initial, 5, 3)).to(half).to(torch.float32).numpy()
    ids = loader()[0]
    out = embeddings(ids)["a"]
    used = ids.values().numpy()
    np.testing.assert_array_equal(out.detach().numpy(), start[used])
    ((out - 1) ** 2).sum().backward()
    rows = peek(embeddings.engine, np.arange(60), 0)
    for row in set(used.tolist()):
        gradient = (used == row).sum() * 2 * (start[row] - 1)
        exact = torch.from_numpy(start[row] - np.float32(0.01) * gradient)
        near = exact.to(half)
        away = torch.nextafter(near, torch.where(exact > near.float(), torch.inf, -torch.inf).to(half))
        got = torch.from_numpy(rows[row])
        assert ((got == near.float()) | (got == away.float())).all(), (got, exact)


def test_small_updates_are_not_lost():
    """Steps of a sixteenth of the gap between two neighbours: rounding to nearest would never move."""
    table = Table("a", 256, 8, init=skirl.Constant(1.0))
    embeddings = skirl.EmbeddingBagCollection(
        [table], optimizer=SGD(lr=2.0**-12), cache=256, dtype=torch.bfloat16, device="interpret"
    )
    every = KeyedJagged.one_hot(["a"], torch.arange(256).reshape(-1, 1))
    for _ in range(16):
        embeddings(every)["a"].sum().backward()
    rows = peek(embeddings.engine, np.arange(256), 0)
    assert 0.55 < (rows != 1).mean() < 0.73  # 1 - (15/16)**16: each step draws its own random bits
    mean = float(rows.mean())
    assert abs(mean - (1 - 16 * 2.0**-12)) < 4e-4


@pytest.mark.parametrize("half", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_bit_for_bit_and_is_read_without_a_gpu(half, tmp_path):
    batches = loader()
    whole = train(embeddings_of(half, 12, Adam(lr=0.01)), batches)
    train(embeddings_of(half, 12, Adam(lr=0.01)), batches, 4, tmp_path / "saved")
    resumed = embeddings_of(half, 12, Adam(lr=0.01))
    assert train(resumed, batches, None, tmp_path / "saved")[0] == whole[0][4:]
    np.testing.assert_array_equal(peek(resumed.engine, whole[1], 0), whole[2])
    skirl.export(resumed, tmp_path / "rows.safetensors")
    plain = skirl.EmbeddingBagCollection([TABLE], optimizer=Adam(lr=0.01), cache=300)
    skirl.import_rows(plain, tmp_path / "saved")
    assert peek(plain.engine, whole[1], 0).dtype == np.float32


def test_the_command_trains_them():
    flags = {"dim": 4, "batch": 16, "steps": 3, "cache": "touched:50%", "threads": 1, "quiet": True}
    half, full = (
        Train.of(data="synthetic:tiny", model="dlrm-tiny", device="interpret", dtype=dtype, **flags).run()
        for dtype in ("bfloat16", "float32")
    )
    assert half["rows"]["touched"] == full["rows"]["touched"]
    assert half["rows"]["bytes_of_all"] == sum(rows * 3 * 4 for rows in (50_000, 20_000, 2_000, 300, 20, 7))
    assert 0 < abs(half["loss"]["last"] - full["loss"]["last"]) < 0.05


@pytest.mark.parametrize("dtype", HALVES)
def test_rows_begin_from_an_array(dtype):
    weight = torch.arange(40).view(10, 4) / 8
    for array in (weight, weight.to(dtype)):
        embeddings = skirl.EmbeddingBagCollection(
            [Table("a", 10, 4, init=array)], optimizer=skirl.SGD(lr=0.5), cache=3, dtype=dtype, device="interpret"
        )
        assert torch.equal(embeddings.rows("a", range(10)), weight)
        ids = skirl.KeyedJagged.one_hot(["a"], torch.tensor([[7], [2]]))
        out = embeddings(ids)["a"]
        assert torch.equal(out.float(), weight[[7, 2]])
        out.sum().backward()
        expected = weight.clone()
        expected[[7, 2]] -= 0.5
        embeddings.set_rows("a", [3], weight[:1].to(dtype))
        expected[3] = weight[0]
        assert torch.equal(embeddings.rows("a", range(10)), expected)
