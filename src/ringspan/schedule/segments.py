"""Which query heads does a block cover, whatever its own numbering?

Blocks name query heads or KV heads, all of them or a range. To compare blocks, the query heads are cut wherever any
block begins or ends. No block covers a part of a segment, so a block is a set of segments. Without ranges of heads
there is one segment.
"""

from ringspan.schedule.actions import ALL, Block, Heads, Schedule


class Segments:
    """The segments of one schedule. A block is a range of segments, or a set of segments as bits of an int."""

    def __init__(self, schedule: Schedule) -> None:
        self.heads: Heads | None = schedule.heads
        cuts = {0, 1}
        self.is_known_legal = False  # whether every block is known to name existing heads
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
        """Return the rule that a block's heads break, or None."""
        if block.heads is None:
            return None
        if self.heads is None:
            return "a range of heads needs a schedule with heads; pass heads="
        count = self.heads.num_kv_heads if block.kind in ("kv", "dkv") else self.heads.num_heads
        if block.heads.step != 1 or not 0 <= block.heads.start < block.heads.stop <= count:
            return f"a range of heads is not empty and lies within [0:{count}]"
        return None

    def of(self, block: Block) -> range:
        """Return the segments that a block covers."""
        if block.heads is None or self.heads is None:
            return self.all
        width = self.heads.group if block.kind in ("kv", "dkv") else 1
        return range(self._number[block.heads.start * width], self._number[block.heads.stop * width])

    def bits_of(self, block: Block) -> int:
        """Return the segments that a block covers as a set."""
        key = (block.kind, block.heads)
        bits = self._bits.get(key)
        if bits is None:
            segments = self.of(block)
            bits = self._bits[key] = (1 << segments.stop) - (1 << segments.start)
        return bits

    def are_paired(self, q: Block, kv: Block) -> bool:
        """Whether the KV heads belong to the query heads: whole groups of query heads, or a part of one group."""
        if self.heads is None:
            return True
        q_heads = q.heads or range(self.heads.num_heads)
        kv_heads = kv.heads or range(self.heads.num_kv_heads)
        served = range(kv_heads.start * self.heads.group, kv_heads.stop * self.heads.group)
        if len(kv_heads) == 1:
            return served.start <= q_heads.start and q_heads.stop <= served.stop
        return q_heads == served

    def text_of(self, segment: int) -> str:
        """Return the heads of a segment for a message, or nothing if there is only one segment."""
        if len(self.all) == 1:
            return ""
        start, stop = list(self._number)[segment : segment + 2]
        return f" for heads [{start}:{stop}]"
