"""Cost curves, tiny: every axis is measured, and a point above linear is noticed."""

from xml.etree import ElementTree

import pytest

from skirl.measure.bench import curves
from skirl.measure.bench.curves import AXES, AxisSizes, CurveRun, Curves, drawn, worst
from skirl.train.report.plot import Chart, svg
from tests.pages import NONE, mistakes


def test_every_axis_is_walked_and_drawn(tmp_path, monkeypatch):
    small = {"batch": (8, 16), "tables": (2, 3), "dim": (4, 8), "depth": (2, 4), "rows": (50, 500), "threads": (1, 2)}
    monkeypatch.setattr(curves, "AXES", small)
    plot = tmp_path / "curves.svg"
    result = Curves(steps=2, rounds=1, plot=plot).run()
    assert {name: [x for x, _ in line] for name, line in result["curves"].items()} == {
        k: list(v) for k, v in small.items()
    }
    assert all(cost > 0 for line in result["curves"].values() for _, cost in line)
    assert set(result["to_linear"]) == set(small) and set(result["to_flat"]) == {"depth", "rows", "threads"}
    root = ElementTree.fromstring(plot.read_text())
    assert sum(element.tag.endswith("polyline") for element in root.iter()) == 2 * len(small)
    assert "linear at most" in Curves().summary(result)["batch"]


def test_no_text_of_the_picture_is_cut_off_or_lies_on_a_line(browse, tmp_path):
    lines = {name: [(x, 0.0123 * x**0.9) for x in values] for name, values in AXES.items()}
    assert mistakes(browse, tmp_path, drawn(lines)) == NONE


def test_above_linear_fails(monkeypatch):
    def walk(self, axis: str) -> list[tuple[int, float]]:
        return [(1, 1.0), (2, 2.0), (4, 5.0)]

    monkeypatch.setattr(Curves, "_walk", walk)
    result = Curves(axes="batch,depth").run()
    assert result["to_linear"] == {"batch": 1.25, "depth": 1.25}
    assert result["to_flat"] == {"depth": 5.0}
    assert result["failed"] == "above 1.2 times linear: batch, depth"


def test_the_worst_pair_counts_not_the_ends():
    assert worst([(1, 1.0), (2, 4.0), (4, 4.0)], grows=True) == 2
    assert worst([(1, 3.0), (2, 1.0), (4, 2.0)], grows=False) == 2
    assert worst([(1, 1.0)], grows=True) == 1


def test_rows_do_move_while_it_is_measured():
    run = CurveRun(AxisSizes(batch=16, tables=2, dim=4, depth=2, rows=1000), seed=0)
    run.turn(30)
    counters = run._embeddings.engine.counters
    before = counters.written
    assert run.turn(5) > 0
    run.close()
    assert counters.written > before > 0 and counters.fetched > 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"axes": "batch,width"}, "axes has 'width': set it to some of batch"),
        ({"steps": 0}, "steps is 0: set it to 1 or more"),
    ],
)
def test_refuses(wrong, words):
    with pytest.raises(ValueError, match=words):
        Curves(**wrong)


def test_refuses_a_plot_of_another_kind(tmp_path):
    with pytest.raises(ValueError, match=r"set it to a file that ends with \.svg"):
        Curves(plot=tmp_path / "curves.png")


def test_a_chart_is_well_formed_and_in_its_frame():
    chart = Chart("a & b", "x", {"one": [(1, 5.0), (1000, 0.02)], "~two": [(1, 1), (1000, 1)]}, marks=(5.6,))
    root = ElementTree.fromstring(svg([chart, chart]))
    assert root.get("width") == "880"
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        for point in (line.get("points") or "").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 440 and 0 <= y <= 300


def test_zero_has_no_place_on_a_chart():
    with pytest.raises(ValueError, match="plot values above 0"):
        svg([Chart("a", "x", {"one": [(0, 1.0)]})])
