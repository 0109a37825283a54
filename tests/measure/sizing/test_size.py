"""`skirl size`: its text, its JSON, and its page in a real browser."""

import json
import re
from typing import Any

import pytest

from skirl.cli import main
from skirl.measure.sizing.commands import Size
from tests.pages import NONE, mistakes

FLAGS = ["synthetic:tiny", "--model", "dlrm-tiny", "--dim", "8", "--batch", "64", "--steps", "40", "--seed", "3"]


def test_one_line_of_json(capsys):
    assert main(["size", *FLAGS, "--json", "--quiet", "--link", "1Gbit,100us", "--step-ms", "5", "--reduce"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ids"] == sum(table["accesses"] for table in result["tables"])
    assert result["touched"] == sum(table["touched"] for table in result["tables"]) == sum(result["new_a_batch"])
    assert result["bytes"]["touched"] == result["touched"] * 4 * (8 + 1)
    assert result["sentence"].startswith(
        f"Use --cache {result['advice']['cache']} --depth {result['advice']['depth']}: "
    )
    assert 0 <= result["hidden"] <= 1 and result["step_ms_that_hides"] > 0
    assert [kind["rows as"] for kind in result["reductions"]] == ["dim 8", "dim 4", "dim 2", "dim 8, 16 bits a number"]


def test_what_it_advises_can_be_run_and_moves_what_it_says(capsys):
    assert main(["size", *FLAGS, "--json", "--quiet"]) == 0
    advice = json.loads(capsys.readouterr().out)
    cache, depth = str(advice["advice"]["cache"]), str(advice["advice"]["depth"])
    flags = ["--data", *FLAGS, "--cache", cache, "--depth", depth, "--json", "--quiet"]
    assert main(["train", *flags]) == 0
    ran = json.loads(capsys.readouterr().out)
    counted = next(p for p in advice["curves"][f"depth {depth}"] if p["cache"] == int(cache))
    assert ran["counters"]["fetched"] == counted["moved"] > 0
    assert ran["counters"]["new"] == advice["touched"]


def test_the_least_cache_runs_and_one_row_less_does_not(capsys):
    flags = [*FLAGS[:-4], "--steps", "8", "--seed", "3"]
    assert main(["size", *flags, "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    train = ["train", "--data", *flags, "--quiet", "--depth", "epoch", "--cache"]
    assert main([*train, str(found["least_cache"])]) == main([*train, f"{found['least_cache_bytes']}B"]) == 0
    capsys.readouterr()
    assert main([*train, str(found["least_cache"] - 1)]) == 1
    assert f"set --cache to {found['least_cache']} or more" in capsys.readouterr().err


def test_without_data_it_says_how_to_ask(capsys):
    assert main(["size"]) == main(["size", "--steps", "20"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("say which data, for instance `skirl size synthetic:avazu " in line for line in said)


def test_text(capsys):
    assert main(["size", *FLAGS, "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "depth 200" in out and "Use --cache" in out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--step-ms", "0"], "--step-ms is 0.0: set it to milliseconds above 0"),
        (["--page", "page.txt"], "name a file that ends in .html"),
        (["--link", "fast"], "write it RATE,DELAY"),
    ],
)
def test_wrong_flags(flags, sentence, capsys):
    assert main(["size", *FLAGS, *flags]) == 2
    assert sentence in re.sub(r"[\s│]+", " ", "".join(capsys.readouterr()))


def test_the_page_in_a_browser(tmp_path, browse):
    page = tmp_path / "pages" / "size.html"
    result = Size.of(
        data="synthetic:tiny", dim=8, batch=64, steps=40, model="dlrm-tiny", page=page, reduce=True, quiet=True
    ).run()
    text = page.read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), "the page would fetch something"
    dom = browse(page)
    assert result["sentence"] in dom
    assert dom.count("<polyline") == len(result["curves"]) + 2 + 2
    assert "NaN" not in dom and "nan" not in re.sub(r"<[^>]*>", "", dom)
    assert mistakes(browse, tmp_path, text) == NONE


@pytest.mark.parametrize(("model", "beside"), [("dlrm-tiny", 0), ("wide-deep-tiny", 1), ("deepfm-tiny", 1)])
@pytest.mark.parametrize(("optimizer", "state"), [("rowwise-adagrad", 0), ("adam", 2)])
def test_smaller_rows_are_the_models_records(model: Any, beside: int, optimizer: Any, state: int) -> None:
    found = Size.of(
        data="synthetic:tiny", model=model, optimizer=optimizer, dim=8, batch=64, steps=20, reduce=True, quiet=True
    ).run()
    for kind, dim in zip(found["reductions"], (8, 4, 2, 8), strict=True):
        weights = dim + beside
        numbers = weights + (state * weights or 1)
        half = "16 bits" in kind["rows as"]
        assert kind["record_bytes"] == (2 * (numbers + numbers % 2) if half else 4 * numbers), (
            "the record of the engine"
        )
    assert found["reductions"][0]["cache_rows"] == found["advice"]["cache"]
    assert found["reductions"][0]["touched_bytes"] == found["bytes"]["touched"], "what the other lines count"


def test_data_is_named_as_for_training_or_without_its_flag(capsys):
    data, *rest = FLAGS
    for named in (["--data", data, *rest], [*rest, data]):
        assert main(["size", *named, "--json", "--quiet"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert main(["size", data, "--data", data]) == 2
    assert "skirl size: data is given twice, with its name and without it" in capsys.readouterr().err
    assert main(["size", data, "--dropout", "0.5"]) == 2
    assert "skirl size: there is no flag --dropout: " in capsys.readouterr().err
