"""``Store``: texts by name that the processes of a job share, in the process of rank 0. By it they agree on
how to communicate, and say what they were doing when one fails; tensors never go through it.

A request is a line of JSON, [what, name, value], and so is its answer: nothing that is received is executed.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import socketserver
import threading
import time
from contextlib import suppress
from typing import Any

from fp8kit.errors import BackendError
from fp8kit.settings import Place

_LONGEST = 1 << 20  # bytes of a line
_CONNECT = 5.0  # seconds of an attempt to connect
_ANSWER = 60.0  # seconds that an answer may take: rank 0 compiles kernels, too, and keeps its interpreter


class _Answers(socketserver.StreamRequestHandler):
    """One process's requests."""

    def handle(self) -> None:
        server: Any = self.server
        while line := self.rfile.readline(_LONGEST):
            try:
                what, name, value = json.loads(line)
            except ValueError:  # not a process of this job
                return
            if what == "set":
                server.texts[name] = value
            self.wfile.write(json.dumps(server.texts.get(name)).encode() + b"\n")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024  # of processes that come at the same time

    def __init__(self, address: str, port: int) -> None:
        self.address_family, own = listening(address)
        self.texts: dict[str, str] = {}
        super().__init__((own, port), _Answers)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:  # IPv4's too
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def listening(address: str) -> tuple[socket.AddressFamily, str]:
    """Returns the family and the address at which rank 0 listens so that others find it at ``address``: this
    machine alone for a loopback address, else all interfaces. The machine itself may know its name by another
    address than the others do, a loopback one often, or not have the address at all behind a translation."""
    try:
        own = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
    except ValueError:  # a name
        return (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    if own.version == 6:
        return socket.AF_INET6, str(own) if own.is_loopback else "::"
    return socket.AF_INET, str(own) if own.is_loopback else ""


class Store:
    """The texts of a job, of which this process is ``place``; rank 0 keeps them at the port that its launcher
    named, or at the next one where the launcher listens there itself. All meet it at the launcher's address;
    it listens there if that is a loopback address, else on all interfaces. BackendError where rank 0 is not
    met within ``timeout`` seconds, or cannot listen; later TimeoutError where it is slow to answer, after
    which one may ask again, and another OSError where it has ended."""

    def __init__(self, place: Place, timeout: float) -> None:
        self.place, port = place, place.port + place.agent
        self._lock = threading.Lock()
        self._address = place.address, port
        at = f"{place.address}:{port}"
        if place.rank == 0:
            try:
                self._server = _Server(place.address, port)
            except OSError as error:
                wanted = "a free port: MASTER_ADDR, MASTER_PORT"
                raise BackendError(
                    "distributed.init", "address", f"{at} ({error.strerror})", wanted
                ) from None
            threading.Thread(target=self._server.serve_forever, name="fp8kit store", daemon=True).start()
        end = time.monotonic() + timeout
        while True:
            try:
                self._connect()
                break
            except OSError as error:
                if time.monotonic() > end:
                    got, wanted = f"rank {place.rank} alone at {at} ({error})", "rank 0 there"
                    raise BackendError("distributed.init", "ranks", got, wanted) from None
                time.sleep(0.1)

    def _connect(self) -> None:
        self._socket = socket.create_connection(self._address, _CONNECT)
        self._socket.settimeout(_ANSWER)
        self._file = self._socket.makefile("rb")

    def _ask(self, what: str, name: str, value: str | None = None) -> str | None:
        with self._lock:
            try:
                self._socket.sendall(json.dumps([what, name, value]).encode() + b"\n")
                line = self._file.readline(_LONGEST)
            except TimeoutError:
                self._file.close()
                self._socket.close()
                self._connect()  # what comes late on the old connection answers no later request
                raise
        if not line:
            raise ConnectionError("the process of rank 0 has ended")
        return json.loads(line)  # type: ignore[no-any-return]

    def set(self, name: str, text: str) -> None:
        """Keep ``text`` under ``name``, for all."""
        self._ask("set", name, text)

    def peek(self, name: str) -> str | None:
        """Returns the text, None where it has not been set."""
        return self._ask("get", name)

    def get(self, name: str, timeout: float) -> str:
        """Wait for the text to be set and return it; BackendError after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while True:
            with suppress(TimeoutError):
                if (found := self.peek(name)) is not None:
                    return found
            if time.monotonic() > end:
                raise BackendError(
                    "distributed", name, f"nothing for {timeout:g} s", "what another rank sets"
                )
            time.sleep(0.05)

    def close(self) -> None:
        """Leave; on rank 0, for all."""
        self._file.close()
        self._socket.close()
        if self.place.rank == 0:
            self._server.shutdown()
            self._server.server_close()


__all__ = ["Store", "listening"]
