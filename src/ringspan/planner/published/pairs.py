"""Which published rows differ in one choice alone, so that one of them is a winner that a planner should call?"""

from ringspan.planner.published.rows import Row

ITERATIONS = ("device_id", "n_gpus", "pass", "mask", "batch", "seq_len_tokens", "heads_q", "heads_kv", "head_dim")


def set_up(row: Row) -> tuple[str, ...] | None:
    """The choice in question, and what must be equal for two rows to be compared."""
    f = row.fields
    match row.table:
        case "prefill_ttft" if f["variant"].startswith("pass-"):
            return "pass-KV or pass-Q", row.source, f["new_tokens"], f["cached_tokens"]
        case "cp_attention_iters":
            same = tuple(f[key] for key in ITERATIONS)
            if f["library"].startswith("USP"):
                return "ring or Ulysses", row.source, f["source"], *same, f["scheme"], f["packing"]
            return "layout", row.source, f["device"], *same
        case "cp_attention_throughput" if f["library"].startswith("Magi"):
            return "ring, all-gather or Ulysses", row.source, f["n_gpus"], f["pass"], f["mask"], f["seq_len_tokens"]
        case "dit_step_time":
            return "ring or Ulysses", row.source, f["source"], f["n_gpus"], f["cfg_degree"]
        case "training_step":
            return "tensor parallelism, ring or Ulysses", row.source, f["model"], f["n_gpus"], f["seq_len_tokens"]
        case "generation_time":
            return "merge or ring in decode", row.source, f["model"], f["n_gpus"], f["seq_len_tokens"], f["device_id"]
    return None
