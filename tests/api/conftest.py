"""The cast as clients of the API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from grants.rest import OperatorThrottle
from tests.api.client import Api
from tests.cast import Cast, cast

__all__ = ["cast"]


@pytest.fixture(autouse=True)
def _no_requests_counted_yet() -> Iterator[None]:
    """Let each test begin with its whole allowance: ids of users repeat from test to test."""
    OperatorThrottle.cache.clear()
    yield
    OperatorThrottle.cache.clear()


@pytest.fixture
def ada(cast: Cast) -> Api:
    """Who may do everything everywhere."""
    return Api(cast.ada)


@pytest.fixture
def olga(cast: Cast) -> Api:
    """Who repairs the tenant ``default``."""
    return Api(cast.olga)


@pytest.fixture
def bram(cast: Cast) -> Api:
    """Who repairs the tenant ``t-b``."""
    return Api(cast.bram)


@pytest.fixture
def vera(cast: Cast) -> Api:
    """Who may look at everything and change nothing."""
    return Api(cast.vera)


@pytest.fixture
def nobody(cast: Cast) -> Api:
    """Staff without a grant."""
    return Api(cast.nobody)


@pytest.fixture
def stranger(db: None) -> Api:
    """Who is not signed in."""
    return Api()
