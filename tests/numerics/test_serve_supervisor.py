"""The front gives up on ranks that are lost too often, however long each start takes."""

import asyncio
from types import SimpleNamespace

import pytest

import ringspan.serve.supervisor
from ringspan.serve.settings import ServeSettings
from ringspan.serve.supervisor import MAX_RESTARTS, WITHIN_S, RankLoss, Supervisor


class PlayedStarts(Supervisor):
    """Starts that take a while by a played clock; each is lost, some after the ranks were ready."""

    def __init__(self, settings: ServeSettings, become_ready: list[bool], start_s: float) -> None:
        super().__init__(settings, lambda _: None, lambda _: None)
        self._plan = become_ready
        self._start_s = start_s
        self.now_s = 0.0

    async def _run_once(self) -> RankLoss:
        self.now_s += self._start_s
        self._became_ready = self._plan.pop(0)
        return RankLoss(0, "played")


@pytest.mark.parametrize(
    ("become_ready", "start_s", "reason"),
    [
        ([True] * 4, 1.0, "4 times within 60 s"),
        ([False] * 4, 2 * WITHIN_S, "in 4 starts in a row"),
        ([False, False, False, True, False, False, False, False], 2 * WITHIN_S, "in 4 starts in a row"),
        ([True] * 20 + [False] * 4, 2 * WITHIN_S, "in 4 starts in a row"),
    ],
)
def test_a_fourth_loss_within_a_minute_or_start_in_a_row_is_the_end(
    tmp_path, monkeypatch, become_ready, start_s, reason
):
    (tmp_path / "config.json").write_text("{}")
    supervisor = PlayedStarts(ServeSettings(folder=tmp_path), [*become_ready], start_s)
    monkeypatch.setattr(ringspan.serve.supervisor, "time", SimpleNamespace(monotonic=lambda: supervisor.now_s))
    asyncio.run(supervisor.run())
    assert reason in supervisor.failure
    assert supervisor.num_restarts == len(become_ready) - 1 >= MAX_RESTARTS
    assert supervisor.state == "failed"
