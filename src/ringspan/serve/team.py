"""How does one rank load the model and meet the others?"""

import os
import sys
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers

from ringspan.adapters.transformers import Handle, parallelize
from ringspan.algorithms import register_entry_points
from ringspan.runtime.calibrate import measure_machine
from ringspan.serve.commands import CommandLine, RankCommand, RankModel
from ringspan.serve.frames import Frame
from ringspan.serve.pulse import Pulse

START_TIMEOUT_S = 600.0
"""For all ranks to have loaded the model."""


class Team(NamedTuple):
    """This rank's model, and its connection to the other ranks."""

    num_ranks: int
    handle: Handle
    model: Any
    ranked: RankModel
    line: CommandLine
    pulse: Pulse

    def obey(self, command: RankCommand) -> dict[int, torch.Tensor]:
        """Execute a command while heartbeats report this rank as busy."""
        self.pulse.busy_since = time.monotonic()
        try:
            return self.ranked.obey(command)
        finally:
            self.pulse.busy_since = None


def join(rank: int, num_ranks: int, init_method: str, task: Frame, pulse: Pulse) -> Team:
    """Load the model, wait for all ranks, and check that it is exact on them."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    register_entry_points()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        task["folder"],
        dtype=getattr(torch, task["dtype"]),
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    model.eval()
    if not task["is_under_torchrun"] or os.environ.get("LOCAL_WORLD_SIZE") == str(num_ranks):  # all on this machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    start = timedelta(seconds=START_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=num_ranks, timeout=start)
    limit = timedelta(seconds=task["rank_timeout_s"])
    group = dist.new_group(backend="gloo", timeout=limit)
    line = CommandLine(dist.new_group(backend="gloo", timeout=limit))  # commands never meet attention's messages
    dist.barrier()
    handle = parallelize(model, group, verify=task["verify"])
    first = handle.layers[0]
    measure_machine(group, dtype=first.dtype, head_dim=first.head_dim)  # else the first turn of a client pays for it
    ranked = RankModel(handle, line, task["storage"], task["save_dir"])
    dist.barrier()
    return Team(num_ranks, handle, model, ranked, line, pulse)
