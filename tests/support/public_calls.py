"""Public functions, each with arguments that it takes: what tests of wrong arguments start from."""

import functools
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, chdir
from contextvars import copy_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import ringspan as rs
from ringspan.adapters.accelerate import parallelize as accelerate_parallelize
from ringspan.adapters.accelerate import parallelize_trainer
from ringspan.adapters.diffusers import FrameCache
from ringspan.adapters.diffusers import parallelize as diffusers_parallelize
from ringspan.adapters.transformers import parallelize
from ringspan.compat import ring_attention_pytorch, ring_flash_attn, ringmaster
from ringspan.serve import ServeSettings

LAYOUT = rs.zigzag(8, 1)
Q = torch.zeros(1, 2, 8, 4)
KV = Q[:, :1]
ARRAY = np.zeros((2, 8, 4))
FOLDER = tempfile.gettempdir() + "/fuzz-arguments"


class Call(NamedTuple):
    function: Callable[..., Any]
    arguments: dict[str, Any]


def in_cache(name: str) -> Callable[..., Any]:
    return lambda **given: getattr(_cache(), name)(**given)


def in_turn(name: str, num_new: int) -> Callable[..., Any]:
    return lambda **given: getattr(_cache().begin([num_new]), name)(**given)


def _cache() -> rs.KVCache:
    return rs.KVCache(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)


ATTENTION: dict[str, Any] = {
    "q": Q,
    "k": KV,
    "v": KV,
    "mask": rs.causal(),
    "layout": LAYOUT,
    "kv_layout": None,
    "group": None,
    "algorithm": "pass_kv",
    "mesh": None,
    "direction": None,
    "kernel": "auto",
    "scale": None,
    "sinks": None,
    "softcap": None,
    "wire": None,
    "reproducible": False,
    "return_lse": False,
    "timeout_s": None,
    "contract": True,
    "record": None,
}
SIMULATE: dict[str, Any] = {
    "q": ARRAY,
    "k": ARRAY,
    "v": ARRAY,
    "mask": rs.causal(),
    "layout": LAYOUT,
    "kv_layout": None,
    "algorithm": "pass_kv",
    "direction": None,
    "mesh": None,
    "scale": None,
    "reproducible": False,
}
CACHE: dict[str, Any] = {
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "v_head_dim": None,
    "group": None,
    "dtype": torch.float32,
    "storage": None,
    "mask": None,
    "max_tokens": None,
    "kernel": "auto",
    "device": "cpu",
}
BEGIN: dict[str, Any] = {"new_lengths": [3], "starts": None, "algorithm": "auto", "query": "sharded", "wire": None}
CALLS: dict[str, "Call"] = {
    "sliding_window": Call(rs.sliding_window, {"left": 1, "right": 0}),
    "prefix": Call(rs.prefix, {"n": 3}),
    "documents": Call(rs.documents, {"lengths": [3]}),
    "chunks": Call(rs.chunks, {"size": 2, "start": 0}),
    "blocks": Call(rs.blocks, {"spans": [(0, 2), (3, 5)]}),
    "frame_causal": Call(rs.frame_causal, {"tokens_per_frame": 2, "start": 0}),
    "per_row": Call(rs.per_row, {"masks": [rs.causal()]}),
    "Mask.allowed": Call(rs.causal().allowed, {"q_positions": [0], "kv_positions": [0]}),
    "Mask.coverage": Call(rs.causal().coverage, {"q_span": rs.Span(0, 2), "kv_span": rs.Span(0, 2)}),
    "Span": Call(rs.Span, {"start": 0, "stop": 4, "step": 1}),
    "Layout": Call(rs.Layout, {"spans_by_rank": ((rs.Span(0, 4),),), "replicated": ()}),
    "Layout.positions": Call(LAYOUT.positions, {"rank": 0}),
    "Layout.shard": Call(LAYOUT.shard, {"x": Q, "rank": 0, "dim": 2}),
    "Layout.unshard": Call(LAYOUT.unshard, {"parts": [Q], "dim": 2}),
    "contiguous": Call(rs.contiguous, {"seq_len": 8, "world_size": 2, "align": 1, "start": 0}),
    "zigzag": Call(rs.zigzag, {"seq_len": 8, "world_size": 2}),
    "striped": Call(rs.striped, {"seq_len": 8, "world_size": 2, "block": 1}),
    "balanced": Call(rs.balanced, {"mask": rs.causal(), "seq_len": 8, "world_size": 2}),
    "simulate_attention": Call(rs.simulate_attention, SIMULATE),
    "attention": Call(rs.attention, ATTENTION),
    "gather": Call(rs.gather, {"part": Q, "layout": LAYOUT, "group": None, "dim": 2, "timeout_s": None}),
    "shard": Call(rs.shard, {"whole": Q, "layout": LAYOUT, "group": None, "dim": 2}),
    "KVCache": Call(rs.KVCache, CACHE),
    "KVCache.begin": Call(in_cache("begin"), BEGIN),
    "KVCache.truncate": Call(in_cache("truncate"), {"sequence": 0, "position": 0}),
    "KVCache.drop": Call(in_cache("drop"), {"sequence": 0}),
    "KVCache.select": Call(in_cache("select"), {"sources": []}),
    "KVCache.positions": Call(in_cache("positions"), {"sequence": 0}),
    "KVCache.load": Call(in_cache("load"), {"folder": FOLDER}),
    "Turn.prefill": Call(in_turn("prefill", 8), {"q": Q, "k": KV, "v": KV, "layer": 0, "scale": None}),
    "Turn.store": Call(in_turn("store", 8), {"k": KV, "v": KV, "layer": 0}),
    "Turn.error_bound": Call(in_turn("error_bound", 8), {"q": Q, "layer": 0, "scale": None}),
    "run_in_process": Call(functools.partial(rs.run_in_process, lambda group: 0), {"world_size": 1, "timeout_s": 60.0}),
    "ring_attention_simulate": Call(
        rs.ring_attention_simulate, {"Q": ARRAY[0], "K": ARRAY[0], "V": ARRAY[0], "num_devices": 2}
    ),
    "ring_attention_context_parallel": Call(
        rs.ring_attention_context_parallel, {"total_seq_len": 100, "num_gpus": 2, "hidden_dim": 8, "num_heads": 2}
    ),
}

TILED = rs.contiguous(8, 1, align=rs.TILE)
X = torch.zeros(1, 8, 4)
IDS = torch.zeros(1, 8, dtype=torch.int64)
WEIGHT = torch.zeros(4, 4)
VISIBLE = rs.schedule.visible_blocks(rs.causal(), rs.zigzag(8, 2))
SCHEDULE = rs.schedule.build_schedule("pass_kv", VISIBLE)
KV_BLOCK = rs.schedule.Block("kv", 0)
IN_LAYER: dict[str, Any] = {"layout": TILED, "group": None, "timeout_s": None}
MODEL_FOLDER = tempfile.mkdtemp(prefix="fuzz-model-")
Path(MODEL_FOLDER, "config.json").write_text("{}")
PLAN: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "devices": "8xh100",
    "tokens": 4096,
    "phase": None,
    "cached_tokens": 0,
    "size": None,
    "batch": None,
    "tp": None,
    "wire": "bf16",
    "weights": "bf16",
    "kv_cache": "bf16",
    "chunk_tokens": None,
    "recomputes": True,
    "shards_weights": False,
    "accumulate": 1,
    "is_resident": False,
    "software": "ringspan",
    "kernel": None,
    "network": None,
    "link": None,
    "pipeline_parallel": 1,
    "expert_parallel": 1,
    "offload": False,
}
SERVE: dict[str, Any] = {
    "folder": Path(MODEL_FOLDER),
    "name": "",
    "num_ranks": 2,
    "host": "127.0.0.1",
    "port": 8000,
    "api_key": None,
    "dtype": "float32",
    "cache_bytes": None,
    "prefill_chunk": 1024,
    "max_tokens": 4096,
    "queue_size": 16,
    "max_connections": 256,
    "max_body_bytes": 2**20,
    "header_timeout_s": 10.0,
    "body_timeout_s": 30.0,
    "write_timeout_s": 30.0,
    "rank_timeout_s": 60.0,
    "grace_s": 30.0,
    "verify": True,
}


def parallelize_tiny(**given: Any) -> None:
    """Every time with a model of its own, unless that is the argument."""
    given.setdefault("model", tiny())
    parallelize(**given).restore()


@functools.cache
def _tiny_config() -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=16, num_key_value_heads=1, max_position_embeddings=64, **sizes)


def tiny() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(_tiny_config()).eval()


def in_frames(name: str) -> Callable[..., Any]:
    return lambda **given: getattr(FrameCache(4), name)(**given)


CALLS |= {
    "Heads": Call(rs.Heads, {"num_heads": 4, "num_kv_heads": 2}),
    "Mesh": Call(rs.algorithms.as_mesh, {"mesh": (2, 2)}),
    "RingMachine": Call(
        rs.RingMachine,
        {"compute_flops_per_s": 1e9, "link_bytes_per_s": 1e9, "latency_s": 1e-6, "busy_s_per_byte": 0.0},
    ),
    "use_machine": Call(rs.use_machine, {"machine": rs.RingMachine(1e9, 1e9, 1e-6), "group": None}),
    "measure_machine": Call(
        rs.measure_machine, {"group": None, "dtype": torch.float32, "head_dim": 64, "device": "cpu"}
    ),
    "plan": Call(rs.plan, PLAN),
    "schedule.Block": Call(rs.schedule.Block, {"kind": "kv", "owner": 0, "heads": None}),
    "schedule.Transfer": Call(rs.schedule.Transfer, {"block": KV_BLOCK, "src": 0, "dst": 1}),
    "schedule.Visible": Call(rs.schedule.Visible, {"world_size": 1, "payload": VISIBLE.payload[:0]}),
    "schedule.build_schedule": Call(
        rs.schedule.build_schedule,
        {
            "algorithm": "pass_kv",
            "visible": VISIBLE,
            "heads": None,
            "mesh": None,
            "direction": None,
            "backward": None,
            "route": "follow",
        },
    ),
    "schedule.build_decode": Call(rs.schedule.build_decode, {"visible": VISIBLE, "query": "sharded"}),
    "schedule.validate": Call(rs.schedule.validate, {"schedule": SCHEDULE, "visible": VISIBLE}),
    "schedule.complete": Call(rs.schedule.complete, {"draft": SCHEDULE, "visible": VISIBLE, "route": "straight"}),
    "schedule.compile_rank": Call(rs.schedule.compile_rank, {"schedule": SCHEDULE, "rank": 0}),
    "schedule.first_reads": Call(rs.schedule.first_reads, {"schedule": SCHEDULE}),
    "schedule.format_schedule": Call(
        rs.schedule.format_schedule, {"schedule": SCHEDULE, "steps": None, "marked": None}
    ),
    "schedule.parse_schedule": Call(rs.schedule.parse_schedule, {"text": rs.schedule.format_schedule(SCHEDULE)}),
    "schedule.visible_blocks": Call(
        rs.schedule.visible_blocks, {"mask": rs.causal(), "layout": LAYOUT, "kv_layout": None}
    ),
    "algorithms.find_algorithm": Call(rs.algorithms.find_algorithm, {"name": "pass_kv"}),
    "algorithms.register": Call(rs.algorithms.register, {"record": None}),
    "next_token_labels": Call(rs.next_token_labels, {"tokens": IDS, "document_lengths": [3, 5]}),
    "position_ids": Call(
        rs.position_ids, {"layout": LAYOUT, "group": None, "document_lengths": [3, 5], "device": None}
    ),
    "check_positions": Call(
        rs.check_positions, {"positions": torch.arange(8), "layout": rs.contiguous(8, 1), "group": None}
    ),
    "shard_batch": Call(
        rs.shard_batch,
        {"batch": {"input_ids": IDS}, "layout": LAYOUT, "group": None, "document_lengths": [8], "contract": True},
    ),
    "cross_rank_mean_loss": Call(rs.cross_rank_mean_loss, {"losses": torch.zeros(1, 8), "labels": IDS, "group": None}),
    "reproducible.linear": Call(rs.reproducible.linear, {"x": X, "weight": WEIGHT, "bias": None, **IN_LAYER}),
    "reproducible.rms_norm": Call(rs.reproducible.rms_norm, {"x": X, "weight": WEIGHT[0], "eps": 1e-6, **IN_LAYER}),
    "reproducible.layer_norm": Call(
        rs.reproducible.layer_norm, {"x": X, "weight": WEIGHT[0], "bias": None, "eps": 1e-6, **IN_LAYER}
    ),
    "reproducible.embedding": Call(rs.reproducible.embedding, {"ids": IDS, "weight": WEIGHT, **IN_LAYER}),
    "reproducible.cross_entropy": Call(
        rs.reproducible.cross_entropy, {"logits": X, "labels": IDS, "reduction": "mean", **IN_LAYER}
    ),
    "reproducible.elementwise": Call(
        lambda fn, tensor: rs.reproducible.elementwise(fn, tensor), {"fn": torch.exp, "tensor": X}
    ),
    "reproducible.convert": Call(
        lambda **given: rs.reproducible.convert(given.pop("model", torch.nn.Linear(4, 4)), **given),
        {"layout": TILED, "group": None, "others": None, "timeout_s": None},
    ),
    "reproducible.convert a model": Call(rs.reproducible.convert, {"model": torch.nn.Identity(), "layout": TILED}),
    "transformers.parallelize": Call(
        parallelize_tiny,
        {"group": None, "layout": "zigzag", "algorithm": "auto", "kernel": "auto", "verify": False},
    ),
    "transformers.parallelize a model": Call(parallelize, {"model": None, "verify": False}),
    "diffusers.parallelize": Call(
        diffusers_parallelize,
        {
            "model": None,
            "group": None,
            "algorithm": "auto",
            "mesh": None,
            "cfg": None,
            "example": None,
            "verify": True,
        },
    ),
    "FrameCache": Call(
        FrameCache,
        {"tokens_per_frame": 4, "group": None, "max_frames": None, "pinned_frames": 0, "algorithm": "pass_q"},
    ),
    "ServeSettings": Call(ServeSettings, SERVE),
}


def entered(function: Callable[..., AbstractContextManager[Any]]) -> Callable[..., None]:
    def call(**given: Any) -> None:
        with function(**given):
            pass

    return call


def in_filled_cache(name: str) -> Callable[..., Any]:
    """A method of a cache that holds three tokens of one sequence."""

    def call(**given: Any) -> Any:
        cache = _cache()
        with cache.begin([3]) as turn:
            turn.prefill(Q[:, :, :3], KV[:, :, :3], KV[:, :, :3], layer=0)
        if name != "decode":
            with tempfile.TemporaryDirectory() as folder, chdir(folder):
                return getattr(cache, name)(**given)
        with cache.begin([1]) as turn:
            return turn.decode(**given)

    return call


def attend_frames(**given: Any) -> None:
    with FrameCache(4).chunk(1) as chunk:
        chunk.attend(**given)


def in_handle(name: str) -> Callable[..., Any]:
    def call(**given: Any) -> Any:
        with parallelize(tiny(), verify=False) as handle:
            if name == "step":
                given = {"cache": handle.cache()} | given
            return getattr(handle, name)(**given)

    return call


ONE = Q[:, :, :1]
ROWS = torch.zeros(1, 8, 2, 4)  # (batch, seq, heads, dim)
FRAME = torch.zeros(1, 2, 4, 4)
ENDS = torch.tensor([0, 8])
FLASH: dict[str, Any] = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": True,
    "window_size": (-1, -1),
    "alibi_slopes": None,
    "return_attn_probs": False,
    "group": None,
}
CALLS |= {
    "context_parallel": Call(
        entered(rs.context_parallel),
        {"mesh": None, "buffers": [torch.zeros(8)], "buffer_seq_dims": [0], "no_restore_buffers": None},
    ),
    "context_parallel_unshard": Call(
        rs.context_parallel_unshard, {"mesh": None, "buffers": [Q], "seq_dims": [2], "load_balancer": None}
    ),
    "set_rotate_method": Call(
        lambda **given: copy_context().run(rs.set_rotate_method, **given), {"rotate_method": "allgather"}
    ),
    "KVCache.rows": Call(in_filled_cache("rows"), {"sequence": 0, "layer": 0}),
    "KVCache.save": Call(in_filled_cache("save"), {"folder": "saved", "sequences": None}),
    "KVCache.load numbers": Call(in_cache("load"), {"folder": FOLDER, "numbers": None}),
    "Turn.prefill options": Call(
        in_turn("prefill", 8), {"q": Q, "k": KV, "v": KV, "layer": 0, "softcap": None, "return_lse": False}
    ),
    "Turn.decode": Call(
        in_filled_cache("decode"),
        {"q": ONE, "k": ONE[:, :1], "v": ONE[:, :1], "layer": 0, "scale": None, "softcap": None, "return_lse": False},
    ),
    "Layout.own_positions": Call(LAYOUT.own_positions, {"rank": 0}),
    "Layout.shard_len": Call(LAYOUT.shard_len, {"rank": 0}),
    "Layout.work": Call(LAYOUT.work, {"mask": rs.causal(), "kv_layout": None}),
    "Layout.count_pairs": Call(LAYOUT.count_pairs, {"mask": rs.causal(), "kv_layout": LAYOUT}),
    "Simulation.gradients": Call(rs.simulate_attention(**SIMULATE).gradients, {"dout": ARRAY, "schedule": None}),
    "Schedule.of_steps": Call(rs.Schedule.of_steps, {"world_size": 2, "heads": None, "steps": tuple(SCHEDULE.steps)}),
    "Schedule.step": Call(SCHEDULE.step, {"t": 0}),
    "Schedule.actions": Call(SCHEDULE.actions, {"rank": 0, "t": 0}),
    "Visible.of": Call(rs.Visible.of, {"matrix": [[True, True]]}),
    "Visible.sees": Call(VISIBLE.sees, {"q": 0, "kv": 0}),
    "algorithms.unregister": Call(rs.algorithms.unregister, {"name": "no such one"}),
    "algorithms.list_takers": Call(rs.algorithms.list_takers, {"option": "mesh"}),
    "Handle.shard": Call(in_handle("shard"), {"batch": {"input_ids": IDS}}),
    "Handle.cache": Call(in_handle("cache"), {"storage": None, "max_tokens": None}),
    "Handle.step": Call(in_handle("step"), {"new": {0: [1, 2]}}),
    "Handle.step with a cache": Call(in_handle("step"), {"cache": None, "new": {0: [1, 2]}}),
    "FrameCache.chunk": Call(entered(FrameCache(4).chunk), {"num_frames": 1, "is_clean": False}),
    "FrameChunk.attend": Call(attend_frames, {"layer": 0, "q": FRAME, "k": FRAME, "v": FRAME, "scale": None}),
    "accelerate.parallelize": Call(accelerate_parallelize, {"accelerator": None, "model": None, "group": None}),
    "accelerate.parallelize_trainer": Call(parallelize_trainer, {"trainer": None, "group": None}),
    "verify": Call(
        rs.verify.verify,
        {
            "target": "no such one",
            "world_sizes": (1,),
            "features": ["causal"],
            "layouts": ["zigzag"],
            "ranks": None,
            "thorough": False,
            "seed": 0,
            "progress": None,
        },
    ),
    "verify.make_cases": Call(
        rs.verify.make_cases, {"world_sizes": (1, 2), "layouts": ("zigzag",), "thorough": False, "seed": 0}
    ),
    "verify.ranks_agree": Call(rs.verify.ranks_agree, {"tensors": [Q], "group": None}),
    "ring_flash_attn.ring_flash_attn_func": Call(
        ring_flash_attn.ring_flash_attn_func, {"q": ROWS, "k": ROWS, "v": ROWS, **FLASH}
    ),
    "ring_flash_attn.ring_flash_attn_varlen_func": Call(
        ring_flash_attn.ring_flash_attn_varlen_func,
        {"q": ROWS[0], "k": ROWS[0], "v": ROWS[0], "cu_seqlens": ENDS, "max_seqlen": 8, **FLASH},
    ),
    "ring_flash_attn.zigzag_ring_flash_attn_kvpacked_func": Call(
        ring_flash_attn.zigzag_ring_flash_attn_kvpacked_func, {"q": ROWS, "kv": torch.zeros(1, 8, 2, 2, 4)}
    ),
    "ring_flash_attn.stripe_flash_attn_qkvpacked_func": Call(
        ring_flash_attn.stripe_flash_attn_qkvpacked_func, {"qkv": torch.zeros(1, 8, 3, 2, 4)}
    ),
    "ring_flash_attn.llama3_flash_attn_varlen_func": Call(
        ring_flash_attn.llama3_flash_attn_varlen_func,
        {
            "q": ROWS[0],
            "k": ROWS[0],
            "v": ROWS[0],
            "cu_seqlens_q": ENDS,
            "cu_seqlens_k": ENDS,
            "max_seqlen_q": 8,
            "max_seqlen_k": 8,
            "heads_k_stride": 1,
            "local_k_slice": slice(0, 8),
        },
    ),
    "ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens": Call(
        ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens,
        {"cu_seqlens": ENDS, "causal": True, "rank": 0, "world_size": 1},
    ),
    "ringmaster.ring_attention": Call(
        ringmaster.ring_attention,
        {
            "q": Q,
            "k": Q,
            "v": Q,
            "group": None,
            "causal": True,
            "scaling": None,
            "rotate_method": "allgather",
            "window": None,
        },
    ),
    "ringmaster.varlen_meta": Call(
        ringmaster.varlen_meta, {"global_position_ids": torch.arange(8)[None], "total_padded_len": 8}
    ),
    "ring_attention_pytorch.ring_flash_attn": Call(
        ring_attention_pytorch.ring_flash_attn, {"q": ROWS, "k": ROWS, "v": ROWS}
    ),
    "ring_attention_pytorch.tree_attn_decode": Call(
        ring_attention_pytorch.tree_attn_decode, {"q": ONE, "k": ONE, "v": ONE}
    ),
}
