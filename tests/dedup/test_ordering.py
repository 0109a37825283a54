"""`skirl bench dedup --part order` and `--part cache`: what they compare, and what they report."""

from pathlib import Path
from typing import Any

import pytest

from skirl.data.flags import DataFlags
from skirl.dedup import ordering
from skirl.dedup.bench import Dedup
from skirl.dedup.caching import cached, told_of


def test_each_order_is_that_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[tuple[float, ...]]] = {}

    def trained(folder: Path, flags: Any, seed: int) -> dict[str, Any]:
        rate, flags = flags["lr"], {name: flags[name] for name in flags if name != "lr"}
        if rate != 0.005:
            return {"lr": rate, "auc": 0.5}
        batches = list(DataFlags(f"parquet:{folder}", batch=50, seed=seed, **flags).stream())
        samples = [tuple(batch.dense[k].tolist()) for batch in batches for k in range(len(batch.labels))]
        seen[str((*flags.items(), seed))] = set(samples)
        assert len(samples) == len(set(samples)) == 300
        held = sum(batch.sparse.values().numel() for batch in batches)
        ids = sum(batch.sparse.expanded().values().numel() for batch in batches)
        return {"lr": rate, "auc": 0.6 + seed, "logloss": 0.5, "samples_per_second": 10.0, "factor": ids / held}

    monkeypatch.setattr(ordering, "_trained", trained)
    bench = Dedup(("order",), samples=300, seeds=2, mind=None)
    monkeypatch.delenv("SKIRL_DATA", raising=False)
    found = bench.run()["order"]["synthetic"]
    assert len(seen) == 14 and len(set(map(frozenset, seen.values()))) == 1, "all orders have the same samples"
    factors = {name: of["factor"] for name, of in found.items()}
    assert list(factors) == ["global", "keep", *(f"shuffle {most}" for most in (1, 2, 4, 8, "all"))]
    assert factors["global"] == factors["shuffle 1"] < factors["shuffle 4"] < factors["shuffle all"]
    assert found["keep"] | {"factor": 0} == found["shuffle 2"] | {"factor": 0}
    assert (found["keep"]["lr"], found["keep"]["auc"], found["keep"]["auc_lost"]) == (0.005, 1.1, 0.0)
    lines = bench.summary({"order": {"synthetic": found}})["synthetic"].splitlines()
    assert len(lines) == 8 and lines[1].split()[:3] == ["global", "1.1000", "0.0000"]


def test_what_a_cache_sees(data_folder: Path) -> None:
    [mind] = sorted((data_folder / "mind").glob("*.tsv"))
    found = cached(str(mind))
    assert found["ids_scanned_x"] >= 15 and found["least_rows_x"] >= 4 and found["same_with_and_without"]
    assert found["brought_in_again"]["0.25"]["shuffled"] is None, "a batch of shuffled samples does not fit in"
    assert all(of["session"] is not None for of in found["brought_in_again"].values())
    assert "does not fit" in told_of(found)["25% of rows"]


def test_without_mind_a_cache_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKIRL_DATA", raising=False)
    with pytest.raises(ValueError, match=r"set mind to a behaviors\.tsv"):
        Dedup(("cache",)).run()
