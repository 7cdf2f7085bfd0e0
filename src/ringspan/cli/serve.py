"""`ringspan serve`: a model over ranks behind an OpenAI-compatible API."""

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from ringspan.cli.errors import BadInput, Command
from ringspan.errors import RingspanError
from ringspan.page import build_app_page

KEY_VARIABLE = "RINGSPAN_API_KEY"
STYLE = """
.talk p { white-space: pre-wrap; overflow-wrap: anywhere; }
.talk, form.panel { margin-bottom: 1rem; }
#question { box-sizing: border-box; width: 100%; }
td:last-child { min-width: 16rem; }
"""
EXAMPLES = f"""\b
Examples:
  ringspan serve ./SmolLM2-135M-Instruct --ranks 2
  ringspan serve ./model --ranks 4 --host 0.0.0.0 --api-key-file key.txt
  torchrun --nproc-per-node 2 -m ringspan.serve ./model      # and so on each of several machines
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{{"model": "model", "messages": [{{"role": "user", "content": "Hello"}}]}}'

The key of an address that other machines reach is read from the file or from {KEY_VARIABLE}.
"""


@click.command(cls=Command, epilog=EXAMPLES)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--ranks", type=click.IntRange(1, 1024), help="Processes; default: 2, or those of torchrun.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free port.")
@click.option("--name", default="", help="Name of the model in the API; default: the folder's name.")
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="File with the key.")
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16 or float16.")
@click.option("--storage", help="How the KV cache is stored, such as int8; default: as --dtype.")
@click.option("--cache-bytes", type=click.IntRange(1), help="KV cache per rank; default: half of the free memory.")
@click.option("--save-dir", type=click.Path(file_okay=False, path_type=Path), help="Save evicted conversations here.")
@click.option("--batch", "batch_size", type=click.IntRange(1), default=8, show_default=True, help="Answers at once.")
@click.option("--prefill-chunk", type=click.IntRange(1), default=1024, show_default=True, help="Prompt tokens at once.")
@click.option("--max-tokens", type=click.IntRange(1), default=4096, show_default=True, help="Most tokens of an answer.")
@click.option("--queue", "queue_size", type=click.IntRange(1), default=16, show_default=True, help="Waiting requests.")
@click.option("--rank-timeout", "rank_timeout_s", type=float, default=60.0, show_default=True, help="Seconds.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Check the parallelized model first.")
def serve(model: Path, ranks: int | None, api_key_file: Path | None, **options: Any) -> None:
    """Serve a model over ranks through OpenAI's API.

    MODEL is a folder; the ranks share each conversation's KV cache. The API is OpenAI's:
    /v1/chat/completions, /v1/completions, /v1/models; /health and /metrics for operators.
    """
    try:
        from ringspan.serve import ServeSettings
        from ringspan.serve.server import serve as run
        from ringspan.serve.torchrun import torchrun_place
    except ImportError as error:
        raise click.UsageError(
            f"serve needs {error.name}; install it, for example from a checkout with: pip install '.[serve]'"
        ) from error
    place = torchrun_place()
    if place is not None and ranks not in (None, place.num_ranks):
        raise click.UsageError(f"--ranks {ranks}: torchrun started {place.num_ranks} ranks; leave --ranks out")
    num_ranks = (ranks or 2) if place is None else place.num_ranks
    settings = ServeSettings(
        folder=model,
        api_key=_read_key(api_key_file),
        num_ranks=num_ranks,
        home_page=_home_page(options["name"] or model.resolve().name),
        is_under_torchrun=place is not None,
        **options,
    )
    try:
        run(settings)
    except RingspanError as error:
        raise click.ClickException(str(error)) from error
    except (ValueError, ImportError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise click.ClickException(lines[0]) from error


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get(KEY_VARIABLE)
    try:
        return path.read_text().strip()
    except (OSError, ValueError) as error:
        raise BadInput(f"--api-key-file {path}: it cannot be read as text: {type(error).__name__}") from None


def _home_page(name: str) -> str:
    script = files("ringspan.serve").joinpath("assets", "chat.js").read_text(encoding="utf-8")
    return build_app_page(f"ringspan serve: {name}", script, STYLE)
