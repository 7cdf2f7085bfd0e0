"""A sum over tiles has one shape for any distribution of tiles: compared with a recursive binary tree."""

from hypothesis import given
from hypothesis import strategies as st

from ringspan.program.reproducible.tree import Join, Node, Tree


def nested(tiles: list[int], low: int, high: int) -> object:
    """The tree over [low, high), whose length is a power of two; a missing tile is None."""
    if high - low == 1:
        return low if low in tiles else None
    middle = (low + high) // 2
    left, right = nested(tiles, low, middle), nested(tiles, middle, high)
    return (left, right) if left is not None and right is not None else left if right is None else right


@st.composite
def shares(draw: st.DrawFn) -> list[list[int]]:
    """Deal tiles to ranks, each in the order in which the rank gets them."""
    tiles = draw(st.lists(st.integers(0, 63), unique=True, min_size=1))
    owners = draw(st.lists(st.integers(0, 4), min_size=len(tiles), max_size=len(tiles)))
    return [[tile for tile, owner in zip(tiles, owners, strict=True) if owner == rank] for rank in range(5)]


def take_together(tree: Tree, values: dict[Node, object], node: Node, value: object) -> None:
    """Add a value and join all pairs that can be joined."""
    held = set(values)
    values[node] = value
    for left, right in tree.add(held, node):
        values[Node(left.first, right.last)] = (values.pop(left), values.pop(right))
    assert held == set(values)


@given(shares())
def test_every_order_and_every_sharing_gives_the_nested_sum(ranks: list[list[int]]) -> None:
    tiles = [tile for rank in ranks for tile in rank]
    tree = Tree(tiles)
    whole: dict[Node, object] = {}
    for rank in ranks:
        part: dict[Node, object] = {}
        for tile in rank:
            take_together(tree, part, tree.leaf(tile), tile)
        assert tuple(sorted(part)) == tree.unfinished(reversed(rank))
        for node, value in part.items():
            take_together(tree, whole, node, value)
    assert whole == {tree.root: nested(tiles, 0, 64)}


def test_a_node_waits_for_the_whole_of_its_sibling() -> None:
    tree = Tree([0, 1, 2, 3])
    held = {tree.leaf(2)}
    assert list(tree.add(held, tree.leaf(1))) == []  # neighbours, but of different parents
    assert list(tree.add(held, tree.leaf(0))) == [Join(Node(0, 0), Node(1, 1))]
    assert list(tree.add(held, tree.leaf(3))) == [Join(Node(2, 2), Node(3, 3)), Join(Node(0, 1), Node(2, 3))]


def test_a_run_of_tiles_leaves_few_nodes_unfinished() -> None:
    tree = Tree(range(1024))
    assert max(len(tree.unfinished(range(start, start + 300))) for start in range(724)) <= 2 * 10
