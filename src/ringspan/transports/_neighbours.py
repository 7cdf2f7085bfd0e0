"""Which ranks are processes of this host whose memory this rank can read, and how are they connected?

All ranks exchange their hosts. Ranks of one host connect, and each tries to read a random word from the other's memory.
If that fails for any reason (a container, a kernel setting), the two use the network like ranks of different hosts. A
link exists only if both reads succeed, so both ends know whether there is one. A rank that cannot determine its host
still takes part in the exchange, because the others wait for its data.

Every user of the host can connect to the sockets. So each end asks the kernel for the other end's user before it sends
anything, and closes connections from other users.
"""

import ctypes
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from ringspan.transports._same_host import Peer, PeerMemory

SWITCH = "RINGSPAN_SAME_HOST"
"""An environment variable: if it is 0, this rank uses the network for all others."""

_ID_BYTES = 16
_HELLO = struct.Struct(f"<IQ{_ID_BYTES}s")  # rank, the word's address, the word
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_PATIENCE_S = 5.0  # for ranks that are known to be on this host


def find_peers(rank: int, gather: Callable[[bytes], Sequence[bytes]]) -> list[Peer]:
    """Link this rank with the other ranks of its host; a collective call.

    `gather` returns the bytes of every rank, in rank order, if all payloads have one length.
    """
    place = _take_place()
    if place is None:
        cards = gather(bytes(2 * _ID_BYTES))  # zeros: no place
        gather(bytes(len(cards)))
        return []
    host, name, listener = place
    word = ctypes.create_string_buffer(secrets.token_bytes(_ID_BYTES), _ID_BYTES)
    with listener:
        cards = gather(host + name)
        names = {peer: card[_ID_BYTES:] for peer, card in enumerate(cards) if peer != rank and card.startswith(host)}
        met = _meet(rank, names, listener, _HELLO.pack(rank, ctypes.addressof(word), word.raw))
    linked = gather(bytes(other in met for other in range(len(cards))))
    for peer in [peer for peer in met.values() if not linked[peer.rank][rank]]:
        met.pop(peer.rank).socket.close()
    return list(met.values())


class _Place(NamedTuple):
    """This rank's host, its socket's name there, and the socket."""

    host: bytes
    name: bytes
    listener: socket.socket


def _take_place() -> _Place | None:
    """Open this rank's socket; None if that fails for any reason."""
    if not _is_possible():
        return None
    name = secrets.token_bytes(_ID_BYTES)
    with suppress(OSError), ExitStack() as opened:
        host = _host_id()
        listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(_address(name))
        listener.listen(socket.SOMAXCONN)
        opened.pop_all()  # the listener stays open
        return _Place(host, name, listener)
    return None


def _is_possible() -> bool:
    return sys.platform == "linux" and os.environ.get(SWITCH) != "0" and hasattr(ctypes.CDLL(None), "process_vm_readv")


def _host_id() -> bytes:
    """An identifier that processes share if they can connect: this boot of the system and the network namespace."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return blake2b(boot.read_bytes() + os.fsencode(network.readlink()), digest_size=_ID_BYTES).digest()


def _address(name: bytes) -> bytes:
    """A name in Linux's abstract namespace, so that no file is left behind."""
    return b"\0ringspan-" + name.hex().encode()


def _meet(rank: int, names: Mapping[int, bytes], listener: socket.socket, hello: bytes) -> dict[int, Peer]:
    """Connect to all lower ranks, accept all higher ones, and exchange greetings, concurrently."""
    met: dict[int, Peer] = {}
    greeted: set[socket.socket] = set()
    num_expected = sum(peer > rank for peer in names)
    deadline = time.monotonic() + _PATIENCE_S
    with suppress(OSError), selectors.DefaultSelector() as selector:

        def greet(link: socket.socket) -> bool:
            """Send a greeting; False for another user's process, which is ignored: our peer may still be queued."""
            greeted.add(link)
            if not _is_same_user(link):
                greeted.remove(link)
                link.close()
                return False
            link.setblocking(False)
            with suppress(OSError):  # the peer has left; reading its socket reports that
                link.send(hello)
            selector.register(link, selectors.EVENT_READ)
            return True

        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        for name in [name for peer, name in names.items() if peer < rank]:
            if (lower := _connect(name)) is not None:
                greet(lower)
        while (num_expected or greeted) and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                if key.fileobj is listener:
                    with suppress(BlockingIOError, ConnectionAbortedError):
                        num_expected -= greet(listener.accept()[0])
                    continue
                link = key.fileobj
                assert isinstance(link, socket.socket)
                selector.unregister(link)
                greeted.remove(link)
                peer = _identify(link)
                if peer is None or peer.rank not in names or peer.rank in met:
                    link.close()
                else:
                    met[peer.rank] = peer
    for link in greeted:
        link.close()
    return met


def _connect(name: bytes) -> socket.socket | None:
    """Connect to a peer; None if it is gone."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(_PATIENCE_S)
    try:
        link.connect(_address(name))
    except OSError:
        link.close()
        return None
    return link


def _credentials(link: socket.socket) -> tuple[int, int]:
    """The process and user at the other end, as the kernel reports them."""
    pid, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def _is_same_user(link: socket.socket) -> bool:
    return _credentials(link)[1] == os.geteuid()


def _identify(link: socket.socket) -> Peer | None:
    """Return the peer that sent a greeting, if its memory can be read."""
    read = ctypes.create_string_buffer(_ID_BYTES)
    try:
        rank, address, word = _HELLO.unpack(link.recv(_HELLO.size))
        memory = PeerMemory(_credentials(link)[0])
        memory.read(address, ctypes.addressof(read), _ID_BYTES)
    except (OSError, struct.error):
        return None
    return Peer(rank, link, memory) if read.raw == word else None
