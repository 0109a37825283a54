"""The page of `skirl place` in a browser, with many sites and tables whose names are long."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from skirl.placement.picture import Steps, drawn
from tests.pages import NONE, mistakes

MANY = 24
SITES = [f"rows-of-the-recommender-in-rack-{n:02}.europe-west4.example.org" for n in range(MANY)]
TABLES = [f"user_{n:02}_clicked_items_of_the_last_thirty_days_by_category" for n in range(MANY)]
STEPS = 200


def a_result(before: str) -> dict[str, Any]:
    """Return the result of a plan over many sites, with all that a page can show."""
    sites = [
        {
            "name": name, "store": f"link:10Gbit,100us:rpc://{name}:29400", "held": 123_456_789_012 + n, "memory": 1 << 38,
            "read": 123_456_789, "written": 98_765_432, "rate": 1.25e9, "busy_ms": 123.45,
        }
        for n, name in enumerate(SITES)
    ]  # fmt: skip
    by_way = {"rows": 123_456_789, "hashed": 234_567_890, "partial": 345_678_901, "pooled": 1_456_789_012}
    tables = [{"name": name, **by_way, "better": ("rows", "pooled")[n % 2]} for n, name in enumerate(TABLES)]
    return {
        "data": "parquet:/" + "long/" * 40, "sentence": f"Move rows of {TABLES[0]} to {SITES[1]}.", "steps": 2 * STEPS,
        "rows_read": 1_234_567_890, "rows_written": 1_134_567_890, "held": MANY * 123_456_789_012, "imbalance": 1.234,
        "moves": 1 << 40, "hidden": 0.987, "sites": sites, "before": {"name": before, "imbalance": 2.345, "vs_this": 1.9},
        "exchange": {"trainers": 512, **by_way, "better": 123_456_789, "tables": tables},
    }  # fmt: skip


def moved(seed: int) -> np.ndarray:
    """Return bytes by step and site, in lines that fill their chart."""
    return np.random.default_rng(seed).integers(1, 1 << 40, (STEPS, MANY))


def test_no_text_of_the_page_is_cut_off_or_lies_on_a_line(browse: Callable[[Path], str], tmp_path: Path):
    before = f"plans/{'of-the-recommender/' * 6}plan-{SITES[0]}.json"
    page = drawn(a_result(before), Steps(moved(0), moved(1), moved(2))).html()
    assert mistakes(browse, tmp_path, page) == NONE
    assert page.count("<svg") == 4 and all(name.replace("_", "_<wbr>") in page for name in TABLES)


def test_each_site_that_is_drawn_has_its_whole_name_and_its_own_colour():
    """In both charts alike, also where a site has no rows any more."""
    after, before = moved(1)[:, : MANY - 1], moved(2)
    after[:, 3], before[:, MANY - 1] = 1 << 41, 1 << 41
    result = a_result("plan.json")
    result["sites"].pop()
    page = drawn(result, Steps(moved(0)[:, : MANY - 1], after, before)).html()
    key = dict(re.findall(r'<i style="background:(#\w+)"></i> ([^<]+)<', page))
    assert len(key) == 6 and SITES[3] in key.values() and "left out 0" in key.values()
    drawn_in = re.findall(r"<polyline[^>]* stroke=\"(#\w+)\"", page)
    assert [key[color] for color in drawn_in[:11]] == [*(name for name in key.values() if name in SITES), *key.values()]
