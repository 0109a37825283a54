"""The report of a sweep's folder and its page: also of one that was resumed, is going on, or failed."""

import json
from pathlib import Path
from typing import Any

from skirl.cli.report import report_of_sweep, sweep_lines

STEPS = (10, 20, 30, 40)


def place(rank: int, name: str, state: str, difference: float) -> dict[str, Any]:
    return {
        "rank": rank, "variant": name, "loss": 0.45 + difference, "difference": difference, "error": 0.00123,
        "state": state, "leading": rank == 1, "auc": 0.78912,
    }  # fmt: skip


def write(
    folder: Path, seconds: tuple[float, ...] = (10.0, 20.0, 30.0, 35.0), begun_at: int = 0, **result: Any
) -> None:
    """Write the folder of a sweep of a, b and <c>, of which the last was dropped at step 20."""
    lines: list[dict[str, Any]] = []
    for step, second in zip(STEPS, seconds, strict=True):
        if step == 20:
            lines.append(
                {"event": "left", "step": 20, "variant": "<c>", "why": "dropped at step 20 by loss", "kind": "dropped"}
            )
        third = "races" if step < 20 else "dropped at step 20 by loss"
        places = [place(1, "a", "leads", 0.0), place(2, "b", "races", 0.01), place(3, "<c>", third, 0.02)]
        when = {"step": step, "seconds": second, "begun_at": begun_at if step > 20 else 0}
        lines.append({"event": "standing", "measure": "unseen", "unseen": step, "places": places, **when})
    (folder / "race.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half a line')
    variants = [{"name": name, "overrides": {}} for name in ("a", "b", "<c>")]
    sweep = {"flags": {"data": "synthetic:tiny"}, "started": "2024-01-01T00:00:00+00:00", "variants": variants}
    (folder / "sweep.json").write_text(json.dumps(sweep))
    if result:
        whole = {"winner": None, "failed": None, "best": None, "cost": 0.5, "from": None, "seed_noise": None} | result
        (folder / "result.json").write_text(json.dumps(whole))


def test_a_page_names_the_best_once_and_all_in_its_table(tmp_path: Path):
    write(
        tmp_path,
        winner="a",
        seed_noise=0.00123,
        by_variant={"a": {"test_auc": 0.7}, "b": {}, "<c>": {"test_auc": None}},
    )
    facts = report_of_sweep(tmp_path, tmp_path / "report.html")
    text = sweep_lines(facts)
    assert text["winner"] == "a, loss 0.45000 on samples that nobody had trained on"
    assert (text["sweep"], text["left"]) == ("3 variants on synthetic:tiny, ended", "1 dropped at a rung")
    page = (tmp_path / "report.html").read_text()
    assert page.count(text["winner"]) == 1 and f"The best of 3 variants is {text['winner']}." in page
    assert "held-out AUC" in page and "0.7000" in page and "+0.01000 ± 0.00123" in page
    assert "dropped at step 20 by loss" in page and "&lt;c&gt;" in page and "<c>" not in page
    assert "ranks are by the mean over the seeds" in page


def test_a_sweep_that_goes_on_has_a_leader_and_one_that_failed_says_why(tmp_path: Path):
    write(tmp_path)
    text = sweep_lines(report_of_sweep(tmp_path, tmp_path / "report.html"))
    assert text["sweep"].endswith("still going on, killed, or failed") and text["leader"].startswith("a, loss")
    write(tmp_path, failed="all 3 variants have diverged")
    text = sweep_lines(report_of_sweep(tmp_path, tmp_path / "there" / "page.html"))
    assert text["failed"] == "all 3 variants have diverged" and "leader" not in text
    assert '<p class="result">all 3 variants have diverged' in (tmp_path / "there" / "page.html").read_text()
