"""Targets of tables over ranks: their list, their costs, and a plan, of which every cell is counted."""

import json
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from skirl.placement.tables import wire_fit
from skirl.placement.tables.costs import costs_for, save_costs
from skirl.placement.tables.named import BACKENDS
from skirl.placement.tables.plan_file import PLANS, TablePlan
from skirl.placement.tables.spec import TableSpec, parsed_specs, read_specs, specs_text
from tests.fuzz.loop import READ, Target, clean
from tests.fuzz.mutate import Draw, mutated, mutated_tree

PIECES = [[(0, 0, 40, 0, 8), (1, 40, 60, 0, 8), (2, 0, 60, 8, 12)], [(1, 0, 9, 0, 4)]]


class _Json(Target):
    """A JSON file, changed as a tree or as bytes, mostly without its digest."""

    seed: Any

    def draw(self, draw: Draw, folder: Path) -> None:
        body = mutated_tree(draw, self.seed) if draw.random() < 0.8 else self.seed
        data = json.dumps(body).encode()
        (folder / "in.json").write_bytes(mutated(draw, data) if draw.random() < 0.3 else data)

    def judge(self, folder: Path) -> str:
        try:
            self.read(folder / "in.json")
        except ValueError as error:
            return clean(error, folder, ValueError)
        return READ

    def read(self, path: Path) -> None:
        raise NotImplementedError


class Tables(_Json):
    name = "tables"

    def prepare(self, folder: Path) -> None:
        specs = [TableSpec("a", 60, 12, 8, 16.0, 9.0), TableSpec("b", 9, 4, 8, 8.0, 5.0, rank=1, group="g", split="no")]
        self.seed = json.loads(specs_text(specs))

    def read(self, path: Path) -> None:
        specs = read_specs(path)
        assert all(0 < spec.distinct <= spec.ids and spec.nbytes(1, spec.dim) >= 4 * spec.dim for spec in specs)
        if len({spec.batch for spec in specs}) == 1:
            assert parsed_specs(json.loads(specs_text(specs))) == specs


class MeasuredCosts(_Json):
    """Costs with nets, using small ones in place of trained ones, of any backend, and asked for any."""

    name = "costs"

    def prepare(self, folder: Path) -> None:
        from tests.placement.tables.test_nets import costs, exchanges

        wire = replace(wire_fit.wire_of(*exchanges(30, 0.6), seed=0), noise=0.1)
        where = {"processor": "Z80", "device": "cpu"}
        save_costs(replace(costs(2), wire=wire, machine=where), folder / "seed.json")
        self.seed = json.loads((folder / "seed.json").read_text())
        del self.seed["digest"]

    def draw(self, draw: Draw, folder: Path) -> None:
        self.seed["backend"], asked = draw.choice(BACKENDS), draw.choice(BACKENDS)
        (folder / "backend").write_text(asked if draw.random() < 0.3 else self.seed["backend"])
        super().draw(draw, folder)

    def read(self, path: Path) -> None:
        asked = path.with_name("backend").read_text()
        costs = costs_for(asked, path, link=1e9, ranks=2)
        assert costs.backend == json.loads(path.read_bytes())["backend"] == asked
        spec = TableSpec("a", 60, 12, 8, 16.0, 9.0)
        for optimizer in costs.ms:
            part = (TableSpec(**{**vars(spec), "optimizer": optimizer}), 60, 12)
            assert costs.compute(*part) > 0 and isfinite(costs.together([[part, part]])[0])
        where = costs.machine or {"processor": "", "device": ""}
        assert where == (json.loads(path.read_bytes()).get("machine") or where)
        assert all(isinstance(where[name], str) for name in ("processor", "device"))
        if costs.wire is not None:
            assert all(np.isfinite(of).all() for of in costs.wire.told(*np.ones((2, 1, costs.wire.ranks))))


class Plan(_Json):
    name = "table-plan"

    def prepare(self, folder: Path) -> None:
        tables = [
            {
                "name": name, "rows": of[-1][2], "dim": of[-1][4], "optimizer": "sgd",
                "pieces": [{"rank": r, "rows": [a, b], "columns": [c, d]} for r, a, b, c, d in of],
            }
            for name, of in zip("ab", PIECES, strict=True)
        ]  # fmt: skip
        self.seed = {"format": "skirl-table-plan", "format_version": 1, "ranks": 3, "tables": tables}

    def read(self, path: Path) -> None:
        plan, body = TablePlan.load(path), json.loads(path.read_bytes())
        for table in body["tables"]:
            pieces = [(*piece["rows"], *piece["columns"]) for piece in table["pieces"]]
            assert all(0 <= piece["rank"] < body["ranks"] for piece in table["pieces"])
            assert sum((b - a) * (d - c) for a, b, c, d in pieces) == table["rows"] * table["dim"]
            for row in {0, 8, 39, 40, 59, table["rows"] - 1} & set(range(min(table["rows"], 1 << 30))):
                for col in {0, 3, 4, 7, 8, 11, table["dim"] - 1} & set(range(min(table["dim"], 1 << 30))):
                    assert sum(a <= row < b and c <= col < d for a, b, c, d in pieces) == 1
        assert TablePlan.parsed(PLANS.text(plan.body())) == plan


TARGETS: list[Target] = [Tables(), MeasuredCosts(), Plan()]
