"""Random conversations over a KV cache: turns, aborts, truncations, drops, selections, then saved and gone on with."""

import tempfile
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import ringspan as rs
from ringspan.transports.in_process import InProcessRank
from support.campaign import HOW_MANY, count
from support.conversations import Story, live_through
from support.oracle import MaskSpec

MASKS: list[list[MaskSpec]] = [
    [("causal",)],
    [("causal",), ("sliding_window", 5, 0)],
    [("and", ("causal",), ("documents", (4, 9, 200)))],
]
lengths = st.dictionaries(st.integers(0, 3), st.integers(1, 12), min_size=1, max_size=3)


class Conversation(RuleBasedStateMachine):
    """Writes a story with the oracle's answers; at the end ranks live through it."""

    @initialize(
        seed=st.integers(0, 2**16),
        specs=st.sampled_from(MASKS),
        storage=st.sampled_from([None, "float32", "int8"]),
        world_size=st.sampled_from([1, 2, 3, 4]),
        later=st.sampled_from([None, 1, 3]),
    )
    def begin(self, seed: int, specs: list[MaskSpec], storage: str | None, world_size: int, later: int | None) -> None:
        self.world_size, self.later = world_size, later
        self.story = Story(seed, rs.Heads(4, 2), specs, torch.float32, storage=storage)

    @rule(
        lengths=lengths,
        kind=st.sampled_from(["turn", "turn", "abort"]),
        algorithm=st.sampled_from(["pass_kv", "pass_q"]),
    )
    def turn(self, lengths: dict[int, int], kind: str, algorithm: str) -> None:
        self.story.turn(lengths, kind, algorithm=algorithm)

    @rule(sequence=st.integers(0, 3), kind=st.sampled_from(["turn", "abort"]))
    def decode(self, sequence: int, kind: str) -> None:
        self.story.turn({sequence: 1}, kind, query="replicated")

    @precondition(lambda self: self.story.held)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.story.held)))
        self.story.truncate(sequence, data.draw(st.integers(0, self.story.length(sequence))))

    @precondition(lambda self: self.story.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.story.drop(data.draw(st.sampled_from(sorted(self.story.held))))

    @precondition(lambda self: self.story.held)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        self.story.select(tuple(data.draw(st.lists(st.sampled_from(sorted(self.story.held)), min_size=1, max_size=3))))

    def teardown(self) -> None:
        if not hasattr(self, "story"):
            return
        with tempfile.TemporaryDirectory() as folder:
            self._live(Path(folder) / "cache")
        for act in self.story.acts:
            count(f"cache operation, {act.kind}")

    def _live(self, folder: Path) -> None:
        def live(group: InProcessRank) -> None:
            live_through(self.story, group).save(folder)

        rs.run_in_process(live, self.world_size)
        if self.later is None:
            return
        rest = Story(1, self.story.heads, self.story.specs, self.story.dtype, **self.story.options)
        rest.held = {sequence: list(layers) for sequence, layers in self.story.held.items() if layers[0][0].shape[2]}
        for sequence in sorted(rest.held)[:2]:
            rest.turn({sequence: 3})

        def go_on(group: InProcessRank) -> None:
            cache = rest.cache(group)
            cache.load(folder)
            live_through(rest, group, cache)

        rs.run_in_process(go_on, self.later)
        count("cache operation, save and load")


TestConversation = Conversation.TestCase
TestConversation.settings = settings(HOW_MANY, stateful_step_count=12)
