"""The folder through which the parts of the demo agree: what is broken, where the services listen, what they got."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KEPT_REQUESTS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Whether the demo's services are broken, for the how-manieth time, and since when (seconds since 1970)."""

    is_broken: bool
    breakage: int
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the payment service wrote down about one request that has reached it."""

    at: float
    reference: str
    is_answered: bool


class DemoFolder:
    """Files below one folder; every write replaces a whole file, so that no reader sees half of one."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def log(self) -> Path:
        """The file in which the demo's worker writes down what failed, with its traceback."""
        return self.path / "failures.log"

    def begin_log(self) -> None:
        """Empty that file, so that it holds what this run of the demo did."""
        self._replace(self.log.name, "")

    def condition(self) -> Condition:
        """Return how things stand; a demo that has never run begins broken, since that is what it is for."""
        stored = self._read("condition.json")
        if stored is None:
            return Condition(is_broken=True, breakage=1, since=0.0)
        return Condition(**stored)

    def set_broken(self, is_broken: bool) -> bool:
        """Break or heal the services; returns whether that was a change."""
        now = self.condition()
        is_new = self._read("condition.json") is None
        if not is_new and now.is_broken == is_broken:
            return False
        breakage = now.breakage + 1 if is_broken and not is_new else now.breakage
        self._write("condition.json", asdict(Condition(is_broken=is_broken, breakage=breakage, since=time.time())))
        return True

    def begin(self) -> Condition:
        """Write down how things stand if nobody has yet, and return it."""
        if self._read("condition.json") is None:
            self.set_broken(True)
        return self.condition()

    def ports(self) -> dict[str, int]:
        """Return the port of each service by its name, nothing while they have none."""
        stored: dict[str, int] = self._read("ports.json") or {}
        return stored

    def set_ports(self, ports: dict[str, int]) -> None:
        """Say where the services listen."""
        self._write("ports.json", ports)

    def forget_ports(self) -> None:
        """Say that no service is there, when one stops or before one starts."""
        (self.path / "ports.json").unlink(missing_ok=True)

    def desk_port(self) -> int | None:
        """Return the port at which the demo's application takes calls, ``None`` if it has never had one.

        The other services are looked up whenever they are asked; calls keep the address they were begun with, so this
        one stays the same from one start to the next.
        """
        stored = self._read("desk.json")
        return int(stored["port"]) if stored else None

    def set_desk_port(self, port: int) -> None:
        """Say where the demo's application takes calls from now on."""
        self._write("desk.json", {"port": port})

    def burst_done(self, burst: str = "burst") -> int:
        """Return the breakage whose burst of failures has been sent, 0 for none."""
        return int((self._read(f"{burst}.json") or {}).get("breakage", 0))

    def set_burst_done(self, breakage: int, burst: str = "burst") -> None:
        """Remember that the burst of a breakage was sent, so that a restart does not send it again."""
        self._write(f"{burst}.json", {"breakage": breakage})

    def note_call(self, key: str) -> None:
        """Write down the idempotency key of a call that the demo's application has acted on."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.path / "calls.jsonl").open("a") as file:
            file.write(json.dumps(key) + "\n")

    def has_call(self, key: str) -> bool:
        """Say whether a key is among those written down."""
        return key in self._calls()

    def _calls(self) -> list[str]:
        try:
            with (self.path / "calls.jsonl").open() as file:
                return [json.loads(line) for line in deque(file, maxlen=KEPT_REQUESTS) if line.endswith("\n")]
        except FileNotFoundError:
            return []

    def note_request(self, reference: str, *, is_answered: bool) -> None:
        """Write down a request before it is answered, or is not."""
        request = Request(at=time.time(), reference=reference, is_answered=is_answered)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.path / "requests.jsonl").open("a") as file:
            file.write(json.dumps(asdict(request)) + "\n")

    def requests(self) -> list[Request]:
        """Return the latest requests, oldest first."""
        try:
            with (self.path / "requests.jsonl").open() as file:
                lines = deque(file, maxlen=KEPT_REQUESTS)
        except FileNotFoundError:
            return []
        return [Request(**json.loads(line)) for line in lines if line.endswith("\n")]

    def drop_old_requests(self) -> None:
        """Keep the latest requests only; called while nothing is written, when the services start."""
        kept = self.requests()
        if kept:
            text = "".join(json.dumps(asdict(request)) + "\n" for request in kept)
            self._replace("requests.jsonl", text)
        calls = self._calls()
        if calls:
            self._replace("calls.jsonl", "".join(json.dumps(key) + "\n" for key in calls))

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None

    def _write(self, name: str, value: Any) -> None:
        self._replace(name, json.dumps(value))

    def _replace(self, name: str, text: str) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self.path / f"{name}.{os.getpid()}.new"
        unfinished.write_text(text)
        unfinished.replace(self.path / name)
