"""What the suite needs beside Python: how each thing is found, and what happens where it is missing."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import kombu
import pytest
import redis

REDIS_URL = os.environ.get("OPSCONSOLE_TEST_REDIS_URL", "redis://127.0.0.1:6379/15")
RABBITMQ_URL = os.environ.get("OPSCONSOLE_TEST_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672//")
BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def do_without(reason: str) -> NoReturn:
    """Skip the test, or fail it where OPSCONSOLE_REQUIRE_SERVICES says that everything is there."""
    if os.environ.get("OPSCONSOLE_REQUIRE_SERVICES") == "1":
        pytest.fail(f"{reason}, but OPSCONSOLE_REQUIRE_SERVICES=1 says it must be there", pytrace=False)
    pytest.skip(reason)


def find_redis() -> str:
    """Return the URL of a Redis that answers."""
    try:
        with redis.Redis.from_url(REDIS_URL, socket_connect_timeout=2, socket_timeout=2) as client:
            client.ping()
    except redis.RedisError:
        do_without(f"no Redis answers at {REDIS_URL}")
    return REDIS_URL


def find_rabbitmq() -> str:
    """Return the URL of a RabbitMQ that answers."""
    with kombu.Connection(RABBITMQ_URL, connect_timeout=2) as connection:
        try:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=2)
        except Exception:
            do_without(f"no RabbitMQ answers at {connection.as_uri()}")
    return RABBITMQ_URL


def find_chromium() -> str:
    """Return the path of a Chromium or Chrome."""
    named = os.environ.get("OPSCONSOLE_TEST_CHROMIUM")
    for name in (named,) if named else BROWSERS:
        if path := shutil.which(name):
            return path
    do_without(f"none of {', '.join(BROWSERS)} is on the PATH")
