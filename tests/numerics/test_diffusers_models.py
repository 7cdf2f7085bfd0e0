"""Transformers of diffusers on ranks: the numbers of one process, for models that the adapter does not know by name."""

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

import copy

import torch

from ringspan.adapters.diffusers import parallelize
from ringspan.errors import UnsupportedError
from ringspan.transports.in_process import run_in_process
from support.diffused import error_of, on_ranks, outputs_on_ranks, run_alone, whole
from support.diffusers_models import LISTED, UNSEEN
from support.diffusers_others import OTHERS

REFUSED = {  # and the module that each refusal names
    "sana": "transformer_blocks.0.attn1 joins tokens",
    "sana_video": "transformer_blocks.0.attn1 joins tokens",
}
BOUNDS = {
    "kandinsky5": 2**-7,  # its rotary embedding returns bfloat16: one ulp elsewhere can flip a rounding
    "consisid": 1e-5,  # gradients of what makes faces are sums of large numbers; in float64 they differ by 2e-7
}
KEY_BIASES = ("to_k.bias", "k_proj.bias", "norm_k.bias")
pytestmark = pytest.mark.filterwarnings("ignore:.FluxPosEmbed. is deprecated:FutureWarning")
FEW = ["wan", "hunyuan_token_replace", "cogvideox", "flux", "pixart", "ideogram4", "sd3_control", "cosmos3"]
ALL = [name for name in LISTED | UNSEEN if name not in REFUSED]


def check_output_and_gradients(name: str, world_size: int, **options: object) -> None:
    alone = run_alone(name, with_gradients=True)

    def run(model, group):
        handle = parallelize(model, group, **options)
        output = whole(model(**alone.arguments))
        (output * alone.weights).sum().backward()
        handle.reduce_gradients()
        handle.restore()
        gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        with torch.no_grad():
            return output.detach(), gradients, whole(model(**alone.arguments))

    largest = max(x.abs().max() for x in alone.gradients.values())
    for output, gradients, restored in on_ranks(alone, world_size, run):
        assert error_of(output, alone.output) <= 2e-6
        assert torch.equal(restored, alone.output)
        for key, expected in alone.gradients.items():
            error = (gradients[key] - expected).abs().max()
            # Softmax takes most of a shift of all keys away: that gradient is a small difference of large numbers.
            bound = BOUNDS.get(name, 2e-5 if key.endswith(KEY_BIASES) else 5e-6)
            size = expected.abs().max()
            absolute = (5e-8 if size < 1e-4 * largest else 1e-8) * largest
            assert error <= max(bound * size, absolute), key


@pytest.mark.parametrize("name", FEW)
def test_output_and_gradients_are_those_of_one_process(name):
    check_output_and_gradients(name, 3 if name == "wan" else 2, algorithm="pass_kv")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", ALL)
def test_every_model_is_exact_with_gradients(name, world_size):
    check_output_and_gradients(name, world_size, algorithm="pass_kv")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_models_to_which_nothing_was_fitted_are_exact(name):
    check_output_and_gradients(name, 3, algorithm="pass_kv")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "world_size", "mesh"),
    [("pass_q", 3, None), ("all_gather", 3, None), ("ulysses", 2, None), ("hybrid", 4, (2, 2))],
)
@pytest.mark.parametrize("name", [name for name in LISTED if name not in REFUSED])
def test_every_algorithm_is_exact(name, algorithm, world_size, mesh):
    alone = run_alone(name)
    for output in outputs_on_ranks(alone, world_size, algorithm=algorithm, mesh=mesh):
        assert error_of(output, alone.output) <= 2e-6


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_joins_tokens_elsewhere_is_refused_by_the_module(name):
    alone = run_alone(name)
    with pytest.raises(UnsupportedError, match=REFUSED[name]):
        outputs_on_ranks(alone, 2)


def test_a_model_of_which_only_the_prompt_could_be_split_is_refused():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(8, 16),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    ).eval()
    call = {"sample": torch.randn(2, 4, 10, 14), "timestep": 500, "encoder_hidden_states": torch.randn(2, 12, 16)}

    def run(group):
        with parallelize(copy.deepcopy(model), group) as handle, torch.no_grad():
            handle.adapters["transformer"].model(**call)

    with pytest.raises(UnsupportedError, match="none of its blocks"):
        run_in_process(run, 2)


def test_fewer_video_tokens_than_text_tokens():
    alone = run_alone("hunyuan")
    small = alone.arguments | {
        "hidden_states": alone.arguments["hidden_states"][:, :, :1, :4, :6]
    }  # 6 tokens, 12 of text
    with torch.no_grad():
        alone = alone._replace(arguments=small, output=whole(alone.model(**small)))
    for output in outputs_on_ranks(alone, 2):
        assert error_of(output, alone.output) <= 2e-6


def test_a_plan_serves_calls_of_other_sizes_and_another_is_learned_for_another_kind():
    alone = run_alone("wan")
    larger = alone.arguments | {"hidden_states": torch.randn(2, 4, 5, 6, 18)}
    one_row = {name: x[:1] if isinstance(x, torch.Tensor) else x for name, x in alone.arguments.items()}
    with torch.no_grad():
        expected = [whole(alone.model(**arguments)) for arguments in (alone.arguments, larger, one_row)]

    def run(model, group):
        with torch.no_grad(), parallelize(model, group, example=alone.arguments) as handle:
            outputs = [whole(model(**arguments)) for arguments in (alone.arguments, larger)]
            learned = len(handle.plans["transformer"])
            return [*outputs, whole(model(**one_row))], learned, len(handle.plans["transformer"])

    for outputs, before, after in on_ranks(alone, 2, run):
        assert max(map(error_of, outputs, expected)) <= 2e-6
        assert (before, after) == (1, 2)
