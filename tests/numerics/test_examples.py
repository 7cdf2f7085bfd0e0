"""The conversation example runs and gets the answers of one device."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_conversation_says_the_same_as_on_one_device() -> None:
    command = [sys.executable, str(EXAMPLES / "conversation.py"), "--ranks", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "tokens on 3 ranks and on one device: the same" in ended.stdout
    assert "a follow-up: 9 new tokens after 1540" in ended.stdout


@pytest.mark.parametrize("ranks", ["0", "-2"])
def test_a_conversation_needs_a_rank(
    ranks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["conversation.py", "--ranks", ranks])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / "conversation.py"), run_name="__main__")
    assert f"--ranks {ranks}: give 1 or more" in capsys.readouterr().err
