"""The simulator: all ranks in one process, in NumPy, with a trace of every step."""

from ringspan.simulate._simulator import Gradients, RankStep, Simulation, bytes_sent, simulate_attention
from ringspan.simulate._teaching import ring_attention_context_parallel, ring_attention_simulate

__all__ = [
    "Gradients",
    "RankStep",
    "Simulation",
    "bytes_sent",
    "ring_attention_context_parallel",
    "ring_attention_simulate",
    "simulate_attention",
]
