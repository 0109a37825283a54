"""Sweeps here draw no pictures, but for the report's own tests: three of them take longer than 20 steps."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith("test_report"):
            patch.setattr("skirl.cli.show.find_spec", lambda name: None)
        yield
