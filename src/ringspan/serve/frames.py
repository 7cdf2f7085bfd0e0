"""How do the front and the ranks talk over pipes? In frames: four bytes of length, then a JSON object."""

import json
from asyncio import IncompleteReadError, StreamReader
from typing import Any, BinaryIO

Frame = dict[str, Any]
_HEADER = 4


def pack(frame: Frame) -> bytes:
    body = json.dumps(frame, separators=(",", ":")).encode()
    return len(body).to_bytes(_HEADER, "little") + body


def read(stream: BinaryIO) -> Frame | None:
    """The next frame; None at the end of the stream."""
    header = stream.read(_HEADER)
    if len(header) < _HEADER:
        return None
    length = int.from_bytes(header, "little")
    body = stream.read(length)
    return None if len(body) < length else _object(body)


async def read_async(stream: StreamReader) -> Frame | None:
    """The next frame of an asyncio stream; None at the end."""
    try:
        length = int.from_bytes(await stream.readexactly(_HEADER), "little")
        return _object(await stream.readexactly(length))
    except (IncompleteReadError, ConnectionError):
        return None


def _object(body: bytes) -> Frame:
    frame = json.loads(body)
    assert isinstance(frame, dict)
    return frame
