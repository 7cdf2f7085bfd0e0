"""Which ranks are processes of this host whose memory can be read, and how are they joined to this one?

All ranks tell each other where they run. Those of one host connect, and each tries to read a word that the other has
just made up. Whatever the reason that it fails (a container, a rule of the kernel), the two then go on with the network
as ranks of different hosts do. There is a link where both have succeeded, so both know whether there is one.
"""

import ctypes
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from ringspan.transports.same_host import Memory, Peer

SWITCH = "RINGSPAN_SAME_HOST"
"""An environment variable: if it is 0, this rank uses the network for all others."""

_ID_BYTES = 16
_NOWHERE = bytes(_ID_BYTES)
_HELLO = struct.Struct(f"<IQ{_ID_BYTES}s")  # rank, the word's address, the word
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_PATIENCE_S = 5.0  # with ranks that are known to be in the same place


def find_peers(rank: int, gather: Callable[[bytes], Sequence[bytes]]) -> list[Peer]:
    """The ranks of this host that are linked to this one now. All ranks must call it.

    `gather` returns the bytes of every rank, in rank order, if all give as many.
    """
    if not _is_possible():
        cards = gather(bytes(2 * _ID_BYTES))
        gather(bytes(len(cards)))
        return []
    host, name = _host_id(), secrets.token_bytes(_ID_BYTES)
    word = ctypes.create_string_buffer(secrets.token_bytes(_ID_BYTES), _ID_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_address(name))
        listener.listen(socket.SOMAXCONN)
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
    pid, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    memory, read = Memory(pid), ctypes.create_string_buffer(_ID_BYTES)
    try:
        rank, address, word = _HELLO.unpack(link.recv(_HELLO.size))
        memory.read(address, ctypes.addressof(read), _ID_BYTES)
    except (OSError, struct.error):
        return None
    return Peer(rank, link, memory) if user == os.getuid() and read.raw == word else None
