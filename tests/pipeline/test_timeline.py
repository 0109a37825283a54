"""The timeline: every step in every lane, correct times, and a file that opens however the run ended."""

import json
import logging
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import skirl
from skirl.cli.train import Train
from skirl.pipeline.stages import LANES, Timeline
from tests.loops import wait_for
from tests.warm import COMMAND

TINY: dict[str, Any] = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 8, "batch": 64, "cache": "600"}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file, each with its lane. If the run was killed, all up to that moment."""
    lines = path.read_text().split("\n")[:-1]  # a last line without an end is incomplete
    found = [json.loads(line.removeprefix("[").removesuffix(",")) for line in lines]
    lanes = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    return [{**event, "lane": lanes[event["tid"]]} for event in found if event["ph"] == "X"]


def done(events: list[dict[str, Any]], what: str) -> list[int]:
    return [event["args"]["step"] for event in events if event["name"] == what]


def end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def test_a_run_has_every_step_in_every_lane(tmp_path):
    path = tmp_path / "run.json"
    result = Train.of(**TINY, steps=40, quiet=True, trace=path).run()
    whole = json.loads(path.read_text())  # strictly valid JSON once closed
    assert [e["args"]["name"] for e in whole if e["name"] == "thread_name"] == list(LANES)
    events = read(path)
    for what in ("plan", "fetch", "load", "compute"):
        assert done(events, what) == list(range(1, 41)), what
    assert sorted(done(events, "write")) == list(range(1, 41))
    assert set(done(events, "read")) >= set(range(1, 41)) == set(done(events, "enter"))
    moved = result["counters"]
    for what, name in (("fetched", "fetched"), ("new", "new"), ("leaving", "written")):
        assert sum(e["args"][what] for e in events if e["name"] == "plan") == moved[name]
    assert sum(e["args"]["rows"] for e in events if e["name"] == "fetch") == moved["fetched"] - moved["forwarded"]
    assert sum(e["args"]["rows"] for e in events if e["name"] == "write") == moved["written"]
    for lane in LANES:  # a thread does one thing at a time
        mine = sorted((e for e in events if e["lane"] == lane), key=lambda e: e["ts"])
        assert mine and all(end(a) <= b["ts"] + 0.2 for a, b in pairwise(mine)), lane
    # The times equal those of the result.
    first = min(end(e) for e in events if e["name"] == "compute")  # the result's begin after the first step
    waited = sum(e["dur"] for e in events if e["name"] == "wait" and e["ts"] > first - e["dur"]) / 1e6
    assert waited == pytest.approx(result["movement"]["stall"], abs=1e-4)


def loop(trace):
    """A user's own loop over one table, whose rows are fetched again and again."""
    embeddings = skirl.EmbeddingBagCollection([skirl.Table("a", 100, 2)], optimizer=skirl.SGD(lr=0.1), cache=4)
    loader = [skirl.KeyedJagged.one_hot(["a"], torch.tensor([[i % 6]])) for i in range(12)]
    with skirl.lookahead(loader, embeddings, sparse=lambda ids: ids, trace=trace) as ahead:
        for _ in range(2):
            for ids in ahead:
                embeddings(ids)["a"].sum().backward()
    return embeddings


def test_the_file_of_a_killed_run_opens(python, tmp_path):
    path = tmp_path / "run.json"
    flags = "--data synthetic:tiny --model dlrm-tiny --dim 8 --batch 64 --cache 600 --steps 1000000 --quiet"
    with python.start(COMMAND, "train", *flags.split(), "--trace", str(path)) as run:
        wait_for(lambda: path.exists() and path.stat().st_size > 64 << 10, 60)
        run.kill()
    events = read(path)
    assert done(events, "compute")[:50] == list(range(1, 51))
    text = path.read_text()
    assert text.endswith(",\n")  # viewers accept an array without its closing bracket
    assert len(json.loads(text[:-2] + "]")) > len(events)


def test_a_full_disk_ends_the_timeline_and_not_the_run(caplog):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    timeline = Timeline("/dev/full")
    with caplog.at_level(logging.WARNING, "skirl"):
        timeline.add("fetch", "fetch", 0, 0.0, 1.0)
        timeline.close()
    assert loop("/dev/full").engine.counters.fetched > 0
    assert "ends here: the disk is full" in caplog.text


def test_a_file_that_cannot_be_made_is_told_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        loop(tmp_path / "nowhere" / "run.json")
    embeddings = loop(tmp_path / "run.json")
    with (
        pytest.raises(FileNotFoundError),
        skirl.lookahead([], embeddings, trace=tmp_path / "nowhere" / "run.json"),
    ):
        pass
    with skirl.lookahead([], embeddings):  # the embeddings were closed
        pass
