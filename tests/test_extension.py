"""The code that docs/extension.md adds to skirl passes the tests that the page names."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl import Constant, EmbeddingBagCollection, KeyedJagged, RowwiseAdagrad, Table, lookahead
from skirl.core import optim
from skirl.core.reference import Reference
from skirl.core.tables import Schema
from skirl.data import Synthetic
from skirl.oracle import policies
from skirl.oracle.bank import BankPlanner
from skirl.oracle.seen import Seen
from tests.cases import cases
from tests.oracle.execute import Cache
from tests.oracle.traces import BANK, SCHEMA, drive, keys_of, largest, traces, windows
from tests.store.conformance import StoreConformance

PAGE = Path(__file__).parents[1] / "docs" / "extension.md"


@pytest.fixture(scope="module", autouse=True)
def page():
    """Run the page's code and return the names that it defines, with its policy registered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "POLICIES", dict(policies.POLICIES))
        patch.setattr(optim, "ROW_OPTIMIZERS", dict(optim.ROW_OPTIMIZERS))
        names: dict[str, Any] = {"__name__": "page"}
        for code in re.findall(r"(?<!-->\n)```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(compile(code, PAGE.name, "exec"), names)
        yield names


class TestDictStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _page(self, page):
        self.page = page

    def make(self, layout):
        return self.page["DictStore"](layout)


@cases(100)
@given(data=st.data(), trace=traces(), hold=st.integers(0, 5))
def test_the_policy_keeps_the_promises_of_a_step(data, trace, hold):
    capacity = largest(trace) + data.draw(st.integers(0, 6))
    batches = [keys_of(batch) for batch in trace]
    planner = BankPlanner(SCHEMA, BANK, capacity, depth=4, seen=Seen(SCHEMA), policy="fifo", hold=hold, hold_rows=99)
    cache = Cache(capacity, hold=hold, hold_rows=99)
    for step, batch in zip(drive(planner, batches, data.draw(windows(len(trace)))), batches, strict=True):
        cache.run(step, batch)


def test_the_row_that_came_first_leaves_first():
    schema = Schema.of([Table("a", 100, 4)])
    planner = BankPlanner(schema, 0, 3, depth=1, seen=Seen(schema), policy="fifo")
    left = []
    for batch in ([1], [2], [1], [3], [4], [2], [1]):
        planner.enter(np.array(batch, np.int64))
        left += planner.plan().evict_keys.tolist()
    assert left == [1, 2]


@pytest.mark.parametrize("device", ["cpu", "interpret"])
@pytest.mark.parametrize("dim", [3, 16])
def test_the_row_optimizer_has_the_bits_of_its_rule_on_every_device(page, dim, device):
    """In plain loops, in vectors and in Triton, the rule gives what it gives in plain Python."""
    optimizer = page["Lion"](lr=0.5, clip=2.0, weight_decay=0.1)
    table = Table("item", rows=10, dim=dim, init=Constant(1.0))
    rows = EmbeddingBagCollection([table], optimizer=optimizer, cache=10, device=device)
    reference = Reference([table], optimizer)
    draw = np.random.default_rng(0)
    for _ in range(5):
        ids = draw.integers(0, 10, 4)
        grad = draw.standard_normal((4, dim)).astype(np.float32)
        out = rows(KeyedJagged.one_hot(["item"], torch.from_numpy(ids)[:, None]))["item"]
        expected = reference.forward({"item": (ids.tolist(), range(5), None)})["item"]
        assert out.detach().numpy().tobytes() == expected.tobytes()
        out.backward(torch.from_numpy(grad))
        reference.backward({"item": grad})


def test_the_model_learns(page):
    torch.manual_seed(0)
    stream = Synthetic("tiny", batch_size=256, batches=120)
    rows = EmbeddingBagCollection(stream.tables(8), optimizer=RowwiseAdagrad(lr=0.1), cache=3000)
    model = page["LogisticRegression"](rows, stream.dense_features)
    dense = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    with lookahead(stream, model) as batches:
        for batch in batches:
            loss = model.loss(batch)
            loss.backward()
            dense.step()
            dense.zero_grad()
            losses.append(loss.item())
    assert np.mean(losses[-40:]) < 0.55 < np.mean(losses[:10])
