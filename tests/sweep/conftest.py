"""Sweeps here draw no pictures, since three of them take longer than 20 steps, and train in turn where forms do not matter:
a probe takes as long as all the rest."""

from collections.abc import Iterator

import pytest

from skirl.sweep.fused import Forms


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skirl.cli.show.find_spec", lambda name: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def form() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forms, "only", "loop")
        yield
