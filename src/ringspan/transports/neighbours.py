"""Which ranks are processes of this host whose memory can be read, and how are they joined to this one?

All ranks tell each other where they run. Those of one host connect, and each tries to read a word that the other has
just made up. Whatever the reason that it fails (a container, a rule of the kernel), the two then go on with the network
as ranks of different hosts do. There is a link where both have succeeded, so both know whether there is one. A rank
that cannot even say where it is takes part all the same, since the others wait for its word.
"""

import ctypes
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from ringspan.transports.same_host import Memory, Peer

SWITCH = "RINGSPAN_SAME_HOST"
"""An environment variable: if it is 0, this rank uses the network for all others."""

_ID_BYTES = 16
_HELLO = struct.Struct(f"<IQ{_ID_BYTES}s")  # rank, the word's address, the word
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_PATIENCE_S = 5.0  # with ranks that are known to be in the same place


def find_peers(rank: int, gather: Callable[[bytes], Sequence[bytes]]) -> list[Peer]:
    """The ranks of this host that are linked to this one now. All ranks must call it.

    `gather` returns the bytes of every rank, in rank order, if all give as many.
    """
    place = _take_place()
    if place is None:
        cards = gather(bytes(2 * _ID_BYTES))  # that is nowhere
        gather(bytes(len(cards)))
        return []
    host, name, listener = place
    word = ctypes.create_string_buffer(secrets.token_bytes(_ID_BYTES), _ID_BYTES)
    with listener:
        cards = gather(host + name)
        names = {peer: card[_ID_BYTES:] for peer, card in enumerate(cards) if peer != rank and card.startswith(host)}
        sockets = _connect(rank, names, listener)
        for it in sockets:
            with suppress(OSError):
                it.send(_HELLO.pack(rank, ctypes.addressof(word), word.raw))
        readable = {peer.rank: peer for peer in map(_meet, sockets) if peer is not None}
    linked = gather(bytes(other in readable for other in range(len(cards))))
    peers = [peer for peer in readable.values() if linked[peer.rank][rank]]
    for it in set(sockets) - {peer.socket for peer in peers}:
        it.close()
    return peers


class _Place(NamedTuple):
    """Where others find this rank: its host, its name there, and the socket that has this name."""

    host: bytes
    name: bytes
    listener: socket.socket


def _take_place() -> _Place | None:
    """None if this rank cannot have one, whatever the reason."""
    if not _is_possible():
        return None
    name = secrets.token_bytes(_ID_BYTES)
    with suppress(OSError), ExitStack() as opened:
        host = _host_id()
        listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(_address(name))
        listener.listen(socket.SOMAXCONN)
        opened.pop_all()  # it stays open
        return _Place(host, name, listener)
    return None


def _is_possible() -> bool:
    return sys.platform == "linux" and os.environ.get(SWITCH) != "0" and hasattr(ctypes.CDLL(None), "process_vm_readv")


def _host_id() -> bytes:
    """The same for all processes that can connect: the system since its start, and the network as it is seen here."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return blake2b(boot.read_bytes() + os.fsencode(network.readlink()), digest_size=_ID_BYTES).digest()


def _address(name: bytes) -> bytes:
    """In no directory, so that nothing is left there."""
    return b"\0ringspan-" + name.hex().encode()


def _connect(rank: int, names: dict[int, bytes], listener: socket.socket) -> list[socket.socket]:
    """To all lower ranks, and from all higher ones."""
    sockets: list[socket.socket] = []
    with suppress(OSError):
        for name in [name for peer, name in names.items() if peer < rank]:
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sockets[-1].connect(_address(name))
        listener.settimeout(_PATIENCE_S)
        while len(sockets) < len(names):
            sockets.append(listener.accept()[0])
    return sockets


def _meet(link: socket.socket) -> Peer | None:
    """Who is at the other end, if its memory can be read."""
    link.settimeout(_PATIENCE_S)
    read = ctypes.create_string_buffer(_ID_BYTES)
    try:
        pid, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        rank, address, word = _HELLO.unpack(link.recv(_HELLO.size))
        memory = Memory(pid)
        memory.read(address, ctypes.addressof(read), _ID_BYTES)
    except (OSError, struct.error):
        return None
    return Peer(rank, link, memory) if user == os.getuid() and read.raw == word else None
