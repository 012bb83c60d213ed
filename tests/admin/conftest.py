"""The cast signed in, and rows to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from deadletters.models import DeadLetter
from grants.operators import Operator
from opsconsole.console import machinery, overview
from repairs.refusals import forget_served
from tests.cast import Cast, cast  # noqa: F401 - a fixture
from tests.factories import dead_letter

SignIn = Callable[[Operator], Client]


@pytest.fixture(autouse=True)
def _read_the_machinery_afresh() -> Iterator[None]:
    for forget in (machinery.forget, overview.forget, forget_served):
        forget()
    yield
    for forget in (machinery.forget, overview.forget, forget_served):
        forget()


@pytest.fixture
def sign_in() -> SignIn:
    """Return a client in which an operator is signed in."""

    def signed_in(operator: Operator) -> Client:
        client = Client()
        client.force_login(get_user_model().objects.get(pk=operator.user_id))
        return client

    return signed_in


@pytest.fixture
def letter(cast: Cast) -> DeadLetter:  # noqa: F811
    """A failed job of tenant ``default`` that is safe to run again."""
    return dead_letter()
