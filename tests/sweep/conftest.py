"""Sweeps here draw no pictures: three of them take longer than 20 steps."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skirl.cli.show.find_spec", lambda name: None)
        yield
