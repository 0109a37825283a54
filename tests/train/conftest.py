"""A run sets the number of torch's threads."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)
