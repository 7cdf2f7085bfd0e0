"""`group=None` in a process that torchrun started, without a process group."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.transports.base import ALONE

LAYOUT = rs.contiguous(4, 1)
X = torch.ones(1, 1, 4, 8)


def attend(group: Any = None, layout: rs.Layout = LAYOUT) -> Any:
    x = X[:, :, : layout.shard_len(0)]
    return rs.attention(x, x, x, mask=rs.causal(), layout=layout, group=group)


def test_one_of_several_processes_does_not_compute_alone(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for call in (attend, lambda: rs.gather(X, LAYOUT, dim=2), lambda: rs.shard(X, LAYOUT, dim=2)):
        with subtests.test(f"{call}"):
            with pytest.raises(rs.TransportError, match=r"group=None, WORLD_SIZE=4: .*one of 4 processes") as raised:
                call()
            assert "torch.distributed.init_process_group(...)" in str(raised.value)
            assert "or pass group=" in str(raised.value)


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "1"), ("WORLD_SIZE", ""), ("OMPI_COMM_WORLD_SIZE", "4")])
def test_other_variables_leave_a_single_process_alone(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert torch.equal(attend(), X)


def test_a_group_that_is_given_is_used_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert torch.equal(attend(ALONE), X)
    parts = rs.run_in_process(lambda group: attend(group, rs.contiguous(4, 2)), 2)
    assert torch.equal(torch.cat(parts, 2), X)


PROGRAM = """
import sys, torch, torch.distributed as dist, ringspan as rs
x = torch.ones(1, 1, 4, 8)
try:
    rs.attention(x, x, x, mask=rs.causal(), layout=rs.contiguous(4, 1))
except rs.TransportError as error:
    assert "init_process_group" in str(error), error
else:
    sys.exit("computed alone")
dist.init_process_group("gloo")
out = rs.attention(x[:, :, :2], x[:, :, :2], x[:, :, :2], mask=rs.causal(), layout=rs.contiguous(4, 2))
assert torch.equal(out, x[:, :, :2])
dist.destroy_process_group()
print("done")
"""


def test_torchrun(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    ended = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2
