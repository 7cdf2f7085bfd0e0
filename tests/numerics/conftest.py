"""Fixtures that several tests of the runtime share."""

from typing import Any

import pytest

import ringspan.runtime.session
from ringspan.transports import open_transport
from ringspan.transports.base import CountingTransport


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[int, CountingTransport]:
    """The transports of the last opened group, by rank; each counts its messages."""
    by_rank: dict[int, CountingTransport] = {}

    def open_counted(group: Any) -> CountingTransport:
        transport = CountingTransport(open_transport(group))
        by_rank[transport.rank] = transport
        return transport

    monkeypatch.setattr(ringspan.runtime.session, "open_transport", open_counted)
    return by_rank
