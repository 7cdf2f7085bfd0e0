"""Targets on real processes: those that the verifier starts, and those of torchrun."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringspan.cli import main
from ringspan.verify.cases import VerifyCase
from ringspan.verify.outcome import Computed
from ringspan.verify.ranks import Hung, Refused, run_processes
from ringspan.verify.run import judge
from support.process_targets import GatheredByGloo, Misbehaves

TESTS = Path(__file__).parents[1]
CASES = [VerifyCase(2, "contiguous", ("causal",), length, dtype="float64") for length in (8, 10, 12, 14)]


@pytest.mark.slow
def test_processes_compute_refuse_and_hang_case_by_case():
    """A case that ends badly costs its processes, and the next case has new ones."""
    found = [outcome for _, outcome in run_processes(Misbehaves, CASES, timeout_s=20.0)]
    assert [type(outcome) for outcome in found] == [Computed, Refused, Hung, Computed]
    assert found[1].kind == "NotImplementedError"
    assert "1 of 2 ranks raised" in found[2].message
    assert all(judge(case, found[i])[0].status == "right" for i, case in enumerate(CASES) if i in (0, 3))


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path):
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    program = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from ringspan.cli import main; main()"
    verify = ["verify", "support.process_targets:GatheredByGloo", "--junit", str(report)]
    done = subprocess.run(
        [*command, sys.executable, "-c", program, *verify], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("GatheredByGloo: right") == 1
    assert 'failures="0"' in report.read_text()


def test_the_command_verifies_on_processes():
    words = ["verify", f"{GatheredByGloo.__module__}:GatheredByGloo", "--ranks", "2"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("GatheredByGloo: right")
