"""A sealed header reads as it was written, or it is refused."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.tools.sealed_json import CheckpointError, put_whole, read_sealed, seal
from tests.cases import cases

texts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def read(path: Path) -> dict[str, Any]:
    return read_sealed(path, format="f", version=1, what="thing")


@cases(30)  # each one syncs to disk
@given(st.dictionaries(st.text(), texts), st.data())
def test_written_and_changed(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any], data: Any) -> None:
    path = tmp_path_factory.mktemp("sealed") / "header.json"
    body = {"z": content, "format": "f", "format_version": 1, "skirl": "0"}
    put_whole(path, seal(body), "mark")
    assert read(path) == body and list(read(path)["z"]) == list(content)
    assert [other.name for other in path.parent.iterdir()] == ["header.json"]
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"header\.json is damaged, or not a thing of skirl: use another thing"):
        read(path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "header.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: takes no space
    with pytest.raises(CheckpointError, match="is damaged"):
        read(path)
