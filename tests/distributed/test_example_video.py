"""The examples of video run, and find themselves right."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

import subprocess

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]


def test_two_ranks_denoise_as_one_process_does(tmp_path):
    """Interpreters of their own: what ranks agree on must not depend on how Python hashes."""
    strip = tmp_path / "strip.png"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, str(EXAMPLES / "video_denoise.py"), "--strip", str(strip)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 ranks; 2 blocks; 2 × self, 2 × cross" in ended.stdout
    assert strip.stat().st_size > 0


def test_a_stream_of_chunks_is_one_pass():
    command = [sys.executable, str(EXAMPLES / "streaming_video.py"), "--ranks", "3", "--chunks", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 chunks on 3 ranks differ from one pass by" in ended.stdout
