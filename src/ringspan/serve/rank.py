"""What does the process of one rank do?

Run as a module it is a process of `supervisor.py`: `python -m ringspan.serve.rank RANK STORE`. Its task comes as the
first frame on standard input, which stays open as long as the front lives; frames go to what was standard output, and
whatever libraries print goes to standard error.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from ringspan.algorithms import register_entry_points
from ringspan.errors import RingspanError, TransportError
from ringspan.serve.frames import Frame, pack, read

BEAT_S = 0.5
START_TIMEOUT_S = 600.0
"""For all ranks to have loaded the model."""


class Front:
    """The other end of this process's pipes."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink
        self._lock = threading.Lock()

    def tell(self, frame: Frame) -> None:
        """Send a frame, from any thread."""
        with self._lock:
            self._sink.write(pack(frame))
            self._sink.flush()

    def listen(self, put: Callable[[Frame], None]) -> None:
        """Pass on what comes in; the process ends when the front is gone."""
        while (frame := read(self._source)) is not None:
            put(frame)
        os._exit(1)


class Pulse:
    """Tells the front that this rank lives and is not caught in a command."""

    def __init__(self, front: Front, limit_s: float) -> None:
        self._front = front
        self._limit_s = limit_s
        self.busy_since: float | None = None

    def beat(self) -> None:
        """For a thread."""
        while True:
            since = self.busy_since
            if since is None or time.monotonic() - since < self._limit_s:
                self._front.tell({"kind": "beat"})
            time.sleep(BEAT_S)


def main() -> None:
    """A rank that the front has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when ranks end
    rank, store = int(sys.argv[1]), sys.argv[2]
    front = Front(sys.stdin.buffer, os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    task = read(sys.stdin.buffer)
    if task is None:
        os._exit(1)
    pulse = Pulse(front, task["rank_timeout_s"])
    threading.Thread(target=pulse.beat, daemon=True).start()
    try:
        _serve(rank, store, task, front, pulse)
    except BaseException as error:
        front.tell({"kind": "failed", "reason": _reason(error), "text": _describe(error)})
        os._exit(3)
    # Not through the interpreter's exit: tearing down a group may take its time.
    os._exit(0)


def _serve(rank: int, store: str, task: Frame, front: Front, pulse: Pulse) -> None:
    import torch
    import torch.distributed as dist
    import transformers

    from ringspan.adapters.transformers import parallelize
    from ringspan.runtime.calibrate import measure_machine
    from ringspan.serve.commands import CommandLine, Op, RankCommand, RankModel
    from ringspan.serve.leader import Leader, Mailbox
    from ringspan.serve.slots import SlotBook

    mailbox = Mailbox()
    threading.Thread(target=front.listen, args=(mailbox.put,), daemon=True).start()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    register_entry_points()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        task["folder"],
        dtype=getattr(torch, task["dtype"]),
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    model.eval()
    num_ranks = task["num_ranks"]
    start = timedelta(seconds=START_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=start)
    limit = timedelta(seconds=task["rank_timeout_s"])
    group = dist.new_group(backend="gloo", timeout=limit)
    line = CommandLine(dist.new_group(backend="gloo", timeout=limit))  # commands never meet attention's messages
    dist.barrier()
    handle = parallelize(model, group, verify=task["verify"])
    first = handle.layers[0]
    measure_machine(group, dtype=first.dtype, head_dim=first.head_dim)  # else the first turn of a client pays for it
    ranked = RankModel(model, handle)
    dist.barrier()

    def obey(command: RankCommand) -> Any:
        pulse.busy_since = time.monotonic()
        try:
            return ranked.obey(command)
        finally:
            pulse.busy_since = None

    if rank:
        while (command := line.receive()).op is not Op.END:
            obey(command)
        return
    row_bytes = sum(
        layer.heads.num_kv_heads * (layer.head_dim + layer.v_head_dim) * layer.dtype.itemsize for layer in handle.layers
    )
    book = SlotBook(num_ranks, row_bytes, task["cache_bytes"] or _free_bytes() // (2 * num_ranks))
    if not book.max_tokens:
        raise RingspanError(
            f"a rank's cache has room for no token; it needs {row_bytes} bytes for each, and some to spare",
            argument="cache_bytes",
            value=task["cache_bytes"],
            remedy="allow more",
        )
    leader = Leader(ranked, line, book, mailbox, front.tell, obey, task["prefill_chunk"])
    leader.warm_up(4 * num_ranks)
    front.tell({"kind": "ready", "max_tokens": book.max_tokens})
    leader.serve()


def _free_bytes() -> int:
    """Memory that could be used now."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for row in meminfo.read_text().splitlines():
            if row.startswith("MemAvailable:"):
                return int(row.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _reason(error: BaseException) -> str:
    if isinstance(error, TransportError):
        return "transport"  # often only the echo of another rank's end
    return "refused" if isinstance(error, (RingspanError, OSError, ValueError, ImportError)) else "error"


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if isinstance(error, RingspanError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    main()
