"""The example that denoises a video runs on two ranks, and finds itself right."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

import subprocess

EXAMPLE = Path(__file__).parents[2] / "examples" / "video_denoise.py"

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]


def test_two_ranks_denoise_as_one_process_does(tmp_path):
    """Interpreters of their own: what ranks agree on must not depend on how Python hashes."""
    strip = tmp_path / "strip.png"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, str(EXAMPLE), "--strip", str(strip)], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 ranks; 2 blocks; 2 × self, 2 × cross" in ended.stdout
    assert strip.stat().st_size > 0
