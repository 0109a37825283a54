"""`skirl place`: plans that fit, its output, its refusals; and loads as an executed run counts them."""

import json
import os
import socket
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from skirl.cli import main
from skirl.core.placement import Cut, Placement
from skirl.core.placement_plan import PlacedTable, PlacementPlan, Site
from skirl.core.tables import Table
from skirl.placement import bench, bench_runs, calibrate
from skirl.placement import place as place_module
from skirl.placement.bench import PlaceBench
from skirl.placement.bench_runs import trained
from skirl.placement.commands import Calibrate, Place
from skirl.placement.loads import Loads, Moves
from skirl.placement.place import fewest
from skirl.placement.plan import bound_of, plan_for
from skirl.store import Link, LinkStore, MemoryStore, Record, link, open_store
from skirl.store.remote.meeting import Lost
from skirl.train.flags import CacheFlags
from skirl.train.recipe import Recipe
from tests.placement.test_shares import bound
from tests.store.remote.nodes import served

TINY = ["synthetic:tiny", "--model", "dlrm-tiny", "--dim", "4", "--batch", "64", "--steps", "24", "--quiet"]
TINY += ["--cache", "touched:40%"]


def place(tmp_path, capsys, *flags: str) -> dict:
    assert main(["place", *TINY, "--json", "--force", "--out", str(tmp_path / "plan.json"), *flags]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("kind", ["criteo-kaggle", "mixed"])
def test_loads_are_those_of_an_executed_run_and_bits_those_of_one_store(kind):
    flags = PlaceBench(batch=32, steps=14, rows_scale=0.001)
    job, batches = flags.job(kind)
    whole = trained(job, job.embeddings("memory"), batches)
    with bench_runs.counted(job, batches) as loads:
        for sites in (1, 3):
            plan = bench_runs.plan_of(job, sites, bench.cuts_of(len(job.tables()), sites))
            outcome, differ, compared = bench.executed(job, batches, plan, loads)
            assert differ == 0 and compared > 15 * sites and bench.same(outcome, whole)


def test_equal_sites_get_a_hash(tmp_path, capsys):
    found = place(tmp_path, capsys, "--sites", "3")
    assert found["even"] and "nothing better exists" in found["sentence"] and found["imbalance"] < 1.2
    plan = PlacementPlan.load(tmp_path / "plan.json")
    assert all(table.cut == Cut.even(range(3)) for table in plan.tables)
    plan.check([(t.name, t.rows, t.dim) for t in Recipe.of(data="synthetic:tiny", model="dlrm-tiny", dim=4).tables()])
    assert sum(site["held"] for site in found["sites"]) == found["held"]


def test_unlike_sites_are_busy_equally_long_and_keep_to_their_memory(tmp_path, capsys, monkeypatch):
    found = place(tmp_path, capsys, "--rates", "4Gbit", "2Gbit", "1Gbit")
    assert not found["even"] and found["even_vs_this"] > 1.3
    held = found["held"]
    tight = [str(held // 4), str(held // 3), str(held // 2)]
    planned = []
    monkeypatch.setattr(place_module, "plan_for", lambda *args: planned.append(plan_for(*args)) or planned[-1])
    tight_flags = ["--rates", "4Gbit", "2Gbit", "1Gbit", "--memory", *(f"{n}B" for n in tight)]
    found = place(tmp_path, capsys, *tight_flags)
    assert len(planned) == 1 and planned[0].plan == PlacementPlan.load(tmp_path / "plan.json")
    assert all(site["held"] <= site["memory"] for site in found["sites"]) and found["even_over_memory"]
    over = any(of > site["memory"] for of, site in zip(found["before"]["held"], found["sites"]))
    assert found["before"]["over_memory"] == over
    lines = Place.summary(Place.of(data="synthetic:tiny", model="dlrm-tiny", dim=4, out=None), found)
    assert ("as long as this plan, but exceeds a site's memory; its busiest" in lines["before"]) == over
    assert "an even hash takes" in lines["time"] and lines["time"].endswith(", but exceeds a site's memory")


def test_the_fewest_sites_that_hide(tmp_path, capsys):
    found = place(tmp_path, capsys, "--sites", "auto", "--rates", "10Mbit", "--step-ms", "1")
    assert len(found["sites"]) > 1 and found["hidden"] > 0.9
    assert len(place(tmp_path, capsys, "--sites", "auto", "--rates", "10Gbit", "--step-ms", "1")["sites"]) == 1


def test_few_numbers_are_tried_for_the_fewest():
    """Each number tried takes a pass over the run."""
    for least, wanted, most in [(1, 1, 9), (1, 2, 9), (5, 9, 9), (7, 7, 7), (3, 700, 1024), (1, 1024, 1024)]:
        tried: list[int] = []
        assert fewest(lambda n, tried=tried, wanted=wanted: tried.append(n) or n >= wanted, least, most) == wanted
        assert len(tried) <= 2 * int(wanted - least + 1).bit_length() and len(set(tried)) == len(tried)
        assert max(tried) <= 2 * wanted - least
    assert fewest(lambda n: False, 1, 1024) is None and fewest(lambda n: True, 1025, 1024) is None


def test_a_run_with_larger_rows_than_planned_is_refused_and_makes_no_folder(tmp_path, capsys):
    stores = [f"disk:{tmp_path}/rows/{site}" for site in "ab"]
    place(tmp_path, capsys, "--stores", *stores, "--memory", "1MiB")
    plan = f"placed:{tmp_path}/plan.json"
    for flags, says in (
        (["--dim", "8"], "has dim 4 in the plan and 8 in the model: make the plan for this model"),
        (
            ["--optimizer", "adam"],
            "takes 20 bytes with its optimizer state in the plan and 48 in this run, so its rows",
        ),
    ):
        assert main(["train", "--data", *TINY, "--run", "none", "--store", plan, *flags]) in (1, 2)
        said = capsys.readouterr().err.strip()
        assert said.startswith(f"skirl train: --store is '{plan}': ") and says in said and "\n" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert main(["train", "--data", *TINY, "--run", "none", "--store", plan]) == 0


def test_what_people_read(tmp_path, capsys):
    flags = ["--rates", "4Mbit", "1Mbit", "--step-ms", "5", "--trainers", "2", "--out", str(tmp_path / "p.json")]
    assert main(["place", *TINY, *flags]) == 0
    said = capsys.readouterr().out
    for text in (
        "moved",
        "site-0",
        "site-1",
        "times that of parts with exactly their shares; an even hash takes ",
        "hidden",
        "round robin takes ",
        "2 trainers, a step",
        "as pooled: ",
        f"--store placed:{tmp_path / 'p.json'}",
    ):
        assert text in said


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--sites", "0"], "--sites is 0: set it to 1 to 1024, or auto"),
        (["--sites", "auto"], "--sites is auto: set --step-ms and one rate"),
        (
            ["--sites", "3", "--rates", "1Gbit", "2Gbit"],
            "--rates is 1Gbit 2Gbit, and there are 3 sites: name one for each",
        ),
        (["--rates", "fast", "slow"], "--rates has 'fast': write a rate like 10Gbit"),
        (["--memory", "much"], "--memory is 'much': set it to a size like 4GiB"),
        (["--stores", "placed:x.json", "memory"], "site 'site-0' has store 'placed:x.json'"),
        (["--stores", "disk:a", "disk:a"], None),
        (
            ["--stores", "foo:x", "memory"],
            "site 'site-0' has store 'foo:x': set it to memory, disk:FOLDER, rpc://HOST:",
        ),
        (["--stores", "memory", "link:9Gbit,0us:disk:"], "site 'site-1' has store 'link:9Gbit,0us:disk:': set it to"),
        (["--stores", "link:fast:memory", "memory"], "site 'site-0': link is 'fast': write it RATE,DELAY"),
        (
            ["--stores", "rpc://somewhere", "memory"],
            "site 'site-0': store is 'rpc://somewhere': write it rpc://HOST:PORT",
        ),
        (["--out", "plan.toml"], "--out is 'plan.toml': name a file that ends in .json"),
        (["--cache", "auto"], "--cache is 'auto'"),
        (["--memory", "1KiB"], " too little: give them more"),
    ],
)
def test_wrong_flags_are_one_sentence_and_no_file(tmp_path, capsys, flags, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["place", *TINY, *flags]) in (1, 2)
    said = capsys.readouterr().err.strip()
    assert said.startswith("skirl place: ") and "\n" not in said and (text or "have one store, disk:a") in said
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    "command", [["place", *TINY], ["place", "list", *TINY[:-2]], ["place", "tables", "t.json"], ["place", "costs"]]
)
def test_a_file_is_replaced_only_if_that_is_asked(tmp_path, capsys, command):
    kept = tmp_path / "kept.json"
    kept.write_text("mine")
    assert main([*command, "--out", str(kept)]) == 2
    says = f"--out is {kept}, which already exists: name another file, or add --force to replace it"
    assert says in capsys.readouterr().err and kept.read_text() == "mine"


def test_a_store_is_measured_and_nothing_stays(tmp_path):
    found = Calibrate(f"disk:{tmp_path}/new", width=5, rows=100, seconds=0.01).run()
    assert found["bytes_a_second"] == min(found["read"], found["written"]) > 0 and not list(tmp_path.iterdir())


def test_memory_nodes_are_measured_and_hold_no_rows_afterwards():
    with served(2) as nodes:
        for spec in (nodes.spec, f"link:80Gbit,0us:{nodes.spec}"):
            found = Calibrate(spec, width=5, rows=100, seconds=0.05).run()
            assert found["bytes_a_second"] == min(found["read"], found["written"]) > 0 and found["store"] == spec
        assert all(list(node.served) == [999999999] for node in nodes.nodes)  # the rows of no trainer
        with open_store(f"{nodes.spec}/rank-999999999", {0: Record(5)}) as again:
            assert len(again) == 0


def test_rpc_prints_no_warnings_when_connections_end(tmp_path, monkeypatch):
    plan = PlacementPlan(
        (Site("a"), Site("b", "link:8Gbit,0us:rpc://127.0.0.1:9")), (PlacedTable("t", 9, 4, Cut.weighted([1, 1])),)
    )
    plan.save(tmp_path / "p.json")
    for made in (
        lambda: Calibrate("rpc://127.0.0.1:9"),
        lambda: Calibrate("link:8Gbit,0us:rpc://127.0.0.1:9"),
        lambda: CacheFlags(store="rpc://127.0.0.1:9"),
        lambda: CacheFlags(store=f"placed:{tmp_path}/p.json"),
    ):
        monkeypatch.setitem(os.environ, "TORCH_CPP_LOG_LEVEL", "")
        del os.environ["TORCH_CPP_LOG_LEVEL"]
        made()
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    replace(plan, sites=(Site("a"), Site("b"))).save(tmp_path / "p.json")
    del os.environ["TORCH_CPP_LOG_LEVEL"]
    assert CacheFlags(store=f"placed:{tmp_path}/p.json") and "TORCH_CPP_LOG_LEVEL" not in os.environ


def test_it_says_what_it_waits_for(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(calibrate, "_SILENT", 0.05)
    monkeypatch.setenv("SKIRL_PATIENCE", "0.5")
    with pytest.raises(Lost, match=address):
        Calibrate(f"rpc://{address}").run()
    assert capsys.readouterr().err == f"waiting for memory nodes at {address}, for at most 0.5 s\n"


def test_what_memory_nodes_hold_for_a_measurement_is_bounded(monkeypatch):
    opened = list[str]()

    class Watched(MemoryStore):
        def close(self) -> None:
            opened.append(str(len(self)))
            super().close()

    def open_watched(spec: str, layout: Any) -> MemoryStore:
        opened.append(spec)
        return Watched(layout)

    monkeypatch.setattr(calibrate, "open_store", open_watched)
    monkeypatch.setattr(calibrate, "_check_nodes", lambda spec: None)
    monkeypatch.setattr(calibrate, "_ON_NODES", 3 * 100 * 5 * 4)
    Calibrate("rpc://127.0.0.1:29400", width=5, rows=100, seconds=0.05).run()
    assert opened == ["rpc://127.0.0.1:29400/rank-999999999", "300"]


def test_a_plan_by_hand_with_an_unknown_store_is_refused(tmp_path, capsys):
    place(tmp_path, capsys, "--sites", "2")
    path = tmp_path / "plan.json"
    body = json.loads(path.read_text())
    body["sites"][1]["store"] = "foo:x"
    del body["digest"]
    path.write_text(json.dumps(body))
    says = "site 'site-1' has store 'foo:x': set it to memory, disk:FOLDER, rpc://HOST:PORT or link:RATE,DELAY:STORE"
    assert main(["place", *TINY, "--from", str(path), "--out", str(tmp_path / "new.json")]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "new.json").exists()
    with pytest.raises(ValueError, match=f"plan.json: {says}"):
        open_store(f"placed:{path}", {0: Record(5)})


def test_calls_that_are_larger_than_what_a_measurement_may_hold_are_refused(monkeypatch):
    monkeypatch.setattr(calibrate, "open_store", lambda *of: pytest.fail("it was opened"))
    for store, where, mib in (("rpc://127.0.0.1:9", "on memory nodes", 64), ("disk:no such", "in a store", 1024)):
        most = (mib << 20) // (65 * 4)
        held = (
            f"a measurement holds at most {float(mib) if mib < 1024 else 1.0} {'MiB' if mib < 1024 else 'GiB'} {where}"
        )
        for spec in (store, f"link:8Gbit,0us:{store}"):
            with pytest.raises(
                ValueError, match=f"^rows is {most + 1}: a call has .*{held}: set it to at most {most}$"
            ):
                Calibrate(spec, rows=most + 1).run()
        with pytest.raises(ValueError, match=f"^width is 9000000000: .*{held}: set it to at most {mib << 18}$"):
            Calibrate(store, width=9_000_000_000, rows=1).run()


def test_a_folder_may_be_called_like_nodes(tmp_path):
    spec = f"disk:{tmp_path}/a:rpc:b"
    for store in (spec, f"link:80Gbit,0us:{spec}"):
        found = Calibrate(store, width=5, rows=100, seconds=0.01).run()
        assert found["bytes_a_second"] > 0 and not list(tmp_path.iterdir())


def test_nodes_that_keep_rows_on_disk_are_not_measured(tmp_path):
    with served(1, rows=f"disk:{tmp_path}") as nodes:
        with pytest.raises(ValueError, match="keep rows on disk, where those of a measurement would stay"):
            Calibrate(nodes.spec, width=5, rows=100, seconds=0.05).run()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("store", "text"),
    [
        ("placed:plan.json", "measure the store of each of its sites"),
        ("rpc://somewhere", "write it rpc://HOST:PORT"),
        ("rpc://127.0.0.1:29400/rank-1", "leave /rank-N out"),
    ],
)
def test_a_store_that_cannot_be_measured_is_refused(store, text):
    with pytest.raises(ValueError, match=f"^store is '{store}': {text}"):
        Calibrate(store)


class Clock:
    """A clock that advances when something sleeps, and by a second for each random draw."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def default_rng(self, seed: int) -> Any:
        rng, clock = np.random.Generator(np.random.PCG64(seed)), self

        class Drawn:
            def __getattr__(self, name: str) -> Any:
                clock.sleep(1)
                return getattr(rng, name)

        return Drawn()


def test_the_rate_of_a_link_is_found_and_memory_is_bounded(monkeypatch):
    """Only the store's calls are between the two readings of the clock, and after some number of rows, earlier ones are
    rewritten."""
    clock, written = Clock(), set[int]()

    class Watched(MemoryStore):
        def _write(self, kind, keys, rows) -> None:
            written.update(keys.tolist())
            super()._write(kind, keys, rows)

    monkeypatch.setattr(link, "time", clock)
    monkeypatch.setattr(calibrate, "time", clock)
    monkeypatch.setattr(np.random, "default_rng", clock.default_rng)
    monkeypatch.setattr(calibrate, "_MOST_BYTES", 4 * 10_000 + 100)
    monkeypatch.setattr(calibrate, "open_store", lambda spec, layout: LinkStore(Watched(layout), Link(rate=1e6)))
    found = Calibrate("link:8Mbit,0us:memory", width=25, rows=100, seconds=0.1).run()  # 10 ms per call
    for name in ("read", "written", "bytes_a_second"):
        assert found[name] == pytest.approx(1e6, rel=0.1)
    assert found["rate"] == "8Mbit" and len(written) == 400


# Plans for loads made by hand


def loads_of(rng, tables: int, steps: int = 6) -> Loads:
    loads = Loads(tables, [8, 24])
    for _ in range(steps):
        part = [np.unique(rng.integers(0, tables, 60)[:, None] << 48 | rng.integers(0, 50, (60, 1))) for _ in range(6)]
        loads.add(Moves(part[:2], part[2:4], part[4:]))
    return loads


def test_moves_come_back_as_they_were():
    rng, given = np.random.default_rng(1), []
    with Loads(3, [8, 24]) as loads:
        for _ in range(3):
            parts = [rng.integers(0, 1 << 50, rng.integers(0, 9)) for _ in range(6)]
            given.append(Moves(parts[:2], parts[2:4], parts[4:]))
            loads.add(given[-1])
        for which in (slice(None), slice(1, None), slice(0)):
            found = [[[k.tolist() for k in part] for part in step] for step in loads.steps(which)]
            assert found == [[[k.tolist() for k in part] for part in step] for step in given[which]]


def test_scores_are_counts_by_hand():
    with loads_of(np.random.default_rng(0), 3) as loads:
        cuts = {0: Cut((0, 20), (1, 0), "rows"), 2: Cut((0,), (1,))}
        placement = Placement(2, Cut.even([0, 1]), cuts, "sites")
        found = loads.scored(placement, slice(2, None))
        for number, moves in enumerate(loads.steps(slice(2, None))):
            wanted = np.zeros((2, 2, 2), np.int64)
            for nbytes, *parts in zip([8, 24], moves.read, moves.written, strict=True):
                for kind, keys in enumerate(parts):
                    for key in keys.tolist():
                        site = placement.site_of(np.array([key]))[0]
                        wanted[kind, 0, site] += 1
                        wanted[kind, 1, site] += nbytes
            assert found.rows_read[number].tolist() == wanted[0, 0].tolist()
            assert found.bytes_read[number].tolist() == wanted[0, 1].tolist()
            assert found.rows_written[number].tolist() == wanted[1, 0].tolist()
            assert found.bytes_written[number].tolist() == wanted[1, 1].tolist()
        total = sum(8 * len(m.new[0]) + 24 * len(m.new[1]) for m in loads.steps())
        assert found.held.sum() == total == loads.of_tables(slice(0))[2].sum()


@pytest.mark.parametrize("seed", range(4))
def test_no_site_is_over_its_memory_by_a_byte(seed):
    rng = np.random.default_rng(seed)
    tables = [Table(f"t{n}", 50, 4) for n in range(4)]
    with loads_of(rng, 4) as loads:
        held = int(loads.of_tables(slice(0))[2].sum())
        parts = rng.dirichlet([4] * 3)
        sites = [
            Site(f"s{n}", memory=int(held * 1.15 * part), rate=float(rng.integers(1, 9)))
            for n, part in enumerate(parts)
        ]
        plan = plan_for(loads, tables, sites, slice(0, 3)).plan
        again = plan_for(loads, tables, sites, slice(0, 3)).plan
        assert again == plan
        assert all(of <= site.memory for of, site in zip(loads.scored(plan.placement).held.tolist(), sites))
        short = [Site(s.name, memory=(s.memory or 0) // 2, rate=s.rate) for s in sites]
        with pytest.raises(ValueError, match=r" KiB too little: give them more memory, or add \d+ more such sites"):
            plan_for(loads, tables, short, slice(0, 3))


def test_the_bound_is_that_of_the_memory_there_is():
    """Not the memory that a plan leaves free, so that rows divided by chance exceed no site's memory."""
    with loads_of(np.random.default_rng(2), 4) as loads:
        which = slice(2, None)
        read, written, held = loads.of_tables(which)
        caps, rates = [int(held.sum() * part) for part in (0.3, 0.3, 0.45)], [4.0, 2.0, 1.0]
        sites = [Site(f"s{n}", memory=cap, rate=rate) for n, (cap, rate) in enumerate(zip(caps, rates))]
        moved = max(read, written, key=sum)
        assert bound_of(loads, sites, which) == pytest.approx(bound(moved, held, rates, caps), rel=1e-6)


def test_more_sites_than_rows():
    with loads_of(np.random.default_rng(0), 1) as loads, pytest.raises(ValueError, match="3 sites for 2 rows"):
        plan_for(loads, [Table("a", 2, 4)], [Site(f"s{n}") for n in range(3)], slice(None))


def test_place_without_a_file():
    flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 64, "steps": 12, "quiet": True}
    assert Place.of(**flags, cache="touched:60%", sites=2, depth="epoch", out=None).run()["out"] is None
