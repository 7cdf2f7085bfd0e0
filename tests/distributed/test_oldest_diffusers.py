"""The adapter on the oldest diffusers that pyproject.toml allows; all other tests run on the newest."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = Path(sys.prefix) / "oldest"
FILES = [str(ROOT / "tests" / "numerics" / f"test_diffusers_{name}.py") for name in ("models", "pipelines")]
CHOSEN = "(output_and_gradients and (wan or hunyuan or cogvideox or flux or pixart)) or latents_are_those"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(not OLDEST.is_dir(), reason="needs the oldest diffusers: make test-slow installs it"),
]


def test_models_and_pipelines_on_the_oldest_version() -> None:
    oldest = re.search(r"diffusers>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (OLDEST, ROOT / "src", ROOT / "tests")))}
    version = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import diffusers; print(diffusers.__version__)"],
        env=env,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert version.stdout.startswith(f"{oldest[1]}.")
    # On import this version warns that there is no CUDA, which the settings of pytest would make an error.
    run_tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::UserWarning"]
    ran = subprocess.run(
        [*run_tests, "-m", "not slow", "-k", CHOSEN, *FILES], cwd=ROOT, env=env, stdout=subprocess.PIPE
    )
    assert ran.returncode == 0, ran.stdout.decode()
