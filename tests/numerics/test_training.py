"""`ringspan.training` on ranks as threads: labels, positions, loss and parameter gradients of the unsharded model."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ringspan as rs
from ringspan.transports.in_process import InProcessRank
from support.cases import LAYOUTS
from support.transformer import Transformer, make_tokens, plain, token_losses, whole_loss

SEQ_LEN = 23
IGNORED = -100
each_layout = pytest.mark.parametrize("name", LAYOUTS)
each_world_size = pytest.mark.parametrize("world_size", [1, 2, 3, 5])


def make_layout(name: str, world_size: int) -> rs.Layout:
    return LAYOUTS[name](SEQ_LEN, world_size, rs.causal())


def on_ranks(world_size: int, fn: Callable[[InProcessRank], Any]) -> list[Any]:
    return rs.run_in_process(fn, world_size)


# Labels and positions


def test_labels_are_the_next_tokens() -> None:
    tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    assert rs.next_token_labels(tokens).tolist() == [[1, 4, 1, 5, IGNORED], [2, 6, 5, 3, IGNORED]]
    packed = rs.next_token_labels(tokens, document_lengths=[2, 1, 2])
    assert packed.tolist() == [[1, IGNORED, IGNORED, 5, IGNORED], [2, IGNORED, IGNORED, 3, IGNORED]]
    assert rs.next_token_labels(tokens[:, :0]).shape == (2, 0)


def test_labels_of_bytes_have_their_ignored_ones_too() -> None:
    """156 is -100 as a byte."""
    labels = rs.next_token_labels(torch.tensor([156, 3, 156], dtype=torch.uint8))
    assert labels.dtype == torch.int64
    assert labels.tolist() == [3, 156, IGNORED]


@pytest.mark.parametrize("tokens", [torch.zeros(3), torch.zeros(3, dtype=torch.bool), torch.tensor(3)])
def test_what_has_no_labels(tokens: torch.Tensor) -> None:
    with pytest.raises(rs.ShapeError, match="tokens"):
        rs.next_token_labels(tokens)


def test_tokens_that_are_no_tensor() -> None:
    with pytest.raises(rs.ShapeError, match="tokens: expected a tensor, got list"):
        rs.next_token_labels([1, 2, 3])


@pytest.mark.parametrize("lengths", [8, np.array(8), {3, 5}, (length for length in (4, 4))], ids=type)
def test_document_lengths_that_are_no_list(lengths: Any) -> None:
    for call in (partial(rs.next_token_labels, torch.arange(8)), partial(rs.position_ids, rs.contiguous(8, 1))):
        with pytest.raises(rs.ShapeError, match=r"document_lengths=.*: give a list of whole numbers"):
            call(document_lengths=lengths)


def test_document_lengths_may_be_an_array() -> None:
    labels = rs.next_token_labels(torch.arange(4), document_lengths=np.array([1, 3]))
    assert labels.tolist() == [IGNORED, 2, 3, IGNORED]


def test_labels_of_transformers_are_shifted_with_what_they_ignore() -> None:
    assert rs.next_token_labels(torch.tensor([IGNORED, IGNORED, 4, 1])).tolist() == [IGNORED, 4, 1, IGNORED]


@each_layout
@each_world_size
def test_positions_are_global(name: str, world_size: int) -> None:
    layout = make_layout(name, world_size)
    for rank, positions in enumerate(on_ranks(world_size, lambda group: rs.position_ids(layout, group))):
        assert positions.dtype == torch.int64
        assert positions.tolist() == layout.positions(rank).tolist()


def test_positions_restart_in_each_document() -> None:
    layout = rs.zigzag(9, 2)  # 0 1 2 and 7 8; 3 4 and 5 6
    parts = on_ranks(2, lambda group: rs.position_ids(layout, group, document_lengths=[4, 1, 4]))
    assert layout.unshard(parts, 0).tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3]
    shifted = rs.contiguous(3, 1, start=2)
    assert rs.position_ids(shifted, document_lengths=[3, 2]).tolist() == [2, 0, 1]


# Batches


@each_layout
@each_world_size
def test_a_batch_put_together_again_is_the_whole(name: str, world_size: int) -> None:
    layout = make_layout(name, world_size)
    tokens = make_tokens(0, 2, layout.num_positions)
    batch = {"input_ids": tokens, "weights": torch.rand(*tokens.shape, 3)}
    parts = on_ranks(world_size, lambda group: rs.shard_batch(batch, layout, group))
    assert all(set(part) == {"input_ids", "weights", "labels", "position_ids"} for part in parts)
    whole = {name: layout.unshard([part[name] for part in parts], 1) for name in parts[0]}
    assert torch.equal(whole["input_ids"], tokens)
    assert torch.equal(whole["weights"], batch["weights"])
    assert torch.equal(whole["labels"][:, :-1], tokens[:, 1:])
    assert (whole["labels"][:, -1] == IGNORED).all()
    assert whole["position_ids"].tolist() == [layout.all_positions().tolist()] * 2
    # A token that several ranks hold counts once.
    assert sum(int((part["labels"] != IGNORED).sum()) for part in parts) == tokens[:, 1:].numel()


def test_what_a_batch_brings_is_kept() -> None:
    tokens = torch.arange(6)
    labels = torch.tensor([IGNORED, IGNORED, 12, 13, 14, 15])
    batch = {"input_ids": tokens, "labels": labels, "position_ids": tokens * 10}
    part = rs.shard_batch(batch, rs.zigzag(6, 1), document_lengths=[4, 2])
    assert part["labels"].tolist() == [IGNORED, 12, 13, IGNORED, 15, IGNORED]
    assert part["position_ids"].tolist() == [0, 10, 20, 30, 40, 50]
    assert batch["labels"] is labels
    assert labels.tolist() == [IGNORED, IGNORED, 12, 13, 14, 15]


def test_documents_of_a_sequence_that_does_not_begin_here() -> None:
    """Positions 2, 3 and 4 of documents that end at 1, 3 and 5, counted like `position_ids` and the masks."""
    part = rs.shard_batch(
        {"input_ids": torch.tensor([7, 8, 9])}, rs.contiguous(3, 1, start=2), document_lengths=[1, 2, 2]
    )
    assert part["labels"].tolist() == [IGNORED, 9, IGNORED]
    assert part["position_ids"].tolist() == [1, 0, 1]


IDS = torch.zeros(2, 6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"labels": IDS}, {}, "batch has labels; it needs input_ids"),
        ({"input_ids": IDS, "attention_mask": IDS}, {}, "attention_mask: a rank would see only a part of it"),
        ({"input_ids": IDS[:, :5]}, {}, "batch['input_ids'].shape=(2, 5)"),
        ({"input_ids": IDS, "weights": IDS.T}, {}, "batch['weights'].shape=(6, 2)"),
        ({"input_ids": IDS, "weights": IDS[0]}, {}, "batch['weights'].shape=(6,)"),
        ({"input_ids": IDS}, {"document_lengths": [3, 2]}, "expected a sum of 6"),
        ({"input_ids": IDS}, {"document_lengths": [6, 0]}, "at least one token"),
        ({"input_ids": IDS}, {"document_lengths": [1.5, 4.5]}, "expected a sum of 6"),
        ({"input_ids": IDS.tolist()}, {}, "batch['input_ids'] is a list"),
        ({"input_ids": IDS, "labels": IDS[:1]}, {}, "batch['labels'].shape=(1, 6)"),
        ({"input_ids": IDS, "labels": IDS[..., None]}, {}, "batch['labels'].shape=(2, 6, 1)"),
        ({"input_ids": IDS, "labels": IDS.float()}, {}, "labels are torch.float32"),
        (IDS, {}, "batch is a Tensor"),
        ({"input_ids": IDS[0, 0]}, {}, "batch['input_ids'].shape=(): sequences are (…, seq)"),
        ({"input_ids": IDS}, {"document_lengths": 6}, "document_lengths=6: give a list of whole numbers"),
    ],
)
def test_batches_that_are_refused(batch: dict[str, torch.Tensor], options: dict[str, Any], message: str) -> None:
    with pytest.raises(rs.ShapeError, match=re.escape(message)):
        rs.shard_batch(batch, rs.zigzag(6, 1), **options)


@pytest.mark.parametrize("ignored", [0, 1, 3])
def test_labels_that_are_shifted_already_are_refused(ignored: int) -> None:
    """Labels would be shifted twice, and a model would learn to predict two tokens ahead."""
    tokens = make_tokens(0, 2, 7)
    labels = tokens[:, 1:].clone()
    labels[:, :ignored] = IGNORED
    with pytest.raises(rs.ShapeError, match="shift them again"):
        rs.shard_batch({"input_ids": tokens[:, :-1], "labels": labels}, rs.zigzag(6, 1))


@pytest.mark.parametrize("tokens", [IDS, IDS[:, :6] + 5, torch.arange(6).expand(2, 6)])
@pytest.mark.parametrize("ignored", [0, 3, 6])
def test_labels_beside_their_tokens_are_taken_whatever_they_are(tokens: torch.Tensor, ignored: int) -> None:
    labels = tokens.clone()
    labels[:, :ignored] = IGNORED
    part = rs.shard_batch({"input_ids": tokens, "labels": labels}, rs.zigzag(6, 1))
    assert torch.equal(part["labels"], rs.next_token_labels(labels))


def test_ranks_with_batches_of_their_own_are_told() -> None:
    """As with a sampler that is seeded by the rank: parts of different sequences would attend to each other."""
    layout = rs.zigzag(SEQ_LEN, 2)

    def on_rank(group: InProcessRank, contract: bool) -> str:
        tokens = make_tokens(group.rank, 2, SEQ_LEN)
        rs.shard_batch({"input_ids": tokens}, layout, group, contract=contract)
        return "taken"

    with pytest.raises(rs.TransportError, match=r"input_ids: rank 0 has torch.int64 \(2, 23\) #\w+, rank 1 has"):
        on_ranks(2, partial(on_rank, contract=True))
    assert on_ranks(2, partial(on_rank, contract=False)) == ["taken", "taken"]


def test_a_batch_that_one_rank_refuses_is_refused_on_all() -> None:
    layout = rs.zigzag(6, 2)

    def on_rank(group: InProcessRank) -> str:
        with pytest.raises(rs.RingspanError) as raised:
            rs.shard_batch({"input_ids": IDS if group.rank else IDS.tolist()}, layout, group)
        return f"{raised.type.__name__}: {raised.value}"

    first, second = on_ranks(2, on_rank)
    assert first.startswith("ShapeError: batch['input_ids'] is a list")
    assert second.startswith("TransportError: the call was refused, on rank 0: ShapeError: batch['input_ids']")


def test_layouts_for_other_groups_are_refused() -> None:
    layout = rs.zigzag(6, 2)
    for call in (partial(rs.shard_batch, {"input_ids": IDS}), rs.position_ids):
        with pytest.raises(rs.LayoutError, match="layout: it is for 2 ranks and the group has 1"):
            call(layout)


@pytest.mark.parametrize("layout", [None, 6, [[0, 1], [2, 3]]])
def test_a_value_that_is_not_a_layout_is_refused_as_by_attention(subtests: pytest.Subtests, layout: Any) -> None:
    x = torch.zeros(1, 1, 6, 2)
    calls = (
        partial(rs.attention, x, x, x, mask=rs.causal()),
        partial(rs.shard_batch, {"input_ids": IDS}),
        rs.position_ids,
    )
    for call in calls:
        with subtests.test(f"{call}"):
            with pytest.raises(rs.LayoutError) as refused:
                call(layout=layout)
            assert str(refused.value) == (
                f"layout={layout}: expected a Layout, got {type(layout).__name__}; use a layout such as "
                "rs.zigzag(seq_len, world_size)"
            )


# The loss


def random_losses(world_size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Uneven shards: the first rank has no label, with a loss that must not count; the last rank has no rows."""
    generator = torch.Generator().manual_seed(world_size)
    lengths = [2 + 3 * rank for rank in range(world_size - 1)] + [0 if world_size > 1 else 2]
    losses = [torch.randn(2, length, generator=generator, dtype=torch.float64) for length in lengths]
    labels = [torch.where(loss > 0.5, IGNORED, 1) for loss in losses]
    if world_size > 1:
        labels[0].fill_(IGNORED)
        losses[0].fill_(torch.inf)
    return losses, labels


@each_world_size
def test_the_mean_loss_and_its_gradient(world_size: int) -> None:
    losses, labels = random_losses(world_size)

    def on_rank(group: InProcessRank) -> tuple[torch.Tensor, torch.Tensor]:
        own = losses[group.rank].clone().requires_grad_()
        loss = rs.cross_rank_mean_loss(own, labels[group.rank], group)
        (grad,) = torch.autograd.grad(loss, own)
        return loss.detach(), grad

    every_loss, every_label = torch.cat(losses, 1), torch.cat(labels, 1)
    valid = every_label != IGNORED
    results = on_ranks(world_size, on_rank)
    assert len({loss.item() for loss, _ in results}) == 1
    if valid.any():
        torch.testing.assert_close(results[0][0], every_loss[valid].mean())
    grads = torch.cat([grad for _, grad in results], 1)
    torch.testing.assert_close(grads, valid.double() / max(1, int(valid.sum())))


def test_a_batch_without_labels_has_loss_0() -> None:
    def on_rank(group: InProcessRank) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.ones(3, requires_grad=True)
        loss = rs.cross_rank_mean_loss(own, torch.full((3,), IGNORED), group)
        return loss.detach(), torch.autograd.grad(loss, own)[0]

    for loss, grad in on_ranks(2, on_rank):
        assert loss.item() == 0.0
        assert grad.tolist() == [0.0, 0.0, 0.0]


def test_a_rank_without_gradient_is_told_of_on_all_ranks() -> None:
    """As if a rank without labels makes up zeros: it would fail in backward() while the others wait."""

    def on_rank(group: InProcessRank) -> str:
        own = torch.ones(3, requires_grad=group.rank > 0)
        with pytest.raises(rs.TransportError) as raised:
            rs.cross_rank_mean_loss(own, torch.ones(3, dtype=torch.int64), group)
        return str(raised.value)

    for text in on_ranks(3, on_rank):
        assert "gradient: rank 0 has not wanted, ranks 1, 2 have wanted" in text


def test_sums_are_wide_and_equal_to_the_bit() -> None:
    """bf16 losses: a sum in bf16 would stop growing at 256."""
    ones = torch.ones(1000, dtype=torch.bfloat16)
    losses = on_ranks(3, lambda group: rs.cross_rank_mean_loss(ones * (group.rank + 1), ones.long(), group))
    assert all(loss.dtype == torch.float32 and loss.item() == 2.0 for loss in losses)


def test_a_mean_where_losses_are_expected_is_refused_on_all_ranks() -> None:
    def on_rank(group: InProcessRank) -> str:
        losses, labels = torch.ones(3), torch.ones(3, dtype=torch.int64)
        with pytest.raises(rs.RingspanError) as raised:
            rs.cross_rank_mean_loss(losses.mean() if group.rank else losses, labels, group)
        return f"{raised.type.__name__}: {raised.value}"

    first, second = on_ranks(2, on_rank)
    assert second.startswith("ShapeError: losses.shape=()")
    assert 'reduction="none"' in second
    assert first.startswith("TransportError: the call was refused, on rank 1: ShapeError: losses.shape=()")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32])
def test_labels_that_cannot_be_ignored_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(rs.ShapeError, match=r"labels are torch.\w+: their dtype must be able to hold -100"):
        rs.cross_rank_mean_loss(torch.ones(3), torch.ones(3, dtype=dtype))


def test_a_loss_that_is_not_a_tensor_is_refused_on_all_ranks() -> None:
    def on_rank(group: InProcessRank) -> str:
        with pytest.raises(rs.RingspanError) as raised:
            rs.cross_rank_mean_loss(torch.ones(1) if group.rank else 1.0, torch.ones(1).long(), group)
        return str(raised.value)

    own, others = on_ranks(2, on_rank)
    assert own == "losses: expected a tensor, got float; give a tensor"
    assert own in others


def test_in_a_compiled_function_batches_and_losses_are_as_outside() -> None:
    """The compiler calls them unchanged, or gives the reason why it cannot."""
    tokens, layout = make_tokens(0, 2, SEQ_LEN), rs.zigzag(SEQ_LEN, 1)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        batch = rs.shard_batch({"input_ids": tokens}, layout)
        return rs.cross_rank_mean_loss(2 * batch["labels"].float(), batch["labels"])

    assert torch.equal(torch.compile(step, backend="eager")(tokens), step(tokens))
    torch.compiler.reset()
    for function, what in ((step, "shard batches"), (lambda x: rs.gather(x, layout, dim=1), "gather")):
        with pytest.raises(Exception, match=f"ringspan: {what} outside of the compiled function"):
            torch.compile(function, backend="eager", fullgraph=True)(tokens)


# The model


def sum_over_ranks(group: InProcessRank, x: torch.Tensor) -> torch.Tensor:
    each = rs.contiguous(group.world_size, group.world_size)
    return rs.gather(x[None], each, group, dim=0).sum(0)


def differentiate(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def sharded_loss(model: nn.Module, tokens: torch.Tensor, layout: rs.Layout, group: Any) -> torch.Tensor:
    batch = rs.shard_batch({"input_ids": tokens}, layout, group)
    logits = model(batch["input_ids"], batch["position_ids"])
    return rs.cross_rank_mean_loss(token_losses(logits, batch["labels"]), batch["labels"], group)


def attend_on(layout: rs.Layout, group: Any, mask: rs.Mask | None = None) -> Callable[..., Any]:
    return partial(rs.attention, mask=mask or rs.causal(), layout=layout, group=group)


@each_layout
@each_world_size
def test_loss_and_parameter_gradients_are_those_of_one_process(name: str, world_size: int) -> None:
    layout = make_layout(name, world_size)
    tokens = make_tokens(1, 2, layout.num_positions)

    def on_rank(group: InProcessRank) -> tuple[torch.Tensor, torch.Tensor]:
        model = Transformer(attend_on(layout, group), dtype=torch.float64)
        loss = sharded_loss(model, tokens, layout, group)
        return loss.detach(), differentiate(model, loss)

    model = Transformer(dtype=torch.float64)
    expected = whole_loss(model, tokens, torch.from_numpy(layout.all_positions()))
    results = on_ranks(world_size, on_rank)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    total = sum(grad for _, grad in results)
    torch.testing.assert_close(total, differentiate(model, expected), rtol=0, atol=1e-12)


def test_packed_documents_are_trained_as_if_apart() -> None:
    lengths, layout = [9, 1, 13], rs.zigzag(SEQ_LEN, 3)
    tokens = make_tokens(2, 1, SEQ_LEN)
    mask = rs.causal() & rs.documents(lengths)

    def on_rank(group: InProcessRank) -> tuple[torch.Tensor, torch.Tensor]:
        model = Transformer(attend_on(layout, group, mask), dtype=torch.float64)
        batch = rs.shard_batch({"input_ids": tokens}, layout, group, document_lengths=lengths)
        losses = token_losses(model(batch["input_ids"], batch["position_ids"]), batch["labels"])
        loss = rs.cross_rank_mean_loss(losses, batch["labels"], group)
        return loss.detach(), differentiate(model, loss)

    model = Transformer(dtype=torch.float64)
    expected = sum(
        whole_loss(model, part) * (part.shape[1] - 1) for part in tokens.split(lengths, 1) if part.numel() > 1
    )
    expected = expected / (SEQ_LEN - len(lengths))
    results = on_ranks(3, on_rank)
    torch.testing.assert_close(results[0][0], expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(grad for _, grad in results), differentiate(model, expected), rtol=0, atol=1e-12)


STEPS = 50


def train(
    model: nn.Module, loss_of: Callable[[int], torch.Tensor], reduce: Callable[[torch.Tensor], torch.Tensor]
) -> list[float]:
    """Return the losses of all steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(step)
        grads = reduce(differentiate(model, loss))
        sizes = [weights.numel() for weights in model.parameters()]
        for weights, grad in zip(model.parameters(), grads.split(sizes), strict=True):
            weights.grad = grad.view_as(weights)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_fifty_steps_of_training_are_the_same_on_any_number_of_ranks(subtests: pytest.Subtests) -> None:
    seq_len = 48
    batches = [make_tokens(step, 4, seq_len) for step in range(STEPS)]

    def on_rank(group: InProcessRank) -> list[float]:
        layout = rs.zigzag(seq_len, group.world_size)
        model = Transformer(attend_on(layout, group))
        return train(
            model, lambda step: sharded_loss(model, batches[step], layout, group), partial(sum_over_ranks, group)
        )

    model = Transformer(plain)
    expected = train(model, lambda step: whole_loss(model, batches[step]), lambda grads: grads)
    assert expected[-1] < 0.5 * expected[0]
    for world_size in (1, 2, 3):
        with subtests.test(world_size=world_size):
            for losses in on_ranks(world_size, on_rank):
                assert losses == pytest.approx(expected, rel=0, abs=1e-5)


def test_shards_of_another_layout_of_equal_lengths_are_noticed() -> None:
    """rs.attention sees lengths only: both layouts have 4 positions on each rank."""
    layout, other = rs.zigzag(8, 2), rs.contiguous(8, 2)

    def check(group: InProcessRank, cut_by: rs.Layout) -> str:
        try:
            rs.check_positions(cut_by.shard(torch.arange(8), group.rank, 0), layout, group)
        except rs.RingspanError as error:
            return f"{type(error).__name__}: {error}"
        return "right"

    assert on_ranks(2, lambda group: check(group, layout)) == ["right"] * 2
    first, second = on_ranks(2, lambda group: check(group, other))
    assert first.startswith("LayoutError: positions: on rank 0 row 2 is position 2, and by the layout it is 6; 2 of 4")
    assert second.startswith("LayoutError: positions: on rank 1 row 0 is position 4, and by the layout it is 2")


def test_one_rank_with_a_shard_of_another_layout_tells_the_others() -> None:
    layout, other = rs.zigzag(8, 2), rs.contiguous(8, 2)

    def check(group: InProcessRank) -> str:
        cut_by = layout if group.rank else other
        with pytest.raises(rs.RingspanError) as raised:
            rs.check_positions(cut_by.shard(torch.arange(8), group.rank, 0), layout, group)
        return str(raised.value)

    first, second = on_ranks(2, check)
    assert "row 2 is position 2" in first
    assert "rank 0: LayoutError: positions" in second
