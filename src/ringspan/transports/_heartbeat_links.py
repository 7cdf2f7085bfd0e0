"""Over which connections do ranks exchange heartbeats?

Every pair of ranks has a TCP connection for heartbeats, separate from the transport of messages. It closes at once when
a process dies, even in the middle of a message, and the system reports whether the other machine still acknowledges
packets. All ranks exchange addresses through the group; the lower rank of a pair listens, the higher one connects, and
both authenticate with secrets that they exchanged through the group. A pair that cannot connect (a firewall, no
address) has no heartbeats.
"""

import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

_WORD_BYTES = 16
_CARD = struct.Struct(f"<46sHI32s{_WORD_BYTES}s")  # address, port, process, host's name, word
_HELLO = struct.Struct(f"<I{_WORD_BYTES}s{_WORD_BYTES}s")  # rank, its word, the receiver's word
_PATIENCE_S = 10.0
_THIN_LINEAR_TIMEOUTS = 16  # Linux: TCP_THIN_LINEAR_TIMEOUTS
_INTERFACE_ADDRESS = 0x8915  # Linux: SIOCGIFADDR


class HeartbeatLink(NamedTuple):
    """A connection to another rank, with that rank's host and process."""

    rank: int
    host: str
    pid: int
    socket: socket.socket

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"


class _Card(NamedTuple):
    """The address on which a rank listens; port 0 means that it does not."""

    address: str
    port: int
    pid: int
    host: str
    word: bytes

    def packed(self) -> bytes:
        return _CARD.pack(self.address.encode(), self.port, self.pid, self.host.encode()[:32], self.word)

    @classmethod
    def unpacked(cls, raw: bytes) -> "_Card":
        address, port, pid, host, word = _CARD.unpack(raw)
        return cls(address.rstrip(b"\0").decode(), port, pid, host.rstrip(b"\0").decode(errors="replace"), word)


def connect_heartbeats(
    rank: int, gather: Callable[[bytes], Sequence[bytes]], store: Any
) -> tuple[str, list[HeartbeatLink]]:
    """Return this host's name and a link to each reachable rank; a collective call.

    `gather` returns the bytes of every rank, in rank order; `store` is the group's, for a hint at the network.
    """
    listener = _listen(_own_address(store))
    address, port = listener.getsockname()[:2] if listener is not None else ("", 0)
    mine = _Card(address, port, os.getpid(), socket.gethostname(), secrets.token_bytes(_WORD_BYTES))
    cards = {peer: _Card.unpacked(card) for peer, card in enumerate(gather(mine.packed()))}
    links: dict[int, HeartbeatLink] = {}
    if listener is not None:
        with listener:
            links = _Meeting(rank, cards, listener).hold()
    linked = gather(bytes(peer in links for peer in cards))
    for peer in [peer for peer in links if not linked[peer][rank]]:
        links.pop(peer).socket.close()
    return mine.host, list(links.values())


def _listen(address: str | None) -> socket.socket | None:
    if address is None:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        return None
    listener.setblocking(False)
    return listener


def _own_address(store: Any) -> str | None:
    """The address at which other ranks reach this one: that of gloo's interface, or of the route to the store."""
    with suppress(OSError, ImportError):
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if interface:
            return _address_of(interface)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None) or socket.gethostname(), getattr(store, "port", None) or 9
    with suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing; the system chooses the route
            return str(probe.getsockname()[0])
    return None


def _address_of(interface: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe, _INTERFACE_ADDRESS, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(reply[20:24])


class _Meeting:
    """One rank's side of connecting all ranks at the same time."""

    def __init__(self, rank: int, cards: Mapping[int, _Card], listener: socket.socket) -> None:
        self._rank = rank
        self._cards = cards
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._open: dict[socket.socket, int | None] = {}  # the peer's rank, if this rank connects
        self._links: dict[int, HeartbeatLink] = {}

    def hold(self) -> dict[int, HeartbeatLink]:
        """Return when all ranks that have an address are linked, or when the time is up."""
        wanted = {peer for peer, card in self._cards.items() if card.port and peer != self._rank}
        deadline = time.monotonic() + _PATIENCE_S
        with self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            for peer in wanted:
                if peer < self._rank:
                    self._connect(peer)
            while wanted - self._links.keys() and (left_s := deadline - time.monotonic()) > 0:
                for key, events in self._selector.select(left_s):
                    self._advance(key.fileobj, events)
        for link in self._open:
            link.close()
        return self._links

    def _connect(self, peer: int) -> None:
        card = self._cards[peer]
        link = socket.socket(socket.AF_INET6 if ":" in card.address else socket.AF_INET, socket.SOCK_STREAM)
        link.setblocking(False)
        try:
            link.connect((card.address, card.port))
        except BlockingIOError:
            pass
        except OSError:
            link.close()
            return
        self._open[link] = peer
        self._selector.register(link, selectors.EVENT_WRITE)

    def _advance(self, source: Any, events: int) -> None:
        if source is self._listener:
            with suppress(OSError):
                link = self._listener.accept()[0]
                link.setblocking(False)
                self._open[link] = None
                self._selector.register(link, selectors.EVENT_READ)
            return
        try:
            if events & selectors.EVENT_WRITE:
                source.send(self._hello(self._open[source]))
                self._selector.modify(source, selectors.EVENT_READ)
            else:
                self._read(source)
        except (OSError, struct.error):
            self._drop(source)

    def _hello(self, peer: int | None) -> bytes:
        assert peer is not None
        return _HELLO.pack(self._rank, self._cards[self._rank].word, self._cards[peer].word)

    def _read(self, link: socket.socket) -> None:
        """Read and check a greeting: its sender and this rank as its receiver. The connecting side greets first."""
        rank, its_word, my_word = _HELLO.unpack(link.recv(_HELLO.size))
        card = self._cards.get(rank)
        expected = self._open[link]
        is_right = card is not None and (its_word, my_word) == (card.word, self._cards[self._rank].word)
        if card is None or not is_right or rank in self._links or expected not in (None, rank):
            self._drop(link)
            return
        if expected is None:
            link.send(self._hello(rank))
        self._selector.unregister(link)
        del self._open[link]
        _send_again_soon(link)
        self._links[rank] = HeartbeatLink(rank, card.host, card.pid, link)

    def _drop(self, link: socket.socket) -> None:
        self._selector.unregister(link)
        del self._open[link]
        link.close()


def _send_again_soon(link: socket.socket) -> None:
    """Send every heartbeat at once, and lost ones again without increasing pauses, since messages may fill the link."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        with suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)
