"""Targets of tables over ranks: their list, and a plan, of which every cell is counted."""

import json
from pathlib import Path
from typing import Any

from skirl.placement.plan_file import PLANS, TablePlan
from skirl.placement.spec import FORMAT, VERSION, TableSpec, parse_specs, read_specs
from tests.fuzz.loop import READ, Target, clean
from tests.fuzz.mutate import Draw, mutated, mutated_tree

PIECES = [[(0, 0, 40, 0, 12), (1, 40, 60, 0, 12)], [(1, 0, 9, 0, 4), (2, 0, 9, 4, 8)]]


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


def specs_text(specs: list[TableSpec]) -> str:
    """Return the text of a file that lists tables of one batch size."""
    plain = {name: field.default for name, field in TableSpec.__dataclass_fields__.items()}
    tables = [
        {k: list(v) if k == "reuse" else v for k, v in vars(spec).items() if k != "batch" and v != plain[k]}
        for spec in specs
    ]
    return json.dumps({"format": FORMAT, "format_version": VERSION, "batch": specs[0].batch, "tables": tables})


class Tables(_Json):
    name = "tables"

    def prepare(self, folder: Path) -> None:
        specs = [TableSpec("a", 60, 12, 8, 16.0, 9.0), TableSpec("b", 9, 4, 8, 8.0, 5.0, rank=1, split="no")]
        self.seed = json.loads(specs_text(specs))

    def read(self, path: Path) -> None:
        specs = read_specs(path)
        assert all(0 < spec.distinct <= spec.ids and spec.nbytes(1, spec.dim) >= 4 * spec.dim for spec in specs)
        if len({spec.batch for spec in specs}) == 1:
            assert parse_specs(json.loads(specs_text(specs))) == specs


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


TARGETS: list[Target] = [Tables(), Plan()]
