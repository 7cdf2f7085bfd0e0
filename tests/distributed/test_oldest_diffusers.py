"""The adapter on the oldest diffusers that pyproject.toml allows; all other tests run on the newest."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

ROOT = Path(__file__).parents[2]
MODELS = "wan or hunyuan or cogvideox or flux or pixart"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("processes")]


def test_models_and_pipelines_on_the_oldest_version(tmp_path: Path) -> None:
    found = re.search(r"diffusers>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert found is not None
    oldest = found[1]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*pip, f"diffusers=={oldest}.0"], check=True)
    places = [str(tmp_path), str(ROOT / "src"), str(ROOT / "tests")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    version = subprocess.run(
        [sys.executable, "-c", "import diffusers; print(diffusers.__version__)"],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    assert version.stdout.strip() == f"{oldest}.0"
    files = [str(ROOT / "tests/numerics" / f"test_diffusers_{name}.py") for name in ("models", "pipelines")]
    chosen = f"(output_and_gradients and ({MODELS})) or latents_are_those"
    pytest_call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", chosen]
    ran = subprocess.run([*pytest_call, *files], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"[1-9]\d* passed", ran.stdout), ran.stdout
    assert "failed" not in ran.stdout
