"""Do two checkouts compute the same bits?

Prints `name digest` for a fixed set of calls with fixed inputs: `rs.attention` (forward with log-sum-exp, gradients),
`rs.simulate_attention`, the layers of `rs.reproducible`, and turns of `rs.KVCache`, on 1 to 4 ranks of
`rs.run_in_process`. A digest is the start of the SHA-256 of dtypes, shapes and bytes of all results in rank order. A
call that the library refuses has the name of the exception instead of a digest.

The program uses public names only, so that it runs unchanged before and after modules move. Digests depend on the CPU
and on the versions of torch and NumPy: compare them on one machine only.

    python benchmarks/digests.py                     # print the digests of the installed ringspan
    python benchmarks/digests.py --against CHECKOUT  # compare this checkout with another; exit 1 if any digest differs
"""

import argparse
import hashlib
import itertools
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import run_checkout

import ringspan as rs

HERE = Path(__file__).resolve().parents[1]
HEADS, KV_HEADS, HEAD_DIM, BATCH = 8, 2, 16, 2
SEQ_LEN = 61  # no world size above 1 divides it
LONG = 1061  # at least 2 blocks of `rs.balanced` for each of 4 ranks
WORLD_SIZES = (1, 2, 3, 4)
MESHES = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}
ALGORITHMS = ("pass_kv", "pass_q", "all_gather", "ulysses", "hybrid", "double_ring")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MASKS = {
    "causal": rs.causal(),
    "full": rs.full(),
    "window": rs.sliding_window(9, 0),
    "documents": rs.documents([20, 1, 33, LONG]) & rs.causal(),
    "per_row": rs.per_row([rs.causal(), rs.sliding_window(5, 5)]),
    "frame_causal": rs.frame_causal(7, start=3),
    "prefix": rs.prefix(11),
}
LAYOUTS = {
    "contiguous": lambda _mask, *sizes, **options: rs.contiguous(*sizes, **options),
    "zigzag": lambda _mask, *sizes, **options: rs.zigzag(*sizes, **options),
    "striped": lambda _mask, *sizes, **options: rs.striped(*sizes, block=options.get("align", 1), **options),
    "balanced": rs.balanced,
}
REFUSALS = (rs.UnsupportedError, rs.LayoutError, rs.ShapeError)

Case = tuple[str, Callable[[str], Iterable[tuple[str, object]]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with the code in CHECKOUT/src")
    args = parser.parse_args()
    if args.against:
        sys.exit(compare(args.against))
    for name, digest in all_digests():
        print(name, digest, flush=True)


def compare(other: Path) -> int:
    """Print the names whose digests differ; return 1 if there are any."""
    ours, theirs = (
        dict(line.rsplit(" ", 1) for line in run_checkout(checkout, __file__).splitlines())
        for checkout in (HERE, other)
    )
    names = list(ours | theirs)
    different = [name for name in names if ours.get(name) != theirs.get(name)]
    for name in different:
        print(f"{name}: {ours.get(name, 'missing')} here, {theirs.get(name, 'missing')} there")
    print(f"{len(names) - len(different)} of {len(names)} digests equal")
    return int(bool(different))


def all_digests() -> Iterator[tuple[str, str]]:
    torch.set_num_threads(1)
    for name, run in itertools.chain(product_cases(), option_cases(), simulated_cases(), layer_cases(), cache_cases()):
        try:
            for part, values in run(name):
                yield f"{name}/{part}", digest(values)
        except REFUSALS as error:
            yield name, type(error).__name__


def digest(values: Any) -> str:
    sha = hashlib.sha256()
    for x in flatten(values):
        array = x.detach().reshape(-1).view(torch.uint8).numpy() if isinstance(x, torch.Tensor) else x
        sha.update(f"{x.dtype} {tuple(x.shape)}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]


def flatten(values: Any) -> Iterator[Any]:
    if isinstance(values, torch.Tensor | np.ndarray):
        yield values
    else:
        for value in values:
            yield from flatten(value)


def draw(name: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Random normal tensors that depend on the name only, not on the calls made before."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def draw_qkv(name: str, seq_len: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    shapes = [(BATCH, heads, seq_len, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return draw(name, *shapes, dtype=dtype)


def on_ranks(fn: Callable[[Any], Any], world_size: int) -> list[Any]:
    """`rs.run_in_process` with one torch thread per rank."""

    def run(group: Any) -> Any:
        torch.set_num_threads(1)
        return fn(group)

    return rs.run_in_process(run, world_size)


def product_cases() -> Iterator[Case]:
    """Every algorithm with every dtype, mask and world size; layouts take turns."""
    for i, (algorithm, dtype) in enumerate(itertools.product(ALGORITHMS, DTYPES)):
        for j, (mask, world_size) in enumerate(itertools.product(MASKS, WORLD_SIZES)):
            layout = list(LAYOUTS)[(i + j + j // 4) % 4]
            yield attention_case(world_size, algorithm, dtype, mask, layout)


def option_cases() -> Iterator[Case]:
    """Every algorithm with every option that it takes, in causal attention."""
    for algorithm, world_size in itertools.product(ALGORITHMS, WORLD_SIZES):
        for dtype in (torch.float32, torch.bfloat16):
            yield attention_case(world_size, algorithm, dtype, sinks=True)
            yield attention_case(world_size, algorithm, dtype, wire="int8")
            yield attention_case(world_size, algorithm, dtype, wire="float8_e4m3")
            yield attention_case(world_size, algorithm, dtype, scale=0.3, direction="reverse")
            yield attention_case(world_size, algorithm, dtype, reproducible=True, sinks=True, seq_len=LONG)
    for mask, layout, world_size in itertools.product(MASKS, LAYOUTS, WORLD_SIZES[1:]):
        yield attention_case(world_size, "pass_kv", torch.float32, mask, layout, seq_len=LONG)


def attention_case(
    world_size: int,
    algorithm: str,
    dtype: torch.dtype,
    mask: str = "causal",
    layout: str = "zigzag",
    *,
    seq_len: int = SEQ_LEN,
    sinks: bool = False,
    **options: Any,
) -> Case:
    described = [f"{key}={value}" for key, value in ({"sinks": sinks} | options).items() if value]
    name = "/".join([f"attention/{world_size}", algorithm, str(dtype)[6:], mask, layout, str(seq_len), *described])
    if algorithm in ("hybrid", "double_ring"):
        options["mesh"] = MESHES[world_size]

    def run(name: str) -> Iterator[tuple[str, object]]:
        tensors = draw_qkv(name, seq_len, dtype)
        (sink_logits,) = draw(name, (HEADS,), dtype=torch.float32)
        align = rs.TILE if options.get("reproducible") else 1
        shards = LAYOUTS[layout](MASKS[mask], seq_len, world_size, align=align)

        def attend(group: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            *inputs, dout = (shards.shard(x, group.rank, 2).clone() for x in tensors)
            if sinks:
                inputs.append(sink_logits.clone())
            inputs = [x.requires_grad_("wire" not in options) for x in inputs]  # encoded K/V have no gradients
            given = dict(zip(("q", "k", "v", "sinks"), inputs, strict=False))
            out, lse = rs.attention(
                **given, mask=MASKS[mask], layout=shards, group=group, algorithm=algorithm, return_lse=True, **options
            )
            return [out, lse], list(torch.autograd.grad(out, inputs, dout)) if out.requires_grad else []

        forward, backward = zip(*on_ranks(attend, world_size), strict=True)
        yield "forward", forward
        if backward[0]:
            yield "backward", backward

    return name, run


def simulated_cases() -> Iterator[Case]:
    for algorithm, (i, mask), world_size in itertools.product(ALGORITHMS, enumerate(MASKS), WORLD_SIZES):
        layout, dtype = list(LAYOUTS)[(i + world_size) % 4], DTYPES[i % 2]
        yield simulated_case(world_size, algorithm, dtype, mask, layout, reproducible=False)
    for algorithm, world_size in itertools.product(ALGORITHMS, WORLD_SIZES):
        yield simulated_case(world_size, algorithm, torch.float32, "causal", "zigzag", reproducible=True)


def simulated_case(
    world_size: int, algorithm: str, dtype: torch.dtype, mask: str, layout: str, *, reproducible: bool
) -> Case:
    mode = "reproducible" if reproducible else "default"
    name = f"simulate/{world_size}/{algorithm}/{str(dtype)[6:]}/{mask}/{layout}/{mode}"
    seq_len = 4 * rs.TILE + 5 if reproducible else SEQ_LEN
    mesh = MESHES[world_size] if algorithm in ("hybrid", "double_ring") else None

    def run(name: str) -> Iterator[tuple[str, object]]:
        q, k, v, dout = (x.numpy() for x in draw_qkv(name, seq_len, dtype))
        shards = LAYOUTS[layout](MASKS[mask], seq_len, world_size, align=rs.TILE if reproducible else 1)
        forward = rs.simulate_attention(
            q, k, v, mask=MASKS[mask], layout=shards, algorithm=algorithm, mesh=mesh, reproducible=reproducible
        )
        yield "forward", [forward.out, forward.lse]
        gradients = forward.gradients(dout)
        yield "backward", [gradients.dq, gradients.dk, gradients.dv]

    return name, run


def layer_cases() -> Iterator[Case]:
    for dtype, layout, world_size in itertools.product(DTYPES[:3], ("contiguous", "zigzag"), WORLD_SIZES):
        yield layer_case(world_size, dtype, layout)


def layer_case(world_size: int, dtype: torch.dtype, layout: str) -> Case:
    """Embedding, norms, linear layers, an activation and the loss in one chain."""
    vocabulary, features = 50, 24

    def run(name: str) -> Iterator[tuple[str, object]]:
        shards = LAYOUTS[layout](rs.causal(), LONG, world_size, align=rs.TILE)
        shapes = [(vocabulary, features), (features,), (features, features), (features,), (features,), (features,)]
        drawn = draw(name, *shapes, dtype=dtype)
        ids = torch.arange(BATCH * LONG).reshape(BATCH, LONG) * 7 % vocabulary

        def step(group: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            weights = [x.clone().requires_grad_() for x in drawn]
            table, norm, matrix, bias, scale, shift = weights
            mine = shards.shard(ids, group.rank, 1)
            here = {"layout": shards, "group": group}
            embedded = rs.reproducible.embedding(mine, table, **here)
            x = rs.reproducible.rms_norm(embedded, norm, **here)
            x = rs.reproducible.linear(x, matrix, bias, **here)
            x = rs.reproducible.elementwise(torch.nn.functional.silu, x)
            normed = rs.reproducible.layer_norm(x, scale, shift, **here)
            logits = rs.reproducible.linear(normed, table, **here)
            loss = rs.reproducible.cross_entropy(logits, (mine + 1) % vocabulary, **here)
            return [embedded, x, normed, logits, loss], list(torch.autograd.grad(loss, weights))

        forward, backward = zip(*on_ranks(step, world_size), strict=True)
        yield "forward", forward
        yield "backward", backward

    return f"layers/{world_size}/{str(dtype)[6:]}/{layout}", run


def cache_cases() -> Iterator[Case]:
    storages = (None, "int8", "float8_e4m3")
    kinds = (("sharded", "pass_kv"), ("sharded", "pass_q"), ("replicated", "auto"))
    for storage, (query, algorithm), world_size in itertools.product(storages, kinds, WORLD_SIZES):
        for dtype in (torch.float32, torch.bfloat16):
            yield cache_case(world_size, dtype, storage, query, algorithm)
        if algorithm == "pass_kv":
            yield cache_case(world_size, torch.float32, storage, query, algorithm, wire="int8")


def cache_case(
    world_size: int, dtype: torch.dtype, storage: str | None, query: str, algorithm: str, wire: str | None = None
) -> Case:
    """Prefill, partial prefill, stored keys, decode, truncation and decode again: two sequences, two layers."""
    name = f"cache/{world_size}/{str(dtype)[6:]}/storage={storage}/{query}/{algorithm}/wire={wire}"
    options = {"query": query, "wire": wire, "algorithm": algorithm}
    turns = [("prefill", [37, 22]), ("prefill", [13, 5]), ("store", [4, 3]), *[("decode", [1, 1])] * 3]

    def run(name: str) -> Iterator[tuple[str, object]]:
        def converse(group: Any) -> list[list[torch.Tensor]]:
            cache = rs.KVCache(
                num_layers=2,
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                dtype=dtype,
                storage=storage,
                mask=[rs.causal(), rs.sliding_window(15, 0)],
                group=group,
            )
            results = [run_turn(cache, group, *turn, dtype, f"{name}/{i}", options) for i, turn in enumerate(turns)]
            cache.truncate(0, 41)
            return [*results, run_turn(cache, group, "decode", [1, 1], dtype, f"{name}/last", options)]

        for i, results in enumerate(zip(*on_ranks(converse, world_size), strict=True)):
            if results[0]:  # a turn that only stores has no results
                yield f"turn {i}", results

    return name, run


def run_turn(
    cache: Any, group: Any, kind: str, new: list[int], dtype: torch.dtype, name: str, options: dict[str, Any]
) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    with cache.begin(new, **options) as turn:
        for layer in range(2):
            shapes = [(1, heads, sum(new), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            q, k, v = draw(f"{name}/{layer}", *shapes, dtype=dtype)
            if options["query"] == "sharded":
                q, k, v = (turn.layout.shard(x, group.rank, 2) for x in (q, k, v))
            if kind == "store":
                call_turn(turn, kind, k, v, layer=layer)
                continue
            if kind == "decode":  # the sequences are the batch
                q, k, v = (x.transpose(0, 2) for x in (q, k, v))
            results += call_turn(turn, kind, q, k, v, layer=layer, return_lse=True)
    return results


def call_turn(turn: Any, kind: str, *tensors: torch.Tensor, **options: Any) -> Any:
    """`turn.prefill(q, k, v)`, or `rs.prefill(q, k, v, turn)` where turns have no such method."""
    method = getattr(turn, kind, None)
    return method(*tensors, **options) if method else getattr(rs, kind)(*tensors, turn, **options)


if __name__ == "__main__":
    main()
