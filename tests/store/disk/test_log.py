"""A log of rows, compared with a dict."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.store.base import Record
from skirl.store.disk import log as log_module
from skirl.store.disk.log import Log
from skirl.store.disk.records import HEADER, INDEX_BITS
from skirl.store.gate import Gate
from tests.cases import cases
from tests.store.crash import Unsynced

ROWS, RECORD = 300, Record(3)


def opened(folder: Path) -> Log:
    return Log(folder, RECORD, Unsynced(), Gate(), {0: ROWS})


def same(log: Log, model: dict[int, bytes]) -> None:
    """Assert that the log holds what the dict holds, and counts it right."""
    keys = np.arange(ROWS)
    positions = log.index.locate(keys)
    assert (positions >= 0).tolist() == [key in model for key in keys.tolist()]
    out = np.full((ROWS, RECORD.width), -7, np.float32)
    log.rows_at(positions, keys, out)
    untouched = np.full(RECORD.width, -7, np.float32).tobytes()
    assert [row.tobytes() for row in out] == [model.get(key, untouched) for key in keys.tolist()]
    listed: list[int] = []
    for segment in log.segments.values():
        start, of = 0, []
        while True:
            some, start = log.keys_from(segment, start)
            of += some.tolist()
            if not start:
                break
        assert len(of) == log.live[segment.slot] <= log.ends[segment.slot]
        assert all(log.index.locate(some) >> INDEX_BITS == segment.slot)
        listed += of
    assert sorted(listed) == sorted(model)
    files = [path.stat().st_size for s in log.segments.values() for path in (s.rows_path, s.keys_path)]
    assert sum(files) == log.bytes()


calls = st.one_of(
    st.tuples(st.just("append"), st.lists(st.integers(0, ROWS - 1), max_size=60, unique=True)),
    st.tuples(st.sampled_from(["seal", "sync", "drop", "reopen"]), st.none()),
    st.tuples(st.just("rewrite"), st.integers(0, 9)),
)


@cases(60)
@given(calls=st.lists(calls, max_size=15))
def test_any_calls(calls):
    model: dict[int, bytes] = {}
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as name:
        patch.setattr(log_module, "SMALLEST", 16)
        patch.setattr(log_module, "_PIECE", 10)
        log = opened(Path(name))
        for number, (call, given) in enumerate(calls):
            if call == "append":
                keys = np.array(given, np.int64)
                rows = np.random.default_rng(number).random((len(keys), RECORD.width), np.float32)
                log.append(keys, rows.reshape(-1).view(np.uint32))
                model |= {key: row.tobytes() for key, row in zip(given, rows, strict=True)}
            elif call == "rewrite":
                others = [segment for segment in log.segments.values() if segment is not log.active]
                if others:
                    old = others[given % len(others)]
                    assert sum(log.rewrite(old)) == log.ends[old.slot]
                    assert old in log.dead()
            elif call == "drop":
                dead = log.dead()
                assert not any(segment.name == entry.name for segment in dead for entry in log.entries())
                log.drop(dead)
            elif call == "reopen":
                log.sync()
                entries = log.entries()
                log.close()
                log = opened(Path(name))
                for entry in entries:
                    log.load(entry)
            else:
                getattr(log, call)()
            same(log, model)
        for segment in log.segments.values():
            log.check(segment)
        log.close()


def test_what_is_behind_the_last_record_is_counted_and_cut_off(tmp_path):
    log = opened(tmp_path)
    log.append(np.arange(20), np.arange(60, dtype=np.uint32))
    entries = log.entries()
    log.append(np.arange(20, 50), np.zeros(90, np.uint32))
    log.close()
    log = opened(tmp_path)
    log.load(entries[0])
    [segment] = log.segments.values()
    assert segment.behind == 30 * log.footprint and log.index.count == 20
    log.trim()
    assert segment.behind == 0 and segment.rows_path.stat().st_size == HEADER + 20 * log.stride
    model = {key: np.arange(3 * key, 3 * key + 3, dtype=np.uint32).tobytes() for key in range(20)}
    same(log, model)
    log.close()
