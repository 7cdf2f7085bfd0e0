"""Do the two programs that the README shows run as written, and print what it shows?"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ringspan as rs

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ON_RANKS, WITH_A_MODEL = re.findall(r"^```py\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_attention_under_torchrun_prints_what_is_shown(tmp_path: Path) -> None:
    (command, shown) = re.findall(r"^\$ torchrun (.*)\n((?:.+\n)*?)```", README, re.MULTILINE)[0]
    (tmp_path / "attend.py").write_text(ON_RANKS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split()]
    with subprocess.Popen(torchrun, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate(timeout=90)
        finally:
            process.terminate()  # torchrun then ends its workers
    assert process.returncode == 0
    assert len(printed.splitlines()) == len(shown.splitlines())
    for line in set(shown.splitlines()):  # the ranks share a pipe, so their lines can run together
        assert printed.count(line) == shown.count(line)


def test_a_model_of_transformers_computes_what_one_process_computes() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    whole = LlamaForCausalLM(config).eval()
    batch = {"input_ids": torch.randint(3, 50, (2, 61))}
    batch["labels"] = batch["input_ids"]
    prompt = {"input_ids": batch["input_ids"][:1]}
    expected = whole.generate(**prompt, max_new_tokens=100, pad_token_id=0, do_sample=False)
    whole(**batch).loss.backward()
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(whole.state_dict())
    model.generation_config.pad_token_id = 0
    names = {"rs": rs, "model": model, "batch": batch, "prompt": prompt}
    exec(compile(WITH_A_MODEL, "README.md", "exec"), names)
    assert torch.equal(names["tokens"], expected)
    for (name, found), (_, parameter) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(found.grad, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
