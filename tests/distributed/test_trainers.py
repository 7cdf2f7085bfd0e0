"""Do the Trainer, accelerate and TRL give on two ranks what they give unmodified on one process?"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ringspan as rs
from support.ranks import run_ranks, values

pytest.importorskip("trl")
pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(400), pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Runs an example as its user had it before the line was added.
UNMODIFIED = """
import runpy, sys
import ringspan.adapters.accelerate as accelerate
accelerate.parallelize = accelerate.parallelize_trainer = lambda *objects: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TIMES = ("runtime", "per_second")
CASES = [
    ("train_with_trainer", []),
    ("train_with_accelerate", []),
    ("train_with_trl", []),
    ("train_with_trl", ["--packing"]),
]


def run(name: str, argv: list[str], folder: Path, *, world_size: int = 1, is_modified: bool = True) -> list[Any]:
    folder.mkdir()
    unmodified = folder / "unmodified.py"
    unmodified.write_text(UNMODIFIED)
    program = [*(TORCHRUN if world_size > 1 else []), *([] if is_modified else [str(unmodified)])]
    output = [] if name == "train_with_accelerate" else ["--output", str(folder / "output")]
    command = [sys.executable, *program, str(EXAMPLES / f"{name}.py"), *argv, *output]
    ended = subprocess.run(
        [*command, "--losses", str(folder / "log.json")],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    log = json.loads((folder / "log.json").read_text())
    return [{key: x for key, x in entry.items() if not key.endswith(TIMES)} for entry in log]


def largest_difference(one: list[Any], two: list[Any]) -> float:
    assert [entry.keys() for entry in one] == [entry.keys() for entry in two]
    return max(abs(a[key] - b[key]) for a, b in zip(one, two, strict=True) for key in a)


@pytest.mark.parametrize(("name", "argv"), CASES, ids=["Trainer", "accelerate", "SFT, LoRA", "SFT, LoRA, packed"])
def test_two_ranks_log_what_one_unmodified_process_logs(name: str, argv: list[str], tmp_path: Path) -> None:
    one = run(name, argv, tmp_path / "one", is_modified=False)
    two = run(name, argv, tmp_path / "two", world_size=2)
    assert {"loss", "grad_norm"} <= one[0].keys()
    assert one[-2].get("loss", 0) != one[0]["loss"]
    assert largest_difference(one, two) < 1e-5


def test_without_the_line_two_ranks_log_something_else(tmp_path: Path) -> None:
    argv = ["--steps", "2"]
    one = run("train_with_accelerate", argv, tmp_path / "one", is_modified=False)
    two = run("train_with_accelerate", argv, tmp_path / "two", world_size=2, is_modified=False)
    assert abs(one[0]["grad_norm"] - two[0]["grad_norm"]) > 1e-3


def on_accelerator(rank: int, name: str, world_size: int = 2) -> Any:
    """Call one of the functions below as a process that torchrun started."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from small_model import load

    set_seed(0)
    return globals()[name](rank, Accelerator(cpu=True), load("random").model)


def on_ranks(fn: Any, world_size: int = 2) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return run_ranks(on_accelerator, world_size, fn.__name__, timeout_s=120)
    finally:
        sys.path.remove(str(EXAMPLES))


def train_on_other_batches(rank: int, accelerator: Any, model: Any) -> None:
    rs.adapters.accelerate.parallelize(accelerator, model)
    model.train()
    tokens = torch.full((1, 20), rank)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)


def test_ranks_with_other_batches_are_refused() -> None:
    for rank in on_ranks(train_on_other_batches):
        assert isinstance(rank.error, rs.TransportError)
        assert "input_ids" in rank.message


def forget_to_sum(rank: int, accelerator: Any, model: Any) -> None:
    rs.adapters.accelerate.parallelize(accelerator, model)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    tokens = torch.arange(20)[None]
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()  # accelerator.backward would sum
        optimizer.step()


def test_gradients_that_were_not_summed_are_noticed() -> None:
    for rank in on_ranks(forget_to_sum):
        assert isinstance(rank.error, rs.TransportError)
        assert "weights" in rank.message


def go_back(rank: int, accelerator: Any, model: Any) -> Any:
    before = (accelerator.num_processes, accelerator.distributed_type)
    handle = rs.adapters.accelerate.parallelize(accelerator, model)
    within = (accelerator.num_processes, accelerator.is_main_process, accelerator.process_index)
    accelerator.wait_for_everyone()
    handle.restore()
    assert (accelerator.num_processes, accelerator.distributed_type) == before
    assert "backward" not in vars(accelerator)
    return within


def test_restore_undoes_it() -> None:
    assert values(on_ranks(go_back)) == [(1, True, 0), (1, False, 1)]


def refuse(rank: int, accelerator: Any, model: Any) -> list[str]:
    from accelerate.utils import DistributedType

    def message(**changes: Any) -> str:
        before = {name: getattr(accelerator.state, name) for name in changes}
        vars(accelerator.state).update(changes)
        with pytest.raises(rs.UnsupportedError) as refused:
            rs.adapters.accelerate.parallelize(accelerator, model)
        vars(accelerator.state).update(before)
        return str(refused.value)

    messages = [message(distributed_type=DistributedType.FSDP), message(num_processes=4)]
    accelerator.prepare(torch.nn.Linear(2, 2))
    return [*messages, message()]


def test_what_would_be_wrong_is_refused() -> None:
    for fsdp, other_group, prepared in values(on_ranks(refuse)):
        assert "FSDP" in fsdp
        assert "all 4 processes" in other_group
        assert "before accelerator.prepare" in prepared
