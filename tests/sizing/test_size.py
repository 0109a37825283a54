"""`skirl size`: its text and its JSON."""

import pytest

import skirl
from skirl.cli import main
from skirl.data import Synthetic

FLAGS = ["synthetic:tiny", "--model", "dlrm-tiny", "--dim", "8", "--batch", "64", "--steps", "40", "--seed", "3"]


def test_one_line_of_json(as_json):
    result = as_json("size", *FLAGS, "--quiet", "--link", "1Gbit,100us", "--step-ms", "5")
    assert result["bytes"]["touched"] == result["touched"] * 4 * (8 + 1)
    advice = result["advice"]
    assert result["sentence"].startswith(f"Use --cache {advice['cache']} --depth {advice['depth']}: ")
    assert result["step_ms_that_hides"] > 0


def test_what_it_advises_can_be_run_and_moves_what_it_says(as_json):
    advice = as_json("size", *FLAGS, "--quiet")
    cache, depth = str(advice["advice"]["cache"]), str(advice["advice"]["depth"])
    ran = as_json("train", "--data", *FLAGS, "--cache", cache, "--depth", depth, "--quiet")
    counted = next(p for p in advice["curves"][f"depth {depth}"] if p["cache"] == int(cache))
    assert ran["counters"]["fetched"] == counted["moved"] > 0
    assert ran["counters"]["new"] == advice["touched"]


def test_the_least_cache_runs_and_one_row_less_does_not(capsys, as_json):
    flags = [*FLAGS[:-4], "--steps", "8", "--seed", "3"]
    found = as_json("size", *flags, "--quiet")
    train = ["train", "--data", *flags, "--quiet", "--depth", "epoch", "--cache"]
    assert main([*train, str(found["least_cache"])]) == main([*train, f"{found['least_cache_bytes']}B"]) == 0
    capsys.readouterr()
    assert main([*train, str(found["least_cache"] - 1)]) == 1
    assert f"set --cache to {found['least_cache']} or more" in capsys.readouterr().err


def test_a_loader_of_ones_own_gets_the_same_lines(capsys):
    flags = [*FLAGS[:-4], "--steps", "8", "--seed", "3", "--optimizer", "adam"]
    flags += ["--link", "1Gbit,100us", "--step-ms", "5"]
    assert main(["size", *flags, "--quiet"]) == 0
    stream = Synthetic("tiny", batch_size=64, batches=8, seed=3)
    tables, loader = stream.tables(dim=8), [(batch.labels, batch.sparse) for batch in stream]
    options = {"optimizer": skirl.Adam(lr=0.1), "link": "1Gbit,100us", "step_ms": 5}
    advice = skirl.size(loader, tables, sparse=lambda batch: batch[1], **options)
    command, own = (f"  ids {part}" for part in capsys.readouterr().out.split("  ids ")[1:])
    assert own == command.replace("--cache ", "cache=").replace(" --depth ", ", depth=")
    assert f"Use cache={advice['cache']}, depth={advice['depth']}: " in own
    with pytest.raises(ValueError, match="no whole batch"):
        skirl.size([], tables)
