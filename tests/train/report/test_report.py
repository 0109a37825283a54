"""`skirl report` on a run that ended, on one that was killed, and on folders that are not runs."""

import json
import re

import pytest

from skirl.cli import main
from skirl.cli.commands import Report
from skirl.tools.flags import flags_of, option
from skirl.train.commands import Train
from skirl.train.report.page import Page
from skirl.train.report.plot import Chart, svg
from skirl.train.report.report import RunContents, _moving, drawn, facts
from tests.pages import NONE, mistakes

FLAGS = [
    "--data", "synthetic:tiny", "--model", "dlrm-tiny", "--dim", "4", "--batch", "64", "--steps", "60", "--valid", "10%",
    "--eval-every", "20", "--log-every", "10", "--cache", "touched:20%", "--quiet", "--schedule", "linear",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one & only"
    assert main(["train", *FLAGS, "--run", str(folder), "--json"]) == 0
    return folder


def test_text_and_page(run, capsys, browse):
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    assert "dlrm-tiny on synthetic:tiny, ended" in out and "60, 3,840 samples" in out and "its best" in out
    page = run / "report.html"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page.read_text()), "the page would fetch something"
    dom = browse(page)
    assert "one &amp; only" in dom and "--log-every" in dom
    assert dom.count("<polyline") == 2 + 2 + 1 + 3 + 2 + 2
    assert "nan" not in re.sub(r"<[^>]*>", " ", dom).lower().split()


def test_numbers_are_those_of_the_result(run):
    found = facts(RunContents.of(run))
    result = json.loads((run / "result.json").read_text())
    assert found["ended"] and found["steps"] == result["steps"] == 60
    assert found["samples"] == result["samples"]
    assert [found[n] for n in ("fetched", "new", "written")] == [
        result["counters"][n] for n in ("fetched", "new", "written")
    ]
    assert found["auc"] == result["auc"]
    assert found["busy"]["plan"] == pytest.approx(result["movement"]["busy"]["plan"], rel=0.2)
    assert sum(found["blame"].values()) >= 0 and set(found["blame"]) == {"plan", "fetch", "write"}
    best = min(result["test_logloss"], *(line["test_logloss"] for line in RunContents.of(run).evaluations))
    assert found["best"]["test_logloss"] == best


def test_rows_a_step_are_those_since_the_line_before(run):
    left = RunContents.of(run)
    made = next(chart for chart in _moving(left) if "made" in chart.lines).lines["made"]
    assert [step for step, _ in made] == [line["step"] for line in left.lines]
    assert sum(rate * 10 for _, rate in made) == pytest.approx(left.lines[-1]["new"])  # a line every 10 steps


def test_a_page_escapes_whatever_it_is_given():
    page = Page("<t>")
    page.heading("<h>"), page.lead("<l>"), page.text("<p>"), page.note("<n>")
    page.facts({"<k>": "<v>"})
    page.table(["<c>"], [["<d>"]])
    for given in "tlhpnkvcd":
        assert f"&lt;{given}&gt;" in page.html(), given
    for given in "tlknvcd":
        assert f"<{given}>" not in page.html(), given


def test_flags_that_were_set_stand_apart(run, browse):
    """As they are typed; all others are behind a line that expands."""
    Report(run).run()
    dom = browse(run / "report.html")
    shown, others = dom.split("<details>")
    shown = shown[shown.index("Flags</h2>") :]
    named = [set(re.findall(r"--[a-z-]+", part)) for part in (shown, others)]
    given = {flag for flag in FLAGS if flag.startswith("--")} | {"--run", "--json"}
    assert named[0] == given and not named[1] & given
    known = {option(name) for name in flags_of(Train)}
    assert named[0] | named[1] == known
    assert f"<summary>{len(named[1])} more at their defaults" in others


def test_a_column_is_set_as_numbers_or_as_text_not_both():
    page = Page("t")
    page.table(["flag", "step"], [["None", "3"], ["1024", "-"]])
    assert page.html().count('class="number"') == 3, "the head of steps and its two cells"


LONG = {
    "step": 1_250_000, "samples": 1_280_000_000, "fetched": 9_876_543_210, "new": 123_456_789, "written": 9_999_999_999,
    "touched": 987_654_321, "seconds": 12_345.6, "samples_per_second": 103_680.5, "stall": 9430.25, "read": 1234.5,
    "loss": 0.123456, "auc": 0.81234, "ne": 0.9, "lr": 0.001234, "dense_lr": 1.5e-7,
    "busy": {"plan": 1.25, "fetch": 9431.5, "write": 0.001, "load": 88.0},
    "blame": {"plan": 0.5, "fetch": 9430.0, "write": 0.0},
}  # fmt: skip


def test_no_text_is_cut_off_or_lies_on_a_line(browse, tmp_path):
    """With lines that fill their charts, the longest figures, and flags that are one long word."""
    lines = [
        LONG
        | {name: LONG[name] * n // 8 for name in ("step", "samples", "fetched", "new", "written")}
        | {"samples_per_second": 9e5 * (n % 3 + 1), "loss": 0.7 / n, "auc": 0.5 + n / 16, "lr": 0.01 / n}
        for n in range(1, 9)
    ]
    scores = {"step": 625_000, "seconds": 99.9} | dict.fromkeys(
        ("test_logloss", "test_auc", "test_ne", "test_calibration"), 0.4512
    )
    config = {
        "flags": {"data": "parquet:/" + "long/" * 40, "model": "deep-cross-tiny", "valid": None},
        "started": "2024-01-01T00:00:00", "begun_at": 0, "versions": {"torch": "2.13.0", "numba": "0.62.1"},
        "machine": {"processor": "Some Processor at 2.10 GHz", "cores": 64},
    }  # fmt: skip
    left = RunContents(config, lines, [scores], None)
    page = drawn("deep-cross-tiny-parquet-2024-01-01T00-00-00", left, facts(left), {"valid": None}).html()
    assert mistakes(browse, tmp_path, page) == NONE


def test_one_point_is_seen_in_the_middle_and_its_values_stand_once():
    text = svg([Chart("t", "step", {"samples": [(28, 920.2)]}, log=(False, False), dots=False)], width=400, height=300)
    assert text.count("<circle") == 1 and text.count(">28<") == 1 and text.count(">920.2<") == 1
    (x,) = re.findall(r'<circle cx="([0-9.]+)"', text)
    assert 150 < float(x) < 300
    two = svg([Chart("t", "step", {"samples": [(1, 2.0), (3, 2.0)]}, log=(False, False), dots=False)])
    assert two.count("<circle") == 0 and two.count(">2<") == 2  # on both axes


def test_names_of_lines_stand_above_the_lines():
    text = svg([Chart("t", "x", {"first": [(1, 2.0), (9, 3.0)], "second": [(1, 3.0), (9, 3.0)]})])
    names = [float(y) for y in re.findall(r'y="([0-9.]+)"[^>]*>(?:first|second)<', text)]
    heights = [float(pair.split(",")[1]) for line in re.findall(r'points="([^"]*)"', text) for pair in line.split()]
    assert len(names) == 2 and max(names) < min(heights)


WIDE = ["MW" * 40 + end for end in ("one", "two")]


@pytest.fixture
def crowded() -> str:
    return svg([Chart("/" + "very/long" * 20, "x", {name: [(1, 2.0), (9, 3.0)] for name in WIDE})])


def test_names_wider_than_the_chart_are_cut_in_the_middle_and_whole_under_the_mouse(crowded):
    shown = dict(re.findall(r'fill="#333">([^<]+)<title>([^<]+)</title>', crowded))
    assert list(shown.values()) == WIDE and len(shown) == 2
    assert all(cut.endswith(name[-3:]) and "…" in cut and len(cut) < 40 for cut, name in shown.items())
    assert re.search(r'font-weight="bold">/very[^<]*…[^<]*long<', crowded)


def test_names_wider_than_the_chart_fit_in_a_browser(crowded, browse, tmp_path):
    assert mistakes(browse, tmp_path, crowded) == NONE


def test_a_run_that_was_killed(run, tmp_path, capsys):
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "config.json").write_text((run / "config.json").read_text())
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    assert main(["report", str(killed)]) == 0
    assert "still going on, killed, or failed" in capsys.readouterr().out
    (killed / "metrics.jsonl").write_text("")
    assert main(["report", str(killed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 0
    assert main(["report", str(killed)]) == 0
    assert "none yet" in capsys.readouterr().out


def test_folders_that_are_no_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "has no config.json: name the folder of a run" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 1
    assert "config.json is damaged" in capsys.readouterr().err


def test_the_page_may_lie_elsewhere(run, tmp_path):
    where = tmp_path / "pages" / "run.html"
    assert Report(run, page=where).run()["page"] == str(where)
    assert where.read_text().startswith(Page("x").html()[:15])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("metrics.jsonl", '{"kind": "train", "step": 1}\n', "line 1 is damaged, .*samples is missing"),
        ("metrics.jsonl", '{"step": 1}\n', "line 1 is not a line of metrics .kind is missing"),
        ("metrics.jsonl", '{"kind": "other", "step": 1}\n{\n', "line 2 is not a line of metrics"),
        ("metrics.jsonl", "\ufffd\n[1]\n", "line 1 is not a line of metrics"),
        ("config.json", "{", "config.json is damaged"),
        ("config.json", "[]", "config.json is damaged, .*not a table of names"),
        ("config.json", "[" * 100_000, "config.json is damaged"),
        ("config.json", '{"flags": {}}', "started is missing"),
        ("result.json", '{"checkpoints": 3}', "result.json is damaged, .*checkpoints is 3"),
    ],
)
def test_a_damaged_folder_is_refused_by_its_file(run, tmp_path, name, text, words):
    """Found by fuzzing: each of these gave a traceback."""
    for other in ("config.json", "metrics.jsonl", "result.json"):
        (tmp_path / other).write_bytes((run / other).read_bytes())
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        Report(tmp_path).run()
    assert str(tmp_path / name) in str(caught.value)


def test_what_diverged_is_reported(run, tmp_path):
    """A loss that is not a number is valid content of a line."""
    for other in ("config.json", "result.json"):
        (tmp_path / other).write_bytes((run / other).read_bytes())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[2]["loss"], lines[4]["loss"] = float("nan"), float("inf")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = Report(tmp_path)
    report.summary(report.run())
    assert "nan" not in re.sub(r"<(?!polyline)[^>]*>", " ", (tmp_path / "report.html").read_text()).lower().split()
