import pytest

from tests.loops import our_threads, wait_for


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    wait_for(lambda: not our_threads())
