"""What does the process of one rank do?

Run as a module it is a process of `supervisor.py`: `python -m ringspan.serve.rank RANK STORE`. Its task comes as the
first frame on standard input, which stays open as long as the front lives; frames go to what was standard output, and
whatever libraries print goes to standard error.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

from ringspan.errors import RingspanError, TransportError
from ringspan.serve.frames import Frame, pack, read
from ringspan.serve.pulse import Pulse


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
        """Pass on incoming frames; end the process when the server process is gone."""
        while (frame := read(self._source)) is not None:
            put(frame)
        os._exit(1)


def main() -> None:
    """The main function of a rank that the server process started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when ranks end
    rank, store = int(sys.argv[1]), sys.argv[2]
    front = Front(sys.stdin.buffer, os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    task = read(sys.stdin.buffer)
    if task is None:
        os._exit(1)
    pulse = Pulse(front.tell, task["rank_timeout_s"])
    threading.Thread(target=pulse.beat, daemon=True).start()
    try:
        _serve(rank, store, task, front, pulse)
    except BaseException as error:
        front.tell({"kind": "failed", "reason": reason(error), "text": describe(error)})
        os._exit(3)
    # Not through the interpreter's exit: tearing down a group may take its time.
    os._exit(0)


def _serve(rank: int, store: str, task: Frame, front: Front, pulse: Pulse) -> None:
    from ringspan.serve.lead import follow, lead
    from ringspan.serve.mailbox import Mailbox
    from ringspan.serve.team import join

    mailbox = Mailbox()
    threading.Thread(target=front.listen, args=(mailbox.put,), daemon=True).start()
    init_method = "env://" if task["is_under_torchrun"] else f"file://{store}"
    team = join(rank, task["num_ranks"], init_method, task, pulse)
    if rank:
        follow(team)
    else:
        lead(team, task, mailbox, front.tell)


def reason(error: BaseException) -> str:
    """The kind of a failure, for the front."""
    # Often only the echo of another rank's end; torch raises what gloo reports as RuntimeError.
    if isinstance(error, TransportError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return "transport"
    return "refused" if isinstance(error, (RingspanError, OSError, ValueError, ImportError)) else "error"


def describe(error: BaseException) -> str:
    """One line about a failure."""
    lines = str(error).strip().splitlines()
    if isinstance(error, RingspanError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    main()
