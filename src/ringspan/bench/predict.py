"""What does the planner predict for a measured call? The same schedule on a calibrated device. Needs no torch."""

from ringspan.algorithms import Side
from ringspan.bench.settings import Settings
from ringspan.planner.catalog import Device
from ringspan.planner.cost import Shard
from ringspan.planner.software import RINGSPAN
from ringspan.planner.timeline import schedule_timeline
from ringspan.program.prepare import ProgramOptions, build


def predict_s(settings: Settings, device: Device) -> float:
    """Seconds of a call in the default mode: its forward pass, and its backward pass if that is measured."""
    return sum(predict_pass_s(settings, device, side) for side in settings.passes())


def predict_pass_s(settings: Settings, device: Device, side: Side | None) -> float:
    """Seconds of the forward pass, or of the backward pass in which one side travels."""
    problem = settings.problem()
    shapes = problem.shapes
    shard = Shard(
        batch=settings.batch,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        v_head_dim=settings.head_dim,
        kv_elements=2 * settings.num_kv_heads * settings.head_dim,
        itemsize=shapes.itemsize,
        wire="bf16",
        practice=RINGSPAN,
    )
    schedule = build(problem, settings.algorithm, ProgramOptions(settings.mesh, settings.direction, side))
    return schedule_timeline(schedule, problem, shard, device, device.node_size).makespan_s
