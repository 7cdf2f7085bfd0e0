"""Which query heads does a block stand for, whatever its own numbering?

Blocks name query heads or KV heads, all of them or a range. To compare them, the query heads are cut wherever some
block begins or ends; between two cuts all blocks agree, so a set of segments says it all. Without head ranges there is
one segment.
"""

from ringspan.schedule.actions import ALL, Block, Heads, Schedule


class Segments:
    """The cuts of one schedule, and blocks as ranges of segments or as sets of them (bits of an int)."""

    def __init__(self, schedule: Schedule) -> None:
        self.heads: Heads | None = schedule.heads
        cuts = {0, 1}
        self.is_known_legal = False  # whether all blocks are known to name heads that there are
        if schedule.heads is not None:
            cuts = {0, schedule.heads.num_heads}
            ranges = {(block.kind, block.heads) for step in schedule.steps for block in step.blocks()}
            self.is_known_legal = all(self.refuses(Block(kind, ALL, heads)) is None for kind, heads in ranges)
            for kind, heads in ranges:
                if heads is not None:
                    width = schedule.heads.group if kind in ("kv", "dkv") else 1
                    cuts |= {heads.start * width, heads.stop * width}
        self._number = {head: i for i, head in enumerate(sorted(cuts))}
        self.all = range(len(cuts) - 1)
        self._bits: dict[tuple[str, range | None], int] = {}

    def refuses(self, block: Block) -> str | None:
        """What is wrong with a block's heads, or None."""
        if block.heads is None:
            return None
        if self.heads is None:
            return "the schedule has no heads to take a range of; give it heads"
        count = self.heads.num_kv_heads if block.kind in ("kv", "dkv") else self.heads.num_heads
        if block.heads.step != 1 or not 0 <= block.heads.start < block.heads.stop <= count:
            return f"a range of heads is not empty and lies within [0:{count}]"
        return None

    def of(self, block: Block) -> range:
        """The segments of query heads a block stands for."""
        if block.heads is None or self.heads is None:
            return self.all
        width = self.heads.group if block.kind in ("kv", "dkv") else 1
        return range(self._number[block.heads.start * width], self._number[block.heads.stop * width])

    def bits_of(self, block: Block) -> int:
        """The same as a set."""
        key = (block.kind, block.heads)
        bits = self._bits.get(key)
        if bits is None:
            segments = self.of(block)
            bits = self._bits[key] = (1 << segments.stop) - (1 << segments.start)
        return bits

    def are_paired(self, q: Block, kv: Block) -> bool:
        """Whether the KV heads are those of the query heads: whole groups of them, or a part of one group."""
        if self.heads is None:
            return True
        q_heads = q.heads or range(self.heads.num_heads)
        kv_heads = kv.heads or range(self.heads.num_kv_heads)
        served = range(kv_heads.start * self.heads.group, kv_heads.stop * self.heads.group)
        if len(kv_heads) == 1:
            return served.start <= q_heads.start and q_heads.stop <= served.stop
        return q_heads == served

    def text_of(self, segment: int) -> str:
        """For messages: which heads a segment is, or nothing where there is only one."""
        if len(self.all) == 1:
            return ""
        start, stop = list(self._number)[segment : segment + 2]
        return f" for heads [{start}:{stop}]"
