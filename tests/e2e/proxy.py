"""A hand on the cable: what stands between an installation and its broker, and can refuse or fall silent."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class Proxy:
    """Passes bytes on to a server of this host until it is told to refuse connections or to hold everything back."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 6379)
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._listening = self._listen(0)
        self.port: int = self._listening.getsockname()[1]
        credentials, at, _ = parts.netloc.rpartition("@")
        self.url = parts._replace(netloc=f"{credentials}{at}127.0.0.1:{self.port}").geturl()

    def refuse(self) -> None:
        """Drop every connection and refuse new ones, as a server that is gone."""
        self._close_listener()
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            self._open.clear()

    def hang(self) -> None:
        """Accept connections and keep them, and pass nothing on, as a server that is stuck."""
        self._flowing.clear()

    def pass_on(self) -> None:
        """Work again."""
        self._flowing.set()
        if self._listening.fileno() < 0:
            self._listening = self._listen(self.port)

    def close(self) -> None:
        self._flowing.set()
        self.refuse()

    def _listen(self, port: int) -> socket.socket:
        listening = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()
        return listening

    def _close_listener(self) -> None:
        # Closing alone does not wake a thread that is waiting in accept.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._open += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self._flowing.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
