"""The shop before and after the console is attached to it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.attach.shop import Shop

Make = Callable[..., Shop]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """The shop as it was, migrated."""
    return migrated(Shop(tmp_path_factory.mktemp("shop"), is_attached=False))


@pytest.fixture(scope="session")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """The shop with the console, migrated."""
    return migrated(Shop(tmp_path_factory.mktemp("attached"), is_attached=True))


def migrated(shop: Shop) -> Shop:
    """Migrate a shop, and keep a copy of the database as it is then."""
    shop.run("migrate")
    with closing(sqlite3.connect(shop.database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(shop.database, shop.folder / "migrated.sqlite3")
    return shop


@pytest.fixture
def make(tmp_path: Path, redis_url: str, queue_name: str, plain: Shop, attached: Shop) -> Iterator[Make]:
    """A maker of shops with a broker and a migrated database; their workers are stopped at the end."""
    made: list[Shop] = []

    def open_shop(*, is_attached: bool, **more: str) -> Shop:
        broker = {"SHOP_BROKER_URL": redis_url, "SHOP_QUEUE": queue_name}
        shop = Shop(tmp_path / f"shop-{len(made)}", is_attached=is_attached, **broker, **more)
        made.append(shop)
        if shop.database.parent == shop.folder:
            shutil.copy((attached if is_attached else plain).folder / "migrated.sqlite3", shop.database)
        return shop

    yield open_shop
    for shop in made:
        shop.stop_worker()
