"""Training over a network to a memory node: one model in all ways, bytes compared with loading on demand, and a roof
for both."""

import os
from dataclasses import replace

import pytest

from skirl.measure.bench import serve_link
from skirl.measure.bench.namespaces import why_not
from skirl.measure.bench.serve_link import MODES, OverWire, ServeLink
from skirl.store.link import Link
from tests.store.remote.nodes import leave, served

SMALL = {
    "batch": 8,
    "dim": 4,
    "warm": 8,
    "slice": 2,
    "rounds": 2,
    "rows_scale": 0.001,
    "depth": 6,
    "cache": "touched:20%",
    "threads": 1,
}


def test_all_ways_train_one_model_and_bytes_are_those_of_rows():
    leave()
    with served(1) as nodes:
        bench = OverWire(**SMALL, store=nodes.spec, modes=MODES, wire=Link(rate=1e3), beside=os.getpid())
        found = bench.run()
        setting, _ = bench._setting()
    assert found["failed"] is None and found["losses_agree"]
    assert setting.link == Link() and setting.wire == Link(rate=1e3) and setting.beside == os.getpid()
    moved = {name: facts["bytes_received"] + facts["bytes_sent"] for name, facts in found["modes"].items()}
    assert moved["resident"] == 0 < moved["on_demand"] and moved["skirl"] > 0
    assert all(bytes % 16 == 0 for bytes in moved.values()), "rows of four numbers"
    assert found["byte_ratio_on_demand"] == pytest.approx(moved["on_demand"] / moved["skirl"], abs=1e-4)
    assert max(found["roof"], key=lambda name: found["roof"][name]) == "wire", "1 kB a second"
    faster = replace(bench, wire=Link())
    assert faster._setting()[0].wire == Link()


def test_what_is_refused_and_shown(monkeypatch):
    with pytest.raises(ValueError, match="write it RATE,DELAY"):
        ServeLink(links=("fast",))
    monkeypatch.setattr(serve_link, "why_not", lambda: "network namespaces need the commands ip and tc")
    with pytest.raises(OSError, match="and network namespaces need the commands ip and tc: run it where"):
        ServeLink().run()
    point = {"link": "1Gbit", "vs_roof": 1.1, "bound": "wire", "vs_on_demand": 2.0, "byte_ratio_on_demand": 2.2}
    lines = ServeLink().summary({"points": [point | {"roof": {"wire": 3.0}, "ms": {"skirl": 3.3}}]})
    assert lines["1Gbit"].startswith("1.100 roofs (wire); 2.00 times on demand's speed")


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_link_between_namespaces():
    found = ServeLink(links=("1Gbit",), batch=256, dim=16, rounds=2, warm=6, slice=3).run()
    assert found["failed"] is None and found["vs_roof"][0] > 0 and found["points"][0]["losses_agree"]
