"""More tiny transformers of diffusers, to which nothing was fitted: name -> a function of a model and its arguments."""

# ruff: noqa: C408
import torch

from support.diffusers_models import image_ids, mask, rnd

STEPS = torch.tensor([0.5, 0.3])
FLUX_SIZES = dict(
    patch_size=1,
    in_channels=4,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=32,
    axes_dims_rope=(4, 4, 8),
)


def flux_like(name, *, with_control=False, **sizes):
    """Models that are called as Flux is."""
    import diffusers

    arguments = dict(
        hidden_states=rnd(2, 35, 4),
        encoder_hidden_states=rnd(2, 11, 32, seed=2),
        timestep=STEPS,
        img_ids=image_ids(),
        txt_ids=torch.zeros(11, 3),
    )
    if with_control:
        arguments |= dict(controlnet_cond=rnd(2, 35, 4, seed=5), pooled_projections=rnd(2, 32))
    return getattr(diffusers, name)(**FLUX_SIZES | sizes), arguments


def bria_fibo():  # its pipeline gives a mask of all pairs
    model, arguments = flux_like("BriaFiboTransformer2DModel", text_encoder_dim=16)
    valid = torch.cat([mask(2, 11, 11, 6), torch.ones(2, 35, dtype=torch.bool)], 1)
    pairs = torch.where(valid[:, None] & valid[..., None], 0.0, -torch.inf)[:, None]
    layers = [rnd(2, 11, 16, seed=seed) for seed in (7, 8, 9, 10)]
    return model, arguments | dict(text_encoder_layers=layers, joint_attention_kwargs={"attention_mask": pairs})


def cogview3():
    from diffusers import CogView3PlusTransformer2DModel

    model = CogView3PlusTransformer2DModel(
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        pos_embed_max_size=16,
        sample_size=16,
    )
    size = torch.tensor([[80, 112], [80, 112]])
    return model, dict(
        hidden_states=rnd(2, 4, 10, 14),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        timestep=torch.tensor([500, 300]),
        original_size=size,
        target_size=size,
        crop_coords=torch.zeros(2, 2),
    )


def ernie_image():
    from diffusers import ErnieImageTransformer2DModel

    model = ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=48,
        in_channels=4,
        out_channels=4,
        text_in_dim=16,
        rope_axes_dim=(8, 4, 4),
    )
    return model, dict(
        hidden_states=rnd(2, 4, 5, 7), timestep=STEPS, text_bth=rnd(2, 12, 16, seed=2), text_lens=torch.tensor([12, 7])
    )


def flux3(with_image=False):
    from diffusers import Flux3Transformer2DModel

    model = Flux3Transformer2DModel(
        in_channels=4,
        cond_in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        timestep_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
    )
    ids = torch.cat([image_ids(), torch.zeros(35, 1)], 1)
    arguments = dict(
        hidden_states=rnd(2, 35, 4),
        encoder_hidden_states=rnd(2, 11, 16, seed=2),
        timestep=STEPS,
        img_ids=ids,
        txt_ids=torch.zeros(11, 4),
    )
    if with_image:
        arguments |= dict(image_cond_hidden_states=rnd(2, 9, 4, seed=5), image_cond_ids=ids[:9] + 1)
    return model, arguments


def glm_image():
    from diffusers import GlmImageTransformer2DModel

    model = GlmImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        prior_vq_quantizer_codebook_size=64,
    )
    return model, dict(
        hidden_states=rnd(2, 4, 10, 14),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        prior_token_id=torch.arange(70).reshape(2, 35) % 64,
        prior_token_drop=torch.zeros(2, dtype=torch.bool),
        timestep=torch.tensor([500, 300]),
        target_size=torch.tensor([[80.0, 112.0]] * 2),
        crop_coords=torch.zeros(2, 2),
    )


def hidream():  # between its blocks it counts the rows of its hidden states
    from diffusers import HiDreamImageTransformer2DModel

    model = HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=[8, 4],
        text_emb_dim=8,
        num_routed_experts=2,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=(0, 1),
        force_inference_output=True,
    )
    return model, dict(
        hidden_states=rnd(2, 4, 14, 14),
        encoder_hidden_states_t5=rnd(2, 8, 8, seed=2),
        encoder_hidden_states_llama3=rnd(2, 2, 8, 4, seed=3),
        pooled_embeds=rnd(2, 8, seed=4),
        timesteps=torch.tensor([500, 300]),
    )


def ideogram4():  # its padding attends to itself: a mask of all pairs
    from diffusers import Ideogram4Transformer2DModel

    model = Ideogram4Transformer2DModel(
        in_channels=8,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        intermediate_size=32,
        adaln_dim=16,
        llm_features_dim=16,
        rope_theta=10000,
        mrope_section=(2, 1, 1),
    )
    text, image = 12, 35
    segments = torch.ones(2, text + image, dtype=torch.long)
    segments[1, :5] = -1
    positions = torch.cat([torch.arange(text)[:, None].expand(-1, 3), image_ids().long() + 65536])
    return model, dict(
        hidden_states=torch.cat([torch.zeros(2, text, 8), rnd(2, image, 8)], 1),
        timestep=STEPS,
        encoder_hidden_states=torch.cat([rnd(2, text, 16, seed=2), torch.zeros(2, image, 16)], 1),
        position_ids=positions[None].expand(2, -1, -1),
        segment_ids=segments,
        indicator=torch.cat([torch.full((2, text), 3), torch.full((2, image), 2)], 1),
    )


def joy_image():
    from diffusers import JoyImageEditTransformer3DModel

    model = JoyImageEditTransformer3DModel(
        in_channels=4, hidden_size=32, num_attention_heads=2, text_dim=16, num_layers=2, rope_dim_list=[4, 6, 6]
    )
    return model, dict(
        hidden_states=rnd(2, 4, 3, 10, 14),
        timestep=torch.tensor([500.0, 300.0]),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
    )


def krea2():
    from diffusers import Krea2Transformer2DModel

    model = Krea2Transformer2DModel(
        in_channels=8,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        timestep_embed_dim=8,
        text_hidden_dim=16,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    )
    return model, dict(
        hidden_states=rnd(2, 35, 8),
        encoder_hidden_states=rnd(2, 12, 3, 16, seed=2),
        timestep=STEPS,
        position_ids=torch.cat([torch.zeros(12, 3), image_ids()]),
        encoder_attention_mask=mask(2, 12, 12, 7),
    )


def longcat_audio():  # both sequences are padded
    from diffusers import LongCatAudioDiTTransformer

    model = LongCatAudioDiTTransformer(dit_dim=64, dit_depth=2, dit_heads=4, dit_text_dim=32, latent_dim=8)
    return model, dict(
        hidden_states=rnd(2, 33, 8),
        encoder_hidden_states=rnd(2, 10, 32, seed=2),
        encoder_attention_mask=mask(2, 10, 10, 6),
        timestep=torch.ones(2),
        attention_mask=mask(2, 33, 33, 29),
    )


def ace_step():  # a sliding window in every other layer: a mask of all pairs
    from diffusers import AceStepTransformer1DModel

    model = AceStepTransformer1DModel(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        in_channels=24,
        audio_acoustic_hidden_dim=8,
        sliding_window=16,
    )
    return model, dict(
        hidden_states=rnd(2, 66, 8),
        timestep=STEPS,
        timestep_r=STEPS,
        encoder_hidden_states=rnd(2, 10, 32, seed=2),
        context_latents=rnd(2, 66, 16, seed=3),
    )


def sd3_control():  # returns the outputs of all blocks
    from diffusers import SD3ControlNetModel

    model = SD3ControlNetModel(
        sample_size=16,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=16,
    )
    return model, dict(
        hidden_states=rnd(2, 4, 10, 14),
        controlnet_cond=rnd(2, 4, 10, 14, seed=4),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        pooled_projections=rnd(2, 16, seed=3),
        timestep=torch.tensor([500, 300]),
    )


def omnigen():  # causal for the text, full for the image: a mask of all pairs, which its caller makes
    from diffusers import OmniGenTransformer2DModel

    model = OmniGenTransformer2DModel(
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=32,
        num_layers=2,
        pad_token_id=0,
        vocab_size=100,
        in_channels=4,
        time_step_dim=4,
        rope_scaling={"long_factor": [1, 2], "short_factor": [1, 2]},
    )
    visible = torch.ones(2, 48, 48).tril()
    visible[:, 12:, 12:] = 1
    return model, dict(
        hidden_states=rnd(2, 4, 10, 14),
        timestep=STEPS,
        input_ids=torch.arange(24).reshape(2, 12) % 10,
        input_img_latents=[],
        input_image_sizes={},
        attention_mask=visible,
        position_ids=torch.arange(48)[None].expand(2, -1),
    )


def motif():
    from diffusers import MotifVideoTransformer3DModel

    model = MotifVideoTransformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_single_layers=2,
        text_embed_dim=16,
        image_embed_dim=8,
        rope_axes_dim=(4, 4, 4),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    )
    return model, dict(
        hidden_states=rnd(2, 9, 3, 10, 14),
        timestep=torch.tensor([500, 300]),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        encoder_attention_mask=mask(2, 12, 12, 7),
        image_embeds=rnd(2, 5, 8, seed=3),
    )


def wan_animate():  # attends within frames, to the faces of each, in every second block
    from diffusers import WanAnimateTransformer3DModel

    model = WanAnimateTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=12,
        latent_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=4,
        image_dim=16,
        rope_max_seq_len=64,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )
    return model, dict(
        hidden_states=rnd(2, 12, 3, 10, 14),
        timestep=torch.tensor([500, 300]),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        encoder_hidden_states_image=rnd(2, 5, 16, seed=3),
        pose_hidden_states=rnd(2, 4, 2, 10, 14, seed=4),
        face_pixel_values=rnd(2, 3, 5, 16, 16, seed=5),
    )


def consisid():  # with faces, to which the tokens attend between the blocks
    from diffusers import ConsisIDTransformer3DModel

    model = ConsisIDTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=14,
        sample_height=10,
        sample_frames=9,
        max_text_seq_length=12,
        use_rotary_positional_embeddings=True,
        is_train_face=True,
        cross_attn_dim_head=8,
        cross_attn_num_heads=2,
        LFE_id_dim=16,
        LFE_vit_dim=16,
        LFE_depth=2,
        LFE_dim_head=8,
        LFE_num_heads=2,
        LFE_num_id_token=3,
        LFE_num_querie=4,
        LFE_output_dim=32,
        LFE_ff_mult=2,
        LFE_num_scale=2,
    )
    return model, dict(
        hidden_states=rnd(2, 3, 4, 10, 14),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        timestep=torch.tensor([500, 300]),
        image_rotary_emb=(rnd(105, 12, seed=5).cos(), rnd(105, 12, seed=5).sin()),
        id_cond=rnd(2, 16, seed=6),
        id_vit_hidden=[rnd(2, 7, 16, seed=7), rnd(2, 7, 16, seed=8)],
    )


def cosmos3():  # no batch; sizes that fit together are in ten places, so it is learned at those of the call
    from diffusers import Cosmos3OmniTransformer

    model = Cosmos3OmniTransformer(
        head_dim=16,
        hidden_size=32,
        intermediate_size=48,
        latent_channel=4,
        num_attention_heads=2,
        num_hidden_layers=2,
        num_key_value_heads=1,
        patch_latent_dim=16,
        vocab_size=64,
        rope_axes_dim=(4, 2, 2),
    )
    text, video = 12, 105
    positions = torch.cat([torch.arange(text)[:, None].expand(-1, 3), grid_ids(3, 5, 7) + text])
    return model, dict(
        input_ids=torch.arange(text),
        text_indexes=torch.arange(text),
        position_ids=positions.T,
        und_len=text,
        sequence_length=text + video,
        vision_tokens=[rnd(1, 4, 3, 10, 14)],
        vision_token_shapes=[(3, 5, 7)],
        vision_sequence_indexes=torch.arange(text, text + video),
        vision_mse_loss_indexes=torch.arange(text, text + video),
        vision_timesteps=torch.full((video,), 500.0),
        vision_noisy_frame_indexes=[torch.arange(3)],
    )


def grid_ids(*sizes):
    """The position of every token of a grid, (tokens, dims)."""
    return torch.cartesian_prod(*map(torch.arange, sizes))


def stable_audio3(with_local=False):  # memory tokens stand before the others, to which alone a local sequence is added
    from diffusers import StableAudio3DiTModel

    model = StableAudio3DiTModel(
        io_channels=4,
        embed_dim=32,
        depth=2,
        num_heads=4,
        cond_token_dim=16,
        global_cond_dim=16,
        local_add_cond_dim=5,
        timestep_features_dim=8,
        ff_mult=2.0,
        num_memory_tokens=4,
    )
    arguments = dict(
        hidden_states=rnd(2, 4, 35),
        timestep=STEPS,
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        global_hidden_states=rnd(2, 16, seed=3),
        encoder_attention_mask=mask(2, 12, 12, 7),
    )
    return model, arguments | (dict(local_add_cond=rnd(2, 5, 35, seed=4)) if with_local else {})


def sana_refiner():
    from diffusers import SanaWMLTX2RefinerTransformer3DModel

    model = SanaWMLTX2RefinerTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=24,
        cross_attention_dim=48,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=16,
    )
    rotary = model.build_rotary_emb_for_absolute_positions(2, [0, 1, 2], 5, 7, torch.device("cpu"), 24.0)
    return model, dict(
        hidden_states=rnd(2, 105, 4),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        timestep=torch.randint(0, 1000, (2, 105), generator=torch.Generator().manual_seed(1)).float(),
        video_rotary_emb=rotary,
        encoder_attention_mask=mask(2, 12, 12, 7).long(),
    )


OTHERS = dict(
    bria=lambda: flux_like("BriaTransformer2DModel"),
    ovis_image=lambda: flux_like("OvisImageTransformer2DModel", out_channels=4),
    longcat_image=lambda: flux_like("LongCatImageTransformer2DModel", pooled_projection_dim=32),
    flux_control=lambda: flux_like("FluxControlNetModel", with_control=True, pooled_projection_dim=32),
    bria_fibo=bria_fibo,
    cogview3=cogview3,
    ernie_image=ernie_image,
    flux3=flux3,
    flux3_image=lambda: flux3(True),
    glm_image=glm_image,
    hidream=hidream,
    ideogram4=ideogram4,
    joy_image=joy_image,
    krea2=krea2,
    longcat_audio=longcat_audio,
    ace_step=ace_step,
    sd3_control=sd3_control,
    motif=motif,
    omnigen=omnigen,
    wan_animate=wan_animate,
    consisid=consisid,
    cosmos3=cosmos3,
    stable_audio3=stable_audio3,
    stable_audio3_local=lambda: stable_audio3(True),
    sana_refiner=sana_refiner,
)
