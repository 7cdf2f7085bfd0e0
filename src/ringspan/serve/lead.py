"""What do the ranks do once they have met? Rank 0 leads, the others follow."""

import os
from collections.abc import Callable
from pathlib import Path

from ringspan.adapters.gradients import digest_weights
from ringspan.errors import RingspanError
from ringspan.serve.archive import Archive
from ringspan.serve.commands import Op
from ringspan.serve.frames import Frame
from ringspan.serve.leader import Leader
from ringspan.serve.mailbox import Mailbox
from ringspan.serve.memory import ConversationMemory
from ringspan.serve.slots import SlotBook
from ringspan.serve.team import Team


def follow(team: Team) -> None:
    """Execute rank 0's commands until it ends."""
    while (command := team.line.receive()).op is not Op.END:
        team.obey(command)


def lead(team: Team, task: Frame, mailbox: Mailbox, tell: Callable[[Frame], None]) -> None:
    """Run rank 0: answer requests until the server ends."""
    row_bytes = team.ranked.cache.bytes_per_token
    book = SlotBook(team.num_ranks, row_bytes, task["cache_bytes"] or _free_bytes() // (2 * team.num_ranks))
    if not book.max_tokens:
        raise RingspanError(
            f"a rank's cache has room for no token; it needs {row_bytes} bytes for each, and some to spare",
            argument="cache_bytes",
            value=task["cache_bytes"],
            remedy="allow more",
        )
    archive = None
    if task["save_dir"] is not None:
        # The files say which shapes they are for; the same shapes with other weights are another model.
        archive = Archive(Path(task["save_dir"]), f"{digest_weights(team.model)} {task['dtype']} {task['storage']}")
    leader = Leader(
        team.line,
        ConversationMemory(book, archive),
        mailbox,
        tell,
        team.obey,
        lambda: team.ranked.chosen,
        task["prefill_chunk"],
    )
    leader.warm_up(4 * team.num_ranks)
    tell({"kind": "ready", "max_tokens": book.max_tokens, "saved": 0 if archive is None else archive.count})
    leader.serve()


def _free_bytes() -> int:
    """Bytes of free memory."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for row in meminfo.read_text().splitlines():
            if row.startswith("MemAvailable:"):
                return int(row.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
