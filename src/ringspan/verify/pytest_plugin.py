"""A pytest plugin: hold an attention to the verifier from another project's tests.

    @pytest.mark.ringspan_verify(world_sizes=(2, 3), layouts=["zigzag"])
    def test_attention(ringspan_verify):
        ringspan_verify(my_attention)

The marker's arguments are those of `rs.verify.check`. Nothing of the verifier is loaded until a test asks for it.
"""

from collections.abc import Callable
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, for `--strict-markers`."""
    config.addinivalue_line("markers", "ringspan_verify(**options): arguments of rs.verify.check for this test")


@pytest.fixture
def ringspan_verify(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`rs.verify.check` with the arguments of the test's marker; a wrong result fails the test with the report."""
    options: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("ringspan_verify"))):
        options |= marker.kwargs

    def check(target: Any, **more: Any) -> Any:
        __tracebackhide__ = True
        from ringspan.verify.run import check as check_target

        return check_target(target, **(options | more))

    return check
