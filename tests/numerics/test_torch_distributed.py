"""Which backend carries the messages of a process group? The group is fake, so no GPU is needed."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringspan.transports.base import Receive, Send
from ringspan.transports.torch_distributed import TorchDistributed


class Group:
    """The first of two ranks; it records its calls."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def send(self, tensors: Any, peer: int, tag: int) -> None:
        self.done.append("send")

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        self.done.append("receive")
        return SimpleNamespace(wait=lambda timeout: None)

    def _get_backend(self, device: torch.device) -> Any:
        options = SimpleNamespace(_timeout=timedelta(seconds=7 if device.type == "cuda" else 5))
        return SimpleNamespace(options=options, abort=lambda: self.done.append(f"abort {device.type}"))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    made_up = Group()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    store = SimpleNamespace(compare_set=lambda key, before, after: after.encode())
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda _: store)
    monkeypatch.setattr(dist, "P2POp", lambda op, *_, **__: "send" if op is dist.isend else "receive")
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: made_up.done.append(f"batch {operations}"))
    return made_up


def opened(group: Group, backends: str, monkeypatch: pytest.MonkeyPatch) -> TorchDistributed:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
    return TorchDistributed(group)  # type: ignore[arg-type]


ONE_BY_ONE, BATCH = ["receive", "send"], ["batch ['receive', 'send']"]


@pytest.mark.parametrize(
    ("backends", "device", "done"),
    [
        ("cuda:nccl", "cuda", BATCH),
        ("cpu:gloo,cuda:nccl", "cuda", BATCH),
        ("cuda:nccl,cpu:gloo", "cuda", BATCH),
        ("cpu:gloo,cuda:nccl", "cpu", ONE_BY_ONE),
        ("cpu:gloo,cuda:gloo,mps:gloo", "cuda", ONE_BY_ONE),
        ("cpu:gloo,cuda:gloo,mps:gloo", "cpu", ONE_BY_ONE),
    ],
)
def test_messages_go_the_way_of_their_device(
    backends: str, device: str, done: list[str], group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = opened(group, backends, monkeypatch)
    tensor: Any = SimpleNamespace(is_cuda=device == "cuda", device=torch.device(device), nbytes=4)
    transport.exchange([Send(1, tensor)], [Receive(1, tensor)])
    assert group.done == done


def test_a_step_without_messages_starts_no_batch(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL accepts no empty message."""
    posted = opened(group, "cuda:nccl", monkeypatch).exchange([], [])
    assert (posted.sends, posted.receives, group.done) == ([], [], [])


@pytest.mark.parametrize(
    ("backends", "timeout_s", "done"),
    [
        ("cuda:nccl", 7.0, ["abort cuda"]),
        ("cpu:gloo,cuda:nccl", 7.0, ["abort cuda", "receive"]),
        ("cpu:gloo,cuda:gloo", 5.0, ["receive"]),
    ],
)
def test_a_rank_that_gives_up_ends_all_that_its_group_has(
    backends: str, timeout_s: float, done: list[str], group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gloo by a receive that no rank answers; the deadline is that of the backend of the agreement."""
    transport = opened(group, backends, monkeypatch)
    assert transport.timeout_s == timeout_s
    transport.abort("no more")
    assert group.done == done
