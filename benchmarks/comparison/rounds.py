"""How are contenders measured side by side, and where are the figures kept until there are enough?

In every round each due contender runs once, in random order, with contenders whose ratio matters next to each other, so
that disturbances affect both; ratios are taken within a round. A round in which other programs used the machine is
discarded. Rounds are kept in a file per point, so that a measurement can be stopped and resumed at any time. Rounds of
other code than the present are discarded too.
"""

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from comparison.points import IDEALS, OURS, PEERS, WIDE, Point
from comparison.team import BENCHMARKS, Sample, Team, TeamFailed

PEER_LIMIT_BYTES = 10 * 2**30  # of one rank
PEER_LIMIT_S = 300.0
MOST_OTHERS = 0.05  # share of the machine that other programs may take in a round
TRIED = 3  # rounds after which only the faster ideal continues
_STAT = Path("/proc/stat")
_COARSE_S = 0.04  # error of that count, in hundredths of a core
_BESIDE = {"bench", "cli", "report", "lesson", "teaching.py", "simulate.py"}  # not part of a call


@dataclass(slots=True)
class Record:
    """The record of a point: rounds of samples, reasons why contenders did not run, and wrong results."""

    rounds: list[dict[str, Sample]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    code: str = ""

    def count(self, contender: str) -> int:
        """Return in how many rounds it ran."""
        return sum(contender in it for it in self.rounds)

    def ideal(self) -> str:
        """Return the faster ideal: both ran in the first rounds, and the one with more rounds went on."""
        return max(IDEALS, key=lambda name: (self.count(name), -self._seconds(name)))

    def _seconds(self, contender: str) -> float:
        return sum(it[contender].seconds for it in self.rounds if contender in it)


class Store:
    """The file of all records."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[str, Record] = {}
        if path.exists():
            for name, it in json.loads(path.read_text()).items():
                rounds = [{who: Sample(*sample) for who, sample in one.items()} for one in it.pop("rounds")]
                self._records[name] = Record(rounds, **it)

    def record(self, point: Point) -> Record:
        """Return the record of the present code; empty if there is none."""
        record = self._records.get(point.name)
        if record is None or record.code != _code():
            record = self._records[point.name] = Record(code=_code())
        return record

    def forget(self, point: Point) -> None:
        """Delete the record."""
        self._records.pop(point.name, None)

    def save(self) -> None:
        """Write the whole file, or leave the old one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({name: asdict(record) for name, record in self._records.items()}))
        new.replace(self._path)


def _code() -> str:
    """Hash the code that is measured."""
    source = BENCHMARKS.parent / "src" / "ringspan"
    files = [path for path in source.rglob("*.py") if path.relative_to(source).parts[0] not in _BESIDE]
    files += [BENCHMARKS / "comparison" / f"{name}.py" for name in ("ours", "torch_only", "peers", "case")]
    files.append(source / "bench" / "baselines.py")
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(files))).hexdigest()[:16]


def measure(
    point: Point,
    store: Store,
    pairs: int,
    deadline: float,
    peers_python: str | None,
    most_others: float,
    tell: Callable[[str], None],
) -> None:
    """Add rounds to the point's record until there are enough or the time is up."""
    record, num_rounds = store.record(point), point.num_rounds(pairs)
    peers = [it for it in point.peers if peers_python is not None and it not in record.failures]
    if len(record.rounds) >= num_rounds and all(record.count(it) for it in peers):
        return
    with _teams(point, record, peers, peers_python) as teams:
        for contender in point.contenders:
            if point.every(contender) == 1:
                teams[contender].run(contender)  # the first run of a process is not counted
        while len(record.rounds) < num_rounds or any(it in teams and not record.count(it) for it in peers):
            if time.monotonic() > deadline:
                return
            due = _due(point, record, teams)
            samples = _run(due.beside, record, teams)
            busy_s, start_s = _busy_seconds(), time.monotonic()
            compared = _run(due.compared, record, teams)
            own_s = sum(it.cpu_seconds for it in compared.values())
            others = (
                max(0.0, _busy_seconds() - busy_s - own_s - _COARSE_S)
                / (time.monotonic() - start_s)
                / (os.cpu_count() or 1)
            )
            samples |= compared
            brief = ", ".join(f"{name} {sample.seconds:.3f}" for name, sample in samples.items())
            tell(f"{point.name}: round {len(record.rounds) + 1} of {num_rounds}: {brief}; others {others:.0%}")
            if others <= most_others:
                record.rounds.append(samples)
                store.save()


@contextmanager
def _teams(point: Point, record: Record, peers: list[str], peers_python: str | None) -> Iterator[dict[str, Team]]:
    """Yield the team of every contender: one team for this environment, and one for each peer that runs."""
    home = Team(sys.executable, point, point.contenders)
    teams = dict.fromkeys(point.contenders, home)
    try:
        if home.wrong:
            raise TeamFailed("; ".join(f"{name}: {text}" for name, text in home.wrong.items()))
        for peer in peers:
            assert peers_python is not None
            try:
                teams[peer] = Team(peers_python, point, (peer,), PEER_LIMIT_BYTES, PEER_LIMIT_S)
            except TeamFailed as error:
                record.failures[peer] = str(error)
            else:
                record.wrong |= teams[peer].wrong
        yield teams
    finally:
        for team in set(teams.values()):
            team.close()


class _Due(NamedTuple):
    """Return who runs in a round: first peers and others, then the contenders whose ratio matters."""

    beside: list[str]
    compared: list[str]


def _due(point: Point, record: Record, teams: dict[str, Team]) -> _Due:
    index = len(record.rounds)
    due = [it for it in teams if record.count(it) <= index // point.every(it)]
    if OURS in due and index >= TRIED and point.peers:
        due.remove(min(IDEALS, key=lambda name: name == record.ideal()))
    random.Random(index).shuffle(due)
    if not point.peers:
        return _Due([], due)
    compared = (OURS, WIDE, *IDEALS)
    return _Due([it for it in due if it not in compared], [it for it in due if it in compared])


def _run(contenders: list[str], record: Record, teams: dict[str, Team]) -> dict[str, Sample]:
    samples = {}
    for contender in contenders:
        try:
            samples[contender] = teams[contender].run(contender)
        except TeamFailed as error:
            if contender not in PEERS:
                raise
            record.failures[contender] = str(error)
            teams.pop(contender).close()
    return samples


def _busy_seconds() -> float:
    """Return the seconds of all cores since boot, including those taken by the host; 0 if unknown."""
    if not _STAT.exists():
        return 0.0
    user, nice, system, _idle, _wait, *interrupts_and_stolen = map(int, _STAT.read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(interrupts_and_stolen)) / os.sysconf("SC_CLK_TCK")
