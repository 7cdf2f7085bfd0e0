"""The examples run, and find themselves right."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_conversation_says_the_same_as_on_one_device() -> None:
    command = [sys.executable, str(EXAMPLES / "conversation.py"), "--ranks", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "tokens on 3 ranks and on one device: the same" in ended.stdout
    assert "a follow-up: 9 new tokens after 1540" in ended.stdout
