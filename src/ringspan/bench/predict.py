"""What does the planner predict for a measured call? The same schedule on a calibrated device. Needs no torch."""

from ringspan.algorithms import Side
from ringspan.bench.settings import Settings
from ringspan.planner.catalog import Device
from ringspan.planner.cost import Shard
from ringspan.planner.software import RINGSPAN
from ringspan.planner.timeline import Timeline, schedule_timeline
from ringspan.program.prepare import ProgramOptions, build


def predict_pass(settings: Settings, device: Device, side: Side | None) -> Timeline:
    """The timeline of the forward pass, or of the backward pass in which one side travels, in the default mode."""
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
    return schedule_timeline(schedule, problem, shard, device, device.node_size, record=True)
