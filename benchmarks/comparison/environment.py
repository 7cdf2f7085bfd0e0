"""Where do peers live? In their own environment, made once, with the same torch as ours."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

PACKAGES = ("ring-attention-pytorch", "axolotl-ringmaster", "transformers", "numpy")
_CONSTRAINTS = Path(__file__).parents[2] / "constraints" / "cpu.txt"


def make_environment(folder: Path) -> str:
    """Return the Python of a virtual environment with the peers; an existing one is kept."""
    python, is_complete = folder / "bin" / "python", folder / ".complete"
    if not is_complete.exists():
        torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "-c", str(_CONSTRAINTS), torch, *PACKAGES], check=True
        )
        is_complete.touch()
    return str(python)


def peer_versions(python: str) -> str:
    """Return the installed versions."""
    code = "import importlib.metadata as m, sys; print(', '.join(f'{it} {m.version(it)}' for it in sys.argv[1:]))"
    output = subprocess.run([python, "-c", code, "torch", *PACKAGES], check=True, capture_output=True, text=True)
    return output.stdout.strip()
