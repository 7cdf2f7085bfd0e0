"""What would the planner have said? The set-up of each published row, put as a request.

What a source does not state is assumed here, once for each source and in words: the software, the kernel, the number of
forward passes in a denoising step. What cannot be put as a request is refused, by name.
"""

from collections.abc import Callable

from ringspan.errors import UnsupportedError
from ringspan.planner.catalog import Constants, fitted
from ringspan.planner.published import attention_rows, model_rows
from ringspan.planner.published.rows import Fields, Predicted, Row


def predict_row(row: Row, constants: Constants | None = None) -> Predicted:
    """The prediction, in the unit of the row, and where the time goes."""
    if row.use == "unused":
        raise UnsupportedError(f"{row.id}: {row.why}")
    return _PREDICT[row.table](row.fields, constants or fitted())


_PREDICT: dict[str, Callable[[Fields, Constants], Predicted]] = {
    "attention_kernel_throughput": attention_rows.kernel,
    "ring_step_time": attention_rows.ring_step,
    "decode_attention_time": attention_rows.decode_attention,
    "cp_attention_throughput": attention_rows.throughput,
    "cp_attention_iters": attention_rows.iterations,
    "ring_min_block": attention_rows.min_block,
    "dit_latency": model_rows.video_latency,
    "dit_step_time": model_rows.video_step,
    "prefill_ttft": model_rows.ttft,
    "decode_ttit": model_rows.ttit,
    "generation_time": model_rows.generation,
    "training_step": model_rows.training_step,
    "cp_speedup": model_rows.speedup,
}
