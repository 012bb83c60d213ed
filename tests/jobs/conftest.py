from collections.abc import Iterator

import pytest

from tests.jobs.kinds_of_tests import BODIES, TOLD
from tests.jobs.server import TestServer, serving


@pytest.fixture(autouse=True)
def plain_bodies() -> Iterator[None]:
    """Let every test begin with kinds that do nothing."""
    BODIES.clear()
    TOLD.clear()
    yield
    BODIES.clear()


@pytest.fixture
def server() -> Iterator[TestServer]:
    """A real HTTP server on loopback."""
    with serving() as running:
        yield running
