"""The page of a run, a sweep or a size."""

import math
from xml.etree import ElementTree

import pytest

from skirl.tools import page
from skirl.tools.page import Chart, Table, write_page


@pytest.mark.parametrize("log", [False, True])
def test_a_chart_is_well_formed_and_names_its_first_lines(log: bool) -> None:
    lines = {f"lr={i}, $x$ <{i}>": [(1.0, i + 1.0), (2.0, i + 2.0), (3.0, math.nan)] for i in range(12)}
    text = page.svg(Chart("a < b & $c", lines, "step", "loss", log_x=log, log_y=log))
    ElementTree.fromstring(text)
    assert "a &lt; b &amp; $c" in text and "lr=9, $x$ &lt;9&gt;" in text and "lr=10" not in text
    assert page.INK not in text and "mathdefault" not in text


def test_a_page_has_its_result_first_and_leaves_out_empty_charts(tmp_path) -> None:
    path = tmp_path / "new" / "page.html"
    charts = [Chart("loss", {"a": [(1, 0.5)], "b": []}, "step", ""), Chart("AUC", {"a": []}, "step", "")]
    write_page(path, title="<run>", lead=["It & fell.", "More."], tables=[Table(["", ""], [["a", "-"]])], charts=charts)
    text = path.read_text()
    assert "<h1>&lt;run&gt;</h1>" in text and '<p class="result">It &amp; fell.</p>\n<p>More.</p>' in text
    assert text.count("<svg ") == 1 and "http" not in text.partition("<svg")[0] and "<thead>" not in text


def test_without_matplotlib_a_sentence_stands_for_the_pictures(monkeypatch) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    text = page.html("run", ["It fell."], [], [Chart("loss", {"a": [(1, 0.5)]}, "step", "")])
    assert "pip install 'skirl[plots]'" in text and "<svg" not in text
