"""`skirl place --from`: as few rows move as possible, and no more than allowed, counted key by key; and the page."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.cli import main
from skirl.core.placement import Cut
from skirl.core.placement_plan import PlacedTable, PlacementPlan, Site
from skirl.core.tables import Table
from skirl.placement import place
from skirl.placement.flags import rates_of
from skirl.placement.loads import Loads, Moves
from skirl.placement.moves import Old, moved_bytes, near, on_the_way, shares_of, shifted
from skirl.placement.plan import over_memory, plan_for
from skirl.train.recipe import Recipe

TINY = ["synthetic:tiny", "--model", "dlrm-tiny", "--dim", "4", "--batch", "64", "--steps", "16", "--quiet"]
TINY += ["--cache", "touched:40%"]
SHARES = st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any)


def widths(cut: Cut, sites: int) -> list[int]:
    found = [0] * sites
    for begin, end, site in cut.ranges:
        found[site] += end - begin
    return found


@given(SHARES, SHARES)
def test_a_cut_with_other_shares_moves_what_it_must_and_no_more(before, after):
    check_shares(before, after)


def some_shares() -> None:
    for before, after in (([3, 1, 2], [1, 1, 1]), ([1, 1], [2, 0, 1]), ([5, 2, 3, 1], [1, 4])):
        check_shares(before, after)


def check_shares(before: list[int], after: list[int]) -> None:
    sites = max(len(before), len(after))
    old = shifted(Cut.weighted(before), [*before[::-1], *[0] * sites])  # in several ranges per site
    goal = [part / sum(after) for part in [*after, *[0] * (sites - len(after))]]
    new = shifted(old, goal)
    assert new.starts[0] == 0 and np.allclose(shares_of(new, sites), goal, atol=1e-8)
    edges = sorted({*old.starts, *new.starts, old.end})
    stays = 0
    for begin, end in pairwise(edges):
        here = [next(of for a, b, of in cut.ranges if a <= begin < b) for cut in (old, new)]
        stays += (end - begin) * (here[0] == here[1])
    least = sum(map(min, widths(old, sites), widths(new, sites)))
    assert stays == least, "a site keeps all that it may"


def loads_of(seed: int, tables: int = 3, keys: int = 400) -> Loads:
    rng = np.random.default_rng(seed)
    loads = Loads(tables, [8])
    for step in range(4):
        rows = step * keys + np.arange(keys)
        new = np.sort(rng.integers(0, tables, keys) << 48 | rows)
        often = new[rng.random(keys) < (1 + (new >> 48)) / tables]  # later tables move more per byte held
        loads.add(Moves([often], [often], [new]))
    return loads


def plan_of(cuts, sites) -> PlacementPlan:
    tables = (PlacedTable(f"t{n}", 1 << 20, 1, cut) for n, cut in enumerate(cuts))
    return PlacementPlan(tuple(sites), tuple(tables))


def by_hand(loads: Loads, old: PlacementPlan, new: PlacementPlan) -> int:
    before, after = old.placement, new.placement
    moved = 0
    for moves in loads.steps():
        was, now = (at.site_of(moves.new[0]).tolist() for at in (before, after))
        moved += 8 * sum(a != b for a, b in zip(was, now, strict=True))
    return moved


@pytest.mark.parametrize("seed", range(2))
def test_no_more_moves_than_may_and_more_time_is_won_the_more_may(seed):
    sites = [Site(f"s{n}", rate=float(rate)) for n, rate in enumerate((4, 2, 1))]
    old = plan_of([Cut.even(range(3))] * 3, sites)
    wanted = plan_of([Cut.weighted([4, 2, 1])] * 3, sites)
    with loads_of(seed) as loads:

        def busy(plan: PlacementPlan) -> float:
            return loads.scored(plan.placement).seconds([4, 2, 1])

        def at(most: int | None):
            seen = Old.seen_from(old, sites)
            return near(loads, seen, wanted, most, busy, lambda plan: over_memory(loads, plan))

        all_of = at(None)
        assert all_of.whole and all_of.nbytes == by_hand(loads, old, all_of.plan)
        assert all_of.nbytes < 0.8 * moved_bytes(loads, [t.cut for t in old.tables], [t.cut for t in wanted.tables], 3)
        times = [busy(old)]
        for share in (0.25, 0.5, 0.75):
            found = at(int(share * all_of.nbytes))
            assert found.nbytes == by_hand(loads, old, found.plan) <= share * all_of.nbytes and not found.whole
            times.append(busy(found.plan))
        assert sorted([*times, busy(all_of.plan)], reverse=True) == [*times, busy(all_of.plan)] and times[0] > times[-1]
        assert at(0).nbytes == 0 and busy(at(0).plan) == busy(old)


def test_sites_that_are_left_out_are_emptied_and_memory_is_kept_to():
    three = [Site(f"s{n}") for n in range(3)]
    old, two = plan_of([Cut.even(range(3))] * 3, three), three[:2]
    wanted = plan_of([Cut.even(range(2))] * 3, two)
    with loads_of(5) as loads:
        gone = int(loads.scored(old.placement).held[2])
        seen = Old.seen_from(old, two)
        assert seen.sites == (0, 1, 2)
        none = lambda plan: np.zeros(2)  # noqa: E731
        with pytest.raises(ValueError, match=rf"sites that are left out take .* set --move-at-most {gone}B"):
            near(loads, seen, wanted, gone - 1, lambda plan: 0.0, none)
        found = near(loads, seen, wanted, gone, lambda plan: 0.0, none)
        assert found.nbytes == gone and {site for t in found.plan.tables for site in t.cut.sites} == {0, 1}
        held = loads.scored(old.placement).held
        small = [replace(three[0], memory=int(held[0]) - 800), *three[1:]]
        tight = plan_of([Cut.weighted([0.2, 1, 1])] * 3, small)
        seen = Old.seen_from(old, small)
        with pytest.raises(ValueError, match=r"site 's0' exceeds its memory by \d+ B: set --move-at-most higher"):
            near(loads, seen, tight, 80, lambda plan: 0.0, lambda plan: over_memory(loads, plan))
        assert over_memory(loads, near(loads, seen, tight, 1600, lambda plan: 0.0,
                                       lambda plan: over_memory(loads, plan)).plan).max() == 0  # fmt: skip


def test_memory_is_kept_to_where_rows_will_be():
    """Near an old plan, sites get other ranges of the hash than by the shares alone, and may get more rows by chance."""
    tables, passed = [Table(f"t{n}", 1 << 20, 1) for n in range(3)], 0
    for seed in range(4):
        with loads_of(seed) as loads:
            held = int(loads.held(plan_of([Cut((0,), (0,))] * 3, [Site("all")]).placement).sum())
            sites = [
                Site(f"s{n}", rate=float(rate), memory=int(held * rate / 7 * 1.04)) for n, rate in enumerate((4, 2, 1))
            ]
            old = Old.seen_from(plan_of([Cut.even(range(3))] * 3, sites), sites)
            over = lambda plan, loads=loads: over_memory(loads, plan)  # noqa: E731
            alone = plan_for(loads, tables, sites, slice(None)).plan
            assert over(alone).max() == 0
            if over(on_the_way(old, alone)).max() > 0:
                passed += 1
                with pytest.raises(
                    ValueError, match=r"site 's\d' would hold \d+ bytes more than its memory: give it more"
                ):
                    near(loads, old, alone, None, lambda plan: 0.0, over)
            chosen = plan_for(loads, tables, sites, slice(None), partial(on_the_way, old)).plan
            found = near(loads, old, chosen, None, lambda plan: 0.0, over)
            assert found.whole and over(found.plan).max() == 0
    assert passed, "a case in which the shares alone do not tell"


def test_from_a_plan_with_a_bound_and_a_page(tmp_path, capsys):
    old, new, page = (tmp_path / name for name in ("old.json", "new.json", "p.html"))
    tables = Recipe.of(data="synthetic:tiny", model="dlrm-tiny", dim=4).tables()
    sites = tuple(Site(f"site-{n}", f"disk:{tmp_path}/{n}") for n in range(3))
    PlacementPlan(sites, tuple(PlacedTable(t.name, t.rows, t.dim, Cut.even(range(3))) for t in tables)).save(old)
    flags = ["place", *TINY, "--from", str(old), "--rates", "4Mbit", "1Mbit", "1Mbit", "--json", "--out", str(new)]
    assert main([*flags, "--page", str(page), "--trainers", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [s["store"] for s in found["sites"]] == [f"disk:{tmp_path}/{n}" for n in range(3)] and found["whole"]
    for text in ("Loads by site and step", "Predicted against counted", "2 trainers would exchange", str(old), "<svg"):
        assert text in page.read_text()
    most = found["moves"] // 2
    assert main([*flags, "--force", "--move-at-most", f"{most}B"]) == 0
    half = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        0 < half["moves"] <= most
        and not half["whole"]
        and f"as much as --move-at-most {most}B allows" in half["sentence"]
    )
    assert half["before"]["vs_this"] > 1 and PlacementPlan.load(new).sites == tuple(
        replace(site, rate=rate) for site, rate in zip(PlacementPlan.load(old).sites, (5e5, 125e3, 125e3), strict=True)
    )


def old_plan(path: Path, rows: int = 0) -> None:
    """Write a plan of two sites with rates. `rows`: how many more rows each table has than in the model."""
    tables = Recipe.of(data="synthetic:tiny", model="dlrm-tiny", dim=4).tables()
    sites = tuple(Site(f"site-{n}", rate=5e8) for n in range(2))
    PlacementPlan(sites, tuple(PlacedTable(t.name, t.rows + rows, t.dim, Cut.even(range(2))) for t in tables)).save(
        path
    )


def test_rates_of_some_sites_are_refused(tmp_path, capsys):
    """A site without a rate would count as one byte per second."""
    old_plan(tmp_path / "old.json")
    flags = ["place", *TINY, "--from", str(tmp_path / "old.json"), "--out", str(tmp_path / "new.json"), "--sites", "3"]
    assert main(flags) in (1, 2)
    assert "site 'site-0' has a rate and site 'site-2' has none: set --rates, one for each" in capsys.readouterr().err
    assert not (tmp_path / "new.json").exists() and rates_of([Site("a"), Site("b")]) == [1.0, 1.0]


def test_a_plan_of_other_tables_is_refused_before_the_run_is_read(tmp_path, capsys, monkeypatch):
    old_plan(tmp_path / "old.json", rows=1)
    monkeypatch.setattr(place, "_counted", lambda *args: pytest.fail("it was read"))
    assert main(["place", *TINY, "--from", str(tmp_path / "old.json"), "--out", str(tmp_path / "new.json")]) in (1, 2)
    assert "in the model: make the plan for this model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--move-at-most", "2GiB"], "--move-at-most is '2GiB' and --from is not set"),
        (["--from", "gone.json"], "gone.json is not a file: name a plan that `skirl place` wrote"),
        (["--trainers", "1"], "--trainers is 1: set it to 2 to 1024"),
        (["--page", "x.png"], "--page is 'x.png': name a file that ends in .html"),
    ],
)
def test_wrong_flags_are_a_sentence(tmp_path, capsys, flags, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["place", *TINY, *flags]) in (1, 2)
    said = capsys.readouterr().err.strip()
    assert text in said and "\n" not in said and not list(tmp_path.glob("*.json"))
