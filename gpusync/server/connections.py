"""Connections of the HTTP server: a client that is slow, silent or gone holds nothing that others need.

uvicorn waits for a request without a limit. Here a request's head and body must arrive within `REQUEST_SECONDS`, and
above `MAX_CONNECTIONS` the connection that has waited longest for its request is closed to make room.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 20.0
MAX_CONNECTIONS = 256

_ARRIVING = (h11.IDLE, h11.SEND_BODY)


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a deadline for every request, and a bound on open connections."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock, and make room if there are too many."""
        super().connection_made(transport)
        self._start_clock()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request; its clock runs from its first byte on."""
        self._start_clock()
        super().data_received(data)
        if not self.is_waiting:
            self._stop_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """True while a request has not wholly arrived."""
        return self.conn.their_state in _ARRIVING

    @property
    def waits_since(self) -> float:
        """The loop's time at which this connection's deadline falls; the smaller, the longer it waits."""
        return self._deadline.when() if self._deadline is not None else float("inf")

    def _start_clock(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self._expire)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if self.is_waiting:
            self.transport.abort()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for its request: this one, where all others are at work."""
        waiting = [
            peer
            for peer in self.connections
            if isinstance(peer, BoundedProtocol) and peer.is_waiting
        ]
        longest = min(waiting, key=lambda peer: peer.waits_since)
        longest._stop_clock()
        self.connections.discard(longest)  # its socket closes in the loop's next turn
        longest.transport.abort()
