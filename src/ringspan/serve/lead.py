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
    book = SlotBook(team.num_ranks, row_bytes, task["cache_bytes"] or free_bytes() // (2 * team.num_ranks))
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


def free_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that the machine has free, or a container's limit (cgroup v2) leaves, whichever are fewer."""
    meminfo = _numbers(root / "proc/meminfo")
    found = [1024 * meminfo["MemAvailable"]] if "MemAvailable" in meminfo else [_installed_bytes() // 2]
    group = root / "sys/fs/cgroup"
    limit = _numbers(group / "memory.max", "limit").get("limit")
    if limit is not None:
        used = _numbers(group / "memory.current", "used").get("used", 0)
        pages = _numbers(group / "memory.stat").get("inactive_file", 0)  # of files, given up when memory is short
        found.append(max(0, limit - used + pages))
    return min(found)


def _numbers(path: Path, name: str = "") -> dict[str, int]:
    """The numbers in a file of the kernel: each behind its name, or a single one; none if the file is missing."""
    rows = path.read_text().splitlines() if path.is_file() else []
    words = [f"{name} {row}".replace(":", " ").split() for row in rows]
    return {row[0]: int(row[1]) for row in words if len(row) > 1 and row[1].isdecimal()}


def _installed_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
