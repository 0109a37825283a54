"""`skirl report` on a run that ended, on one that was killed, and on folders that are not runs."""

import json
import re

import pytest

from skirl.cli import main
from skirl.cli.report import Report, report_of_run
from skirl.train.run_folder import lines_of

FLAGS = [
    "--data", "synthetic:tiny", "--model", "dlrm-tiny", "--dim", "4", "--batch", "64", "--steps", "60", "--valid", "10%",
    "--eval-every", "20", "--log-every", "10", "--cache", "touched:20%", "--quiet", "--schedule", "linear",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one & only"
    assert main(["train", *FLAGS, "--run", str(folder), "--json"]) == 0
    return folder


def test_numbers_are_those_of_the_result(run, tmp_path):
    found = report_of_run(run, tmp_path / "page.html")
    result = json.loads((run / "result.json").read_text())
    assert found["ended"] and found["steps"] == result["steps"] == 60
    assert found["samples"] == result["samples"]
    assert [found[n] for n in ("fetched", "new", "written")] == [
        result["counters"][n] for n in ("fetched", "new", "written")
    ]
    assert found["auc"] == result["auc"]
    assert found["busy"]["plan"] == pytest.approx(result["movement"]["busy"]["plan"], rel=0.2)
    assert sum(found["blame"].values()) >= 0 and set(found["blame"]) == {"plan", "fetch", "write"}
    evaluations = [line["test_logloss"] for line in lines_of(run) if line["kind"] == "eval"]
    assert found["best"]["test_logloss"] == min(result["test_logloss"], *evaluations)


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


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("metrics.jsonl", '{"kind": "train", "step": 1}\n', "damaged file"),
        ("metrics.jsonl", '{"step": 1}\n', "line 1 is not a line of metrics .kind is missing"),
        ("metrics.jsonl", '{"kind": "other", "step": 1}\n{\n', "line 2 is not a line of metrics"),
        ("metrics.jsonl", "\ufffd\n[1]\n", "line 1 is not a line of metrics"),
        ("config.json", "{", "config.json is damaged"),
        ("config.json", "[]", "damaged file"),
        ("config.json", "[" * 100_000, "config.json is damaged"),
        ("config.json", '{"flags": {}}', "damaged file"),
        ("result.json", '{"checkpoints": 3}', "damaged file"),
    ],
)
def test_a_damaged_folder_is_refused(run, tmp_path, name, text, words):
    """Found by fuzzing: each of these gave a traceback."""
    for other in ("config.json", "metrics.jsonl", "result.json"):
        (tmp_path / other).write_bytes((run / other).read_bytes())
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        Report(tmp_path).run()
    assert str(tmp_path) in str(caught.value)


def test_what_diverged_is_reported(run, tmp_path):
    """A loss that is not a number is valid content of a line."""
    for other in ("config.json", "result.json"):
        (tmp_path / other).write_bytes((run / other).read_bytes())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[2]["loss"], lines[4]["loss"] = float("nan"), float("inf")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = Report(tmp_path)
    report.summary(report.run())
    assert "nan" not in re.sub(r"<[^>]*>", " ", (tmp_path / "report.html").read_text()).lower().split()
