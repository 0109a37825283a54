"""The page of a sweep: its speed over the steps, also of one that was resumed, and how it looks in a browser."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skirl.train.report.plot import OTHER

from skirl.sweep.report import as_text, drawn, report, speed
from tests.pages import NONE, mistakes


def lines(*at: tuple[int, float] | tuple[int, float, int]) -> list[dict[str, Any]]:
    """Return standings without places: their step, seconds, and, if given, the step that they resumed from."""
    return [dict(zip(("step", "seconds", "begun_at"), one, strict=False)) for one in at]


def test_no_stretch_of_the_speed_reaches_over_a_resume():
    """Whether its seconds fall, or are already more than before, as after a slow start."""
    before = [(10.0, 2.0), (20.0, 2.0)]
    old = lines((10, 5.0), (20, 10.0), (30, 4.0), (40, 6.0))
    assert speed(old) == [*before, (30.0, 5.0), (40.0, 5.0)]
    new = lines((10, 5.0, 0), (20, 10.0, 0), (30, 10.001, 20), (40, 12.001, 20))
    assert [(step, round(rate, 6)) for step, rate in speed(new)] == [*before, (30.0, 5.0), (40.0, 5.0)]
    assert speed(lines((10, 5.0, 0), (20, 10.0, 0), (30, 4.0, 20))) == before


def test_one_standing_or_none_has_no_speed():
    assert speed([]) == speed(lines((10, 5.0))) == speed(lines((10, 5.0, 0), (20, 5.0, 10))) == []


def test_a_clock_that_stands_still_gives_no_rate():
    assert speed(lines((1, 1.0), (2, 1.0), (3, 2.0))) == [(1.0, 2.0), (3.0, 2.0)]
    assert speed(lines((1, 1.0), (2, 1.0))) == []


def test_many_standings_are_drawn_as_few_stretches():
    found = speed(lines(*((step, 2.0 * step) for step in range(1, 601))))
    assert {rate for _, rate in found} == {0.5} and found[0][0] == 1 and found[-1][0] == 600
    assert len(found) == 2 * 60


def place(rank: int, name: str, difference: float, state: str) -> dict[str, Any]:
    error = None if rank == 1 else 0.00123
    return {
        "rank": rank, "variant": name, "loss": 0.45 + difference, "difference": difference, "error": error,
        "state": state, "leading": rank == 1, "auc": 0.78912,
    }  # fmt: skip


def a_sweep(names: list[str], gone: dict[str, int], steps: list[int]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the facts and standings of a sweep in which variants left after the steps of `gone`."""
    standings = []
    for step in steps:
        places = [
            place(
                rank, name, 0.01 * (rank - 1) * (-1) ** rank,
                f"below the rung at step {gone[name]:,}" if gone.get(name, step) < step else "races",
            )
            for rank, name in enumerate(names, start=1)
        ]  # fmt: skip
        standings.append({"step": step, "seconds": 40.0 + step**0.9, "begun_at": 0, "places": places})
    left = [
        {"step": step, "variant": name, "why": f"below the rung at step {step:,}", "kind": "rung"}
        for name, step in gone.items()
    ]
    facts = {
        "flags": {"data": "parquet:/" + "long/" * 40}, "variants": names, "ended": True, "failed": None,
        "winner": names[0], "cost": 0.5, "seed_noise": 0.00123, "left": left, "step": steps[-1], "measure": "unseen",
        "seconds": standings[-1]["seconds"], "standing": standings[-1]["places"], "started": "2024-01-01T00:00:00+00:00",
    }  # fmt: skip
    return facts, standings


LONG = [
    f"lr={lr},model=deep-cross-tiny,optimizer=rowwise-adagrad,dense_lr={dense:g},dim=128,seed={seed}"
    for lr in (0.005, 0.02)
    for dense in (0.001, 1e-05)
    for seed in range(6)
]


def test_no_text_of_the_page_is_cut_off_or_lies_on_a_line(browse: Callable[[Path], str], tmp_path: Path):
    """With many variants, whose names are long, and lines that fill their charts."""
    steps = [12_500 * n for n in range(1, 101)]
    gone = {name: 1_250_000 - 50_000 * rank for rank, name in enumerate(LONG) if rank > 2}
    facts, standings = a_sweep(LONG, gone, steps)
    losses = {name: [(float(step), 0.4 + 0.1 * (step // 12_500 % 3)) for step in steps] for name in LONG}
    page = drawn("deep-cross-tiny-parquet-2024-01-01T00-00-00", facts, standings, losses).html()
    assert mistakes(browse, tmp_path, page) == NONE


def test_a_variant_has_one_colour_on_the_page():
    """Also where some of them have no line in a chart."""
    facts, standings = a_sweep(["a", "b", "c", "d"], {}, [10, 20])
    page = drawn("s", facts, standings, {name: [(10.0, 0.5), (20.0, 0.4)] for name in "acd"}).html()
    key = dict(re.findall(r'<i style="background:(#\w+)"></i> (\w)<', page))
    assert list(key.values()) == ["a", "b", "c", "d"]
    drawn_in = re.findall(r"<polyline[^>]* stroke=\"(#\w+)\"", page)
    assert [key[color] for color in drawn_in[:6]] == ["a", "c", "d", "b", "c", "d"]


def test_the_number_in_the_race_falls_at_the_steps_at_which_variants_left():
    facts, standings = a_sweep(["a", "b", "c", "d"], {"d": 10, "c": 25, "b": 25}, [10, 20, 30])
    page = drawn("s", facts, standings, {key: [(10.0, 0.5), (20.0, 0.4)] for key in "abcd"}).html()
    assert "<h2>Time</h2>" in page
    [[_, points]] = re.findall(r"variants in the race<.*?(<polyline) points=\"([^\"]*)\"", page, re.DOTALL)
    across, up = zip(*(map(float, point.split(",")) for point in points.split()), strict=True)
    assert len(across) == 6 and across[1] == across[2] == across[3] == across[4]
    assert up[0] == up[1] < up[2] < up[4] == up[5] and up[3] == up[2]  # two left at once, after one
    facts, standings = a_sweep(["a", "b"], {}, [10])
    assert "<h2>Time</h2>" not in drawn("s", facts, standings, {key: [(10.0, 0.5)] for key in "ab"}).html()


def test_the_time_of_a_resumed_sweep_is_that_of_all_its_parts(tmp_path: Path):
    facts, standings = a_sweep(["a", "b"], {}, [10, 20, 30, 40])
    for standing, seconds, begun_at in zip(standings, (50.0, 60.0, 70.0, 75.0), (0, 0, 20, 20), strict=True):
        standing |= {"event": "standing", "seconds": seconds, "begun_at": begun_at}
    (tmp_path / "race.jsonl").write_text("".join(json.dumps(standing) + "\n" for standing in standings))
    sweep = {name: facts[name] for name in ("flags", "started")} | {
        "variants": [{"name": name, "overrides": {}} for name in "ab"]
    }
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    assert as_text(report(tmp_path, None))["steps"] == "40 in 2:15"
    assert "Resumed 2024-01-01T00:00:00+00:00 after step 20." in (tmp_path / "report.html").read_text()


def test_wide_bands_of_the_first_batches_do_not_squeeze_all_others():
    facts, standings = a_sweep(["a", "b", "c"], {}, list(range(10, 310, 10)))
    for standing in standings[:2]:
        for at in standing["places"][1:]:
            at["error"] = 50.0
    page = drawn("s", facts, standings, {name: [(10.0, 0.5), (20.0, 0.4)] for name in "abc"}).html()
    drawn_at = {
        kind: [[float(point.split(",")[1]) for point in line.split()] for line in re.findall(pattern, page)]
        for kind, pattern in (("band", r'<polygon points="([^"]*)"'), ("line", r'<polyline points="([^"]*)"'))
    }
    assert all(len(band) == 2 * 30 and min(band) > 30 and max(band) < 258 for band in drawn_at["band"])
    b, c = drawn_at["line"][3:5]  # after the three losses
    assert abs(b[-1] - c[-1]) > 100


def test_what_is_not_drawn_has_a_grey_bar():
    """Not the colour of a variant that is."""
    names = list("abcdefgh")
    facts, standings = a_sweep(names, {}, [10, 20])
    page = drawn("s", facts, standings, {name: [] for name in names}).html()
    bars = re.findall(r"width:[\d.]+%;background:(#\w+)", page)
    assert len(bars) == 8 and len(set(bars[:6])) == 6 and set(bars[6:]) == {OTHER} and OTHER not in bars[:6]
