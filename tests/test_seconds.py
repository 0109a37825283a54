"""The table of test durations."""

from pathlib import Path

from tests import seconds
from tests.seconds import LEAST, TABLE, merged, recorded, write


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = {"tests/test_a.py::test_b[c d]": 12.0, "tests/test_a.py::test_a": 3.0}
    write(tmp_path / "s.txt", merged({}, found))
    assert recorded(tmp_path / "s.txt") == found
    assert (tmp_path / "s.txt").read_text().splitlines()[0].endswith("test_a"), "a test keeps its line"
    assert recorded(tmp_path / "none.txt") == {}


def test_what_ran_has_new_seconds_and_the_rest_keeps_its_own() -> None:
    assert merged({"a": 5.0, "b": 3.0}, {"b": 7.0, "c": 2.5, "d": 0.1}) == {"a": 5.0, "b": 7.0, "c": 2.5}
    assert merged({"a": 5.0}, {"a": LEAST / 2}) == {}


def test_the_table_names_files_that_there_are() -> None:
    """A renamed test is started like a short one; a missing file shows that the table is old."""
    root = Path(seconds.__file__).parents[1]
    assert [test for test in recorded(TABLE) if not (root / test.partition("::")[0]).is_file()] == []
