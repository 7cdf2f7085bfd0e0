"""Saves that are killed at any instant leave the earlier cache or the new one, whole."""

import multiprocessing
import shutil
import signal
from pathlib import Path

import pytest

from support import saver
from support.campaign import count
from support.ranks import _CONTEXT, _start_server

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(280)]


def interrupted(folder: Path, value: float, number: int | None, after_s: float | None = None) -> int | None:
    _start_server()
    process: multiprocessing.process.BaseProcess = _CONTEXT.Process(
        target=saver.main, args=(str(folder), value, number, after_s)
    )
    process.start()
    process.join(60)
    process.kill()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_save_that_is_killed_before_any_of_its_file_operations(step: int, tmp_path: Path) -> None:
    """Every one of them in turn, or every sixth, until a save gets through."""
    folder = tmp_path / "cache"
    saver.save(folder, 0.0)
    shutil.copytree(folder, tmp_path / "first")
    ends = []
    for number in range(0, 100, step):
        exit_code = interrupted(folder, 1.0, number)
        ends.append(saver.load(folder))
        assert ends[-1] in ({0.0}, {1.0})
        count("interrupted save")
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
        if ends[-1] == {1.0}:
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "first", folder)
    else:
        raise AssertionError("no save got through")
    assert number > 8
    assert ends[-1] == {1.0}
    assert {0.0} in ends
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == ["cache.json", "data"]


@pytest.mark.slow
def test_saves_that_are_killed_at_random(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    saver.save(folder, 0.0)
    earlier, ends = 0.0, set()
    for number in range(1, 201):
        exit_code = interrupted(folder, float(number), None, 0.0005 * (number % 100))
        (found,) = saver.load(folder)
        assert found in (earlier, float(number))
        assert exit_code == -signal.SIGKILL or found == number
        ends.add(found == number)
        earlier = found
    assert ends == {True, False}
