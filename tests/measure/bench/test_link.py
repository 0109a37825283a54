"""Training over a limited link: bytes match the plan, bits are equal in all ways, and the roof is the largest of three."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from skirl.core.placement import Placement
from skirl.core.tables import Schema
from skirl.measure.bench import limited, link
from skirl.measure.bench.limited import Job
from skirl.measure.bench.link import LinkSpeed, judged, measured
from skirl.measure.bench.namespaces import two_namespaces, why_not
from skirl.store.link import Link
from skirl.train.fingerprints import rows_of
from skirl.train.report.plot import short
from tests.threads_as_trainers import InProcess

JOB = Job(dense=600, batch=16, dim=4, rows_scale=0.001, read=3, steps=3, rounds=1)


@pytest.fixture(scope="module")
def ranks():
    return InProcess.run(2, lambda peers: limited.of_rank(JOB, peers))


def test_bytes_are_those_of_the_plan(ranks):
    """A value and a gradient for each row read from the other trainer, and half of the dense part in each direction."""
    schema, placement = Schema.of(JOB.source.tables(JOB.dim)), Placement.even(2)
    vectors = 0
    for reader in range(2):
        for part in JOB.source.sharded(reader, reader + 1, 2):
            vectors += 2 * int((placement.site_of(np.unique(rows_of([part], schema))) != reader).sum())
    hidden = 600 // (26 * 4 + 2)
    dense = (26 * 4 + 1) * hidden + hidden + 1
    for way in limited.WAYS:
        sent = [rank[way]["sent"] for rank in ranks]
        moved = sum(sent[rank][name] for rank in range(2) for name in ("rows", "moves") if name in sent[rank])
        assert moved == pytest.approx(4 * JOB.dim * vectors / 3 + 2 * 26, abs=2 * 26)  # and which tables have gradients
        assert sum(part["dense"] for part in sent) == pytest.approx(2 * 4 * dense, rel=0.1)
        for rank in range(2):
            mine, other = ranks[rank][way], ranks[1 - rank][way]
            assert mine["sent"]["rows"] == other["received"]["rows"]
    assert sum(ranks[0]["local"]["sent"].values()) == 0
    assert sum(rank["hidden"]["sent"]["moves"] for rank in ranks) > 0
    assert sum(rank["all_critical"]["sent"]["moves"] for rank in ranks) == 0


def test_a_way_changes_no_bit(ranks):
    waiting = InProcess.run(2, lambda peers: limited.of_rank(replace(JOB, rounds=2), peers, ("all_critical",)))
    for rank, other in zip(ranks, waiting):
        steps = min(len(rank["losses"]), len(other["losses"]))
        assert steps >= 15 and rank["losses"][:steps] == other["losses"][:steps]


def test_a_roof_is_the_largest_of_three():
    def rank(local, seconds, cpu, sent, received, way="hidden"):
        turn = {"waited": {"rows": seconds / 4, "dense": 0.0}, "sent": {"rows": sent}, "received": {"rows": received}}
        return {"local": {"seconds": local}, way: {"seconds": seconds, "cpu": cpu, **turn}}

    def of(**more):
        facts = {"local": 0.1, "seconds": 0.4, "cpu": 0.1, "sent": 100, "received": 200} | more
        return judged([rank(**facts)] * 2, ("hidden",), Link(1000.0), cores=2)

    assert of()["vs_roof"] == pytest.approx(0.4 / 0.2) and of()["bound"] == "wire"
    assert of(local=0.3)["vs_roof"] == pytest.approx(0.4 / 0.3) and of(local=0.3)["bound"] == "compute"
    assert of(cpu=0.25)["vs_roof"] == pytest.approx(0.4 / 0.25) and of(cpu=0.25)["bound"] == "cores"
    assert of()["critical_share"] == 0.25 and of()["vs_all_critical"] is None
    two = [rank(0.1, 0.2, 0.1, 1, 1) | rank(0.1, 0.3, 0.1, 1, 1, "all_critical")] * 2
    assert judged(two, ("hidden", "all_critical"), Link())["vs_all_critical"] == pytest.approx(1.5)


def test_a_delay_is_added_to_each_message():
    def swapped(peers):
        limited.delayed(peers, 0.05)
        began = time.perf_counter()
        come = peers.channel("rows").swap(torch.full((2, 1), float(peers.rank)), [1, 1], [1, 1])
        return come.flatten().tolist(), time.perf_counter() - began

    for come, seconds in InProcess.run(2, swapped):
        assert come == [0.0, 1.0] and seconds >= 0.05


@pytest.mark.parametrize("ways", [limited.WAYS, ("hidden",)])
def test_the_command(ranks, ways, monkeypatch, tmp_path):
    monkeypatch.setattr(link, "trained", lambda *_: [[rank, rank] for rank in ranks])
    flags = LinkSpeed(links=("loopback",), dense=(600, 1200), plot=tmp_path / "link.svg", ways=ways)
    result = flags.run()
    assert result["vs_roof"] == max(point["vs_roof"] for point in result["points"])
    point, text = result["points"][0], flags.summary(result)["loopback, 600 dense"]
    assert json.loads(json.dumps(result)) and f"vs_roof {point['vs_roof']:.2f}, critical_share" in text
    drawn = (tmp_path / "link.svg").read_text()
    assert f"600, {short(point['vs_roof'])}<" in drawn and ("vs_all_critical" in drawn) == (len(ways) == 2)
    assert drawn.count("<polyline") == 2 * len(ways) + 2  # each ratio of one link, each way and the roof


def test_wrong_flags_are_named(monkeypatch):
    with pytest.raises(ValueError, match="link is 'slow': write it RATE,DELAY"):
        LinkSpeed(links=("slow",))
    with pytest.raises(ValueError, match="ways is"):
        LinkSpeed(ways=("other",))
    monkeypatch.setattr(link, "why_not", lambda: "no network namespace can be made here")
    with pytest.raises(OSError, match="set it to loopback, which needs none"):
        LinkSpeed().run()


@pytest.mark.slow
def test_over_a_limited_link():
    """The bytes are those over loopback, at no more than the link's rate. Times are printed for people to judge."""
    if why := why_not():
        pytest.skip(why)
    rate, job = 1.25e7, Job(dense=20_000, batch=256, dim=16, rows_scale=0.01, read=4, steps=8, rounds=2)
    with two_namespaces(rate) as names:
        [slow] = measured(2, [job], limited.WAYS, names)
    [fast] = measured(2, [job], limited.WAYS)
    facts = judged(slow, limited.WAYS, Link(rate))
    print({name: facts[name] for name in ("vs_roof", "bound", "critical_share", "vs_all_critical")})
    assert [one["losses"] for one in slow] == [one["losses"] for one in fast]
    for way in limited.WAYS:
        for one, other in zip(slow, fast):
            assert one[way]["sent"]["dense"] == pytest.approx(other[way]["sent"]["dense"])
        assert facts["ways"][way]["seconds"] >= 0.9 * facts["ways"][way]["roof"]["wire"]
