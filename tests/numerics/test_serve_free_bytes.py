"""How much memory is free, to the machine and to a container."""

from pathlib import Path

import pytest

from ringspan.serve.lead import free_bytes


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal:  4000 kB\nMemAvailable:     3000 kB\nHugePages_Total:       0\n"}
GROUP = {"sys/fs/cgroup/memory.current": "500000\n", "sys/fs/cgroup/memory.stat": "anon 400000\ninactive_file 50000\n"}


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 3_072_000), ("1000000", 550_000), ("400000", 0), ("9000000000", 3_072_000)]
)
def test_a_container_has_what_its_limit_leaves(tmp_path, limit, free):
    write(tmp_path, MEMINFO | GROUP | {"sys/fs/cgroup/memory.max": f"{limit}\n"})
    assert free_bytes(tmp_path) == free


def test_a_machine_has_what_its_kernel_says_and_one_that_says_nothing_half_of_its_memory(tmp_path):
    half = free_bytes(tmp_path)
    write(tmp_path, MEMINFO)
    assert free_bytes(tmp_path) == 3_072_000
    assert half > 2**20
