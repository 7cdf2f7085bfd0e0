"""The agreement between ranks: what they send, when they send a full description, and which error all raise."""

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

import ringspan as rs
from ringspan.runtime.contract import Contract, Signature
from ringspan.runtime.scratch import ScratchPool
from ringspan.runtime.session import Session, session_of
from ringspan.runtime.wire import Buffers
from ringspan.transports.base import Posted, Receive, Send
from ringspan.transports.in_process import InProcessRank

FIELDS = {"batch": 2, "heads": "8 over 2", "mask": rs.causal(), "scale": 0.125}
TIMEOUT_S = 20.0
HEADER_BYTES = 28
DIGEST = 4019513702733365018  # of causal() in a batch of 2


class Listening:
    """A transport that records the lengths of the payloads that it gathered, and the deadlines."""

    def __init__(self, inner: InProcessRank) -> None:
        self.inner = inner
        self.rank, self.world_size, self.timeout_s = inner.rank, inner.world_size, inner.timeout_s
        self.lengths: list[int] = []
        self.deadlines: list[float] = []

    def exchange(self, sends: list[Send], receives: list[Receive]) -> Posted:
        raise AssertionError("an agreement needs no exchange")

    def all_gather_bytes(self, payload: bytes, timeout_s: float) -> list[bytes]:
        self.lengths.append(len(payload))
        self.deadlines.append(timeout_s)
        return self.inner.all_gather_bytes(payload, timeout_s)

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self.inner.close()


def on_ranks(world_size: int, fn: Callable[[Contract, int], Any]) -> list[Any]:
    return rs.run_in_process(lambda group: fn(Contract(Listening(group)), group.rank), world_size)


def error_of(fn: Callable[[], object]) -> str:
    with pytest.raises(rs.TransportError) as raised:
        fn()
    return str(raised.value)


def test_the_digest_is_the_same_everywhere_and_for_ever() -> None:
    assert Signature.of({"mask": rs.causal(), "batch": 2}).digest == DIGEST
    assert Signature.of({"mask": "causal()", "batch": "2"}).digest == DIGEST


@pytest.mark.parametrize("name", FIELDS)
def test_the_digest_knows_every_field(name: str) -> None:
    signatures = [Signature.of(FIELDS), Signature.of({**FIELDS, name: "other"})]
    signatures.append(Signature.of({key: value for key, value in FIELDS.items() if key != name}))
    assert len({signature.digest for signature in signatures}) == 3


def test_a_single_rank_sends_no_header() -> None:
    def agree(contract: Contract, _: int) -> list[int]:
        contract.agree(Signature.of(FIELDS), TIMEOUT_S)
        assert isinstance(contract.transport, Listening)
        return contract.transport.lengths

    assert on_ranks(1, agree) == [[]]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_signature_is_described_once_and_then_known_by_its_digest(world_size: int) -> None:
    def agree(contract: Contract, rank: int) -> list[int]:
        for fields in (FIELDS, FIELDS, {**FIELDS, "batch": 3}, FIELDS, {**FIELDS, "batch": 3}):
            contract.agree(Signature.of(fields), TIMEOUT_S)
        return contract.transport.lengths

    for first, text, second, third, other_text, *known in on_ranks(world_size, agree):
        assert (first, second, third, known) == (HEADER_BYTES, HEADER_BYTES, HEADER_BYTES, [HEADER_BYTES] * 2)
        assert min(text, other_text) > 40


def test_the_field_the_odd_rank_and_both_values_are_named_on_all_ranks() -> None:
    def disagree(contract: Contract, rank: int) -> str:
        fields = {**FIELDS, "mask": rs.full()} if rank == 2 else FIELDS
        return error_of(lambda: contract.agree(Signature.of(fields), TIMEOUT_S))

    expected = "the ranks do not make the same call; mask: rank 2 has full(), ranks 0, 1, 3 have causal()"
    assert on_ranks(4, disagree) == [expected] * 4


def test_all_fields_that_differ_are_named() -> None:
    def disagree(contract: Contract, rank: int) -> str:
        fields = {**FIELDS, "batch": rank // 2, "scale": rank}
        return error_of(lambda: contract.agree(Signature.of(fields), TIMEOUT_S))

    (message,) = set(on_ranks(4, disagree))
    assert "batch: ranks 0, 1 have 0, ranks 2, 3 have 1" in message
    assert "scale: rank 0 has 0, rank 1 has 1, rank 2 has 2, rank 3 has 3" in message
    assert "mask" not in message
    assert "heads" not in message


def test_a_field_that_only_one_rank_has_is_named() -> None:
    def disagree(contract: Contract, rank: int) -> str:
        fields = FIELDS if rank else {**FIELDS, "call": "gather"}
        return error_of(lambda: contract.agree(Signature.of(fields), TIMEOUT_S))

    assert {"call: rank 0 has gather, ranks 1, 2 have -" in message for message in on_ranks(3, disagree)} == {True}


def test_two_known_signatures_are_still_distinguished() -> None:
    other = {**FIELDS, "scale": 1.0}

    def disagree(contract: Contract, rank: int) -> str:
        for fields in (FIELDS, other):
            contract.agree(Signature.of(fields), TIMEOUT_S)
        message = error_of(lambda: contract.agree(Signature.of(other if rank == 1 else FIELDS), TIMEOUT_S))
        contract.agree(Signature.of(FIELDS), TIMEOUT_S)  # the contract still works
        return message

    expected = "the ranks do not make the same call; scale: rank 1 has 1.0, ranks 0, 2 have 0.125"
    assert on_ranks(3, disagree) == [expected] * 3


def test_a_signature_that_was_refused_is_not_known_afterwards() -> None:
    def agree(contract: Contract, rank: int) -> list[int]:
        error_of(lambda: contract.agree(Signature.of({**FIELDS, "batch": rank}), TIMEOUT_S))
        contract.agree(Signature.of({**FIELDS, "batch": 0}), TIMEOUT_S)
        return contract.transport.lengths

    for lengths in on_ranks(2, agree):
        assert len(lengths) == 4


def test_a_signature_new_to_one_rank_only_is_described_to_all() -> None:
    def agree(contract: Contract, rank: int) -> int:
        if rank == 0:
            contract.agreed.add(Signature.of(FIELDS).digest)
        contract.agree(Signature.of(FIELDS), TIMEOUT_S)
        return len(contract.transport.lengths)

    assert on_ranks(3, agree) == [2, 2, 2]


def test_calls_out_of_step() -> None:
    def agree(contract: Contract, rank: int) -> str:
        contract.agree(Signature.of(FIELDS), TIMEOUT_S)
        contract.num_calls += rank == 1
        return error_of(lambda: contract.agree(Signature.of(FIELDS), TIMEOUT_S))

    expected = "the ranks are out of step: rank 1 has call 3, ranks 0, 2 have call 2; every rank must make every call"
    assert on_ranks(3, agree) == [expected] * 3


def test_a_refusal_reaches_all_others_and_raises_nothing_on_the_rank_itself() -> None:
    def refuse(contract: Contract, rank: int) -> str | None:
        message = None
        if rank == 1:
            contract.refuse("ShapeError: q is flat", TIMEOUT_S)
        else:
            message = error_of(lambda: contract.agree(Signature.of(FIELDS), TIMEOUT_S))
        contract.agree(Signature.of(FIELDS), TIMEOUT_S)
        return message

    told = "the call was refused, on rank 1: ShapeError: q is flat"
    assert on_ranks(3, refuse) == [told, None, told]


def test_several_refusals() -> None:
    def refuse(contract: Contract, rank: int) -> str | None:
        if rank == 3:
            return error_of(lambda: contract.agree(Signature.of(FIELDS), TIMEOUT_S))
        contract.refuse(f"because of {rank}", TIMEOUT_S)
        return None

    *_, message = on_ranks(4, refuse)
    assert all(f"rank {rank}: because of {rank}" in message for rank in range(3))


def session_with(contract: Contract) -> Session:
    return Session(contract.transport, None, contract, Buffers(), ScratchPool(), {}, {})


@pytest.mark.parametrize(
    ("timeout_s", "deadline_s"), [(7, 7.0), (math.inf, math.inf), *((x, 60.0) for x in (None, 0, -1, math.nan, "soon"))]
)
def test_a_refusal_has_the_deadline_of_the_call_or_else_of_the_group(timeout_s: object, deadline_s: float) -> None:
    """An invalid timeout is itself refused."""

    def refuse(contract: Contract, rank: int) -> list[float]:
        if rank == 1:
            error_of(lambda: contract.agree(Signature.of(FIELDS), TIMEOUT_S))
            return []
        with pytest.raises(rs.ShapeError, match=r"q is flat|timeout_s"), session_with(contract).call(timeout_s):
            raise rs.ShapeError("q is flat")
        assert isinstance(contract.transport, Listening)
        return contract.transport.deadlines

    deadlines, _ = on_ranks(2, refuse)
    assert deadlines == [deadline_s] * 2


def test_an_error_is_raised_though_the_others_cannot_be_reached() -> None:
    """One rank never comes; the test is over long before the group's deadline."""
    is_told = threading.Event()

    def refuse(group: InProcessRank) -> None:
        if group.rank == 1:
            is_told.wait(TIMEOUT_S)
            return
        group.timeout_s = 60.0
        try:
            with pytest.raises(rs.ShapeError, match="q is flat"), session_with(Contract(group)).call(0.1):
                raise rs.ShapeError("q is flat")
        finally:
            is_told.set()

    rs.run_in_process(refuse, 2, timeout_s=5.0)


def test_an_error_after_the_ranks_agreed_ends_the_wait_of_the_others() -> None:
    def fail(group: InProcessRank) -> str:
        try:
            with session_of(group).call() as call:
                call.agree(Signature.of(FIELDS))
                if group.rank == 1:
                    raise KeyError("lost")
                group.all_gather_bytes(b"x", 60.0)
        except (KeyError, rs.TransportError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    waiting, failed = rs.run_in_process(fail, 2, timeout_s=5.0)
    assert "rank 1 failed: KeyError: 'lost'" in waiting
    assert failed == "KeyError: 'lost'"


@pytest.mark.parametrize("num_documents", [1, 1000, 100_000])
def test_descriptions_of_any_length(num_documents: int) -> None:
    mask = rs.documents([1 + i % 7 for i in range(num_documents)])

    def disagree(contract: Contract, rank: int) -> str:
        contract.agree(Signature.of({**FIELDS, "mask": mask}), TIMEOUT_S)
        fields = {**FIELDS, "mask": mask if rank else rs.causal()}
        return error_of(lambda: contract.agree(Signature.of(fields), TIMEOUT_S))

    for message in on_ranks(3, disagree):
        assert "mask: rank 0 has causal(), ranks 1, 2 have documents([1" in message
        assert len(message) < 2000, "an error is for reading"


def test_letters_outside_ascii() -> None:
    def refuse(contract: Contract, rank: int) -> str | None:
        if rank == 0:
            contract.refuse("größer als 4 × 4 → nein", TIMEOUT_S)
            return None
        return error_of(lambda: contract.agree(Signature.of(FIELDS), TIMEOUT_S))

    assert "rank 0: größer als 4 × 4 → nein" in on_ranks(2, refuse)[1]


def test_a_rank_that_does_not_come() -> None:
    def agree(contract: Contract, rank: int) -> str:
        contract.agree(Signature.of(FIELDS), TIMEOUT_S)
        return error_of(lambda: contract.agree(Signature.of(FIELDS), 0.2)) if rank != 1 else ""

    first, _, last = on_ranks(3, agree)
    assert first.startswith("rank 0, call 2, before its first step: ")
    assert last.startswith("rank 2, call 2, before its first step: ")
    assert "rank 1" in first


def test_bytes_that_are_not_a_header_are_refused() -> None:
    """As from another version of ringspan."""

    def agree(contract: Contract, rank: int) -> str:
        if rank == 1:
            contract.transport.all_gather_bytes(b"\xff" * HEADER_BYTES, TIMEOUT_S)
            return ""
        return error_of(lambda: contract.agree(Signature.of(FIELDS), 0.5))

    message, _ = on_ranks(2, agree)
    assert "rank 1 did not send a header" in message
    assert "version" in message
