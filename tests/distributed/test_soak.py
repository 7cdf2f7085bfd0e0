"""Memory, open files and threads stay level over many calls and groups; `make soak` runs more of them."""

import pytest

from support import soak

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes"), pytest.mark.timeout(400)]


def test_nothing_grows_with_calls_and_groups() -> None:
    for phases in soak.run((1000, 30, 30), 380.0):
        for phase in phases:
            assert phase.late.files <= phase.early.files, phase
            assert phase.late.threads <= phase.early.threads, phase
            assert phase.late.bytes < phase.early.bytes + 32e6, phase
