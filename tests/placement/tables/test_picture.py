"""The page of `skirl place tables` in a browser, with many ranks, plans and tables whose names are long."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skirl.cli import main
from skirl.placement.tables.picture import drawn
from tests.pages import NONE, mistakes

MANY = 24
NAMES = [f"user_{n:02}_clicked_items_of_the_last_thirty_days_by_category" for n in range(MANY)]


def placed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the result of the command, for tables of very different sizes on as many ranks."""
    tables = [
        {"name": name, "rows": 1000 * (n + 1) ** 3, "dim": 4 * (n % 8 + 1), "ids": 512 * (n + 1), "distinct": 400}
        for n, name in enumerate(NAMES)
    ]
    path, out = folder / "tables.json", folder / "result.json"
    path.write_text(json.dumps({"format": "skirl-tables", "format_version": 1, "batch": 4096, "tables": tables}))
    flags = ["--ranks", str(MANY), "--memory", "16GB", "--seconds", "1", "--quiet", "--json", "--out", str(out)]
    assert main(["place", "tables", str(path), *flags]) == 0
    return json.loads(capsys.readouterr().out)


def checked(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result as it is after plans were measured, whose names are long as well."""
    plans = [
        {"name": f"plans/of-{name}.json", "predicted_ms": 12.345 * n, "measured_ms": 13.456 * n}
        for n, name in enumerate(NAMES, start=1)
    ]
    told = {
        "plans": plans,
        "noise": 0.0123,
        "busiest": 3,
        "busiest_ms": 13.456,
        "balance": 1.23,
        "name": plans[0]["name"],
    }
    before = result["before"] | {"name": plans[-1]["name"], "measured_ms": 321.0}
    before["ranks"] = [{**of, "measured_ms": 1.1 * of["compute_ms"]} for of in before["ranks"]]
    ranks = [
        {
            **of,
            "measured_ms": 1.1 * of["compute_ms"],
            "tables": [*NAMES, *(f"{name}_{n}" for n in "ab" for name in NAMES)],
        }
        for of in result["ranks"]
    ]
    return result | {"ranks": ranks, "before": before, "check": told}


@pytest.mark.parametrize("measured", [False, True])
def test_no_text_of_the_page_is_cut_off_or_lies_on_a_line(
    measured: bool, browse: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    result = placed(tmp_path, capsys)
    page = drawn(checked(result) if measured else result, f"lists/{'of-the-recommender/' * 6}tables.json").html()
    assert mistakes(browse, tmp_path, page) == NONE
    assert page.count("<svg") == (4 if measured else 2)
