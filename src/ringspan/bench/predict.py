"""What does the planner predict for a measured call? The same schedule on a calibrated device. Needs no torch."""

from ringspan.bench.settings import Settings
from ringspan.planner.catalog import Device
from ringspan.planner.cost import Shard
from ringspan.planner.software import RINGSPAN
from ringspan.planner.timeline import Timeline, schedule_timeline
from ringspan.program.prepare import ProgramOptions, build


def predict_timeline(settings: Settings, device: Device) -> Timeline:
    """The timeline of one forward call in the default mode, with every step recorded.

    Gradients and the reproducible mode are not covered.
    """
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
    schedule = build(problem, settings.algorithm, ProgramOptions(settings.mesh, settings.direction))
    return schedule_timeline(schedule, problem, shard, device, device.node_size, record=True)
