"""`ringspan bench`: which measurements are there?"""

import click

from ringspan.cli.bench.attention import attention
from ringspan.cli.bench.calibrate import calibrate
from ringspan.cli.bench.inference import decode, prefill
from ringspan.cli.bench.model import model
from ringspan.cli.bench.selfcheck import selfcheck
from ringspan.cli.bench.video import video

EXAMPLES = """\b
Examples:
  ringspan bench attention
  ringspan bench prefill --help
  torchrun --nproc-per-node 2 --no-python ringspan bench attention
  mpirun -np 2 ringspan bench selfcheck
"""


@click.group(epilog=EXAMPLES, invoke_without_command=True)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure this machine and check the results.

    Starts the ranks itself, one per GPU or core, or takes those that torchrun or mpirun has started. Every subcommand
    checks its numbers; exit code 1 if one is wrong or a rank fails.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for command in (attention, model, video, prefill, decode, selfcheck, calibrate):
    bench.add_command(command)
