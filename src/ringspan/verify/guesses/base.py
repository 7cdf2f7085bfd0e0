"""What a guess is: a mistake, and the numbers that it would give in one case."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ringspan.verify.cases import VerifyCase, ranks_of
from ringspan.verify.oracle import OracleAnswer, Question, answer, forward
from ringspan.verify.patterns import Numbers


class Guess(NamedTuple):
    """`result` is the name of the array that the mistake would change, `values` what it would become."""

    mistake: str
    result: str
    values: Numbers
    detail: str = ""


class Setting(NamedTuple):
    """A case with its right answer and the ranks that hold its queries and keys."""

    case: VerifyCase
    question: Question
    right: OracleAnswer
    q_rank: Numbers
    kv_rank: Numbers

    @classmethod
    def of(cls, case: VerifyCase) -> "Setting":
        question = case.question()
        return cls(case, question, answer(question), *ranks_of(case))

    @property
    def ranks(self) -> range:
        return range(self.case.world_size)

    def out_and_lse(self, mistake: str, detail: str = "", **changes: Any) -> list[Guess]:
        """Guesses for a question with some fields changed."""
        out, lse = forward(replace(self.question, **changes))
        return [Guess(mistake, "out", out, detail), Guess(mistake, "lse", lse, detail)]

    def by_rank(self, mistake: str, change: Callable[[int], dict[str, Any]], detail: str = "") -> list[Guess]:
        """Guesses for changes that depend on the rank of the query."""
        out, lse = np.empty_like(self.right.out), np.empty_like(self.right.lse)
        for rank in self.ranks:
            rows = self.q_rank == rank
            whole = forward(replace(self.question, **change(rank)))
            out[:, :, rows], lse[:, :, rows] = whole[0][:, :, rows], whole[1][:, :, rows]
        return [Guess(mistake, "out", out, detail), Guess(mistake, "lse", lse, detail)]

    def hops(self) -> Numbers:
        """(n, m): at which step of a forward ring the query's rank attends to the key's block."""
        steps: Numbers = (self.q_rank[:, None] - self.kv_rank[None, :]) % self.case.world_size
        return steps

    def scopes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Parts of a schedule in which a mistake may be made alone: their names and steps."""
        size = self.case.world_size
        if size > 1:
            yield "in the rank's own block", (0,)
            yield "in the blocks of other ranks", tuple(range(1, size))
        if size > 2:
            yield from ((f"in step {step}", (step,)) for step in range(1, size))
