"""The shop before and after the console is attached to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.attach.shop import Shop

Make = Callable[..., Shop]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """The shop as it was, migrated."""
    shop = Shop(tmp_path_factory.mktemp("shop"), is_attached=False)
    shop.run("migrate")
    return shop


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """The shop with the console, migrated."""
    shop = Shop(tmp_path_factory.mktemp("attached"), is_attached=True)
    shop.run("migrate")
    return shop


@pytest.fixture
def make(tmp_path: Path, redis_url: str, queue_name: str) -> Iterator[Make]:
    """A maker of shops with a broker; their workers are stopped at the end."""
    made: list[Shop] = []

    def open_shop(*, is_attached: bool, **more: str) -> Shop:
        broker = {"SHOP_BROKER_URL": redis_url, "SHOP_QUEUE": queue_name}
        shop = Shop(tmp_path / f"shop-{len(made)}", is_attached=is_attached, **broker, **more)
        made.append(shop)
        return shop

    yield open_shop
    for shop in made:
        shop.stop_worker()
