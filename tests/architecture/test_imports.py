"""Which modules does importing the package load? Seen from a fresh interpreter."""

import subprocess
import sys

import pytest

import ringspan

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_ringspan_loads_neither_torch_nor_the_command_line():
    absent = "{'torch', 'transformers', 'click', 'rich', 'mpi4py'}"
    loaded = run(f"import sys, ringspan; print(*sorted({absent} & set(sys.modules)))")
    assert loaded == ""


def test_simulation_runs_with_torch_absent():
    program = WITHOUT_TORCH + (
        "import numpy as np, ringspan as rs\n"
        "x = np.random.default_rng(0).standard_normal((2, 12, 4))\n"
        "print(rs.simulate_attention(x, x, x, mask=rs.causal(), layout=rs.zigzag(12, 3)).out.shape)"
    )
    assert run(program) == "(2, 12, 4)"


@pytest.mark.parametrize("name", ["attention", "gather", "run_in_process", "shard", "shard_batch"])
def test_a_name_that_needs_torch_says_so_when_torch_is_absent(name):
    program = WITHOUT_TORCH + (
        f"import ringspan as rs\ntry:\n    rs.{name}\nexcept ImportError as error:\n    print(error)"
    )
    assert run(program) == (
        f"ringspan.{name} needs torch; install it, for example from a checkout with: pip install '.[torch]'"
    )


@pytest.mark.parametrize("missing", ["torch", pytest.param("transformers", marks=pytest.mark.wide)])
def test_an_adapter_says_what_it_needs(missing):
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import ringspan as rs\n"
        "try:\n    rs.adapters.transformers\nexcept ImportError as error:\n    print(error)"
    )
    assert run(program) == (
        f"ringspan.adapters.transformers needs {missing}; install it, for example from a checkout with: "
        "pip install '.[transformers]'"
    )
    assert run("import sys, ringspan; ringspan.adapters; print('torch' in sys.modules)") == "False"


def test_dir_has_every_public_name_before_any_is_used():
    assert run("import ringspan as rs; print(sorted(set(rs.__all__) - set(dir(rs))))") == "[]"


def test_every_public_name_resolves_and_no_other_does():
    assert all(getattr(ringspan, name) is not None for name in ringspan.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ringspan.no_such_name
