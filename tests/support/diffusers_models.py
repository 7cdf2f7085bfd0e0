"""Tiny random transformers of diffusers that run on a CPU in milliseconds, and the arguments of a call of each.

The numbers of tokens are odd. Rows of a batch have prompts of different lengths where a model takes a mask.
"""

# ruff: noqa: C408
import torch


def rnd(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask(batch, length, *valid):  # rows with different numbers of valid tokens, padding behind
    return torch.stack([(torch.arange(length) < valid[i % len(valid)]) for i in range(batch)])


def wan(batch=2, frames=3, h=10, w=14, layers=2, heads=4, dim=24, **over):  # 3*5*7 = 105 tokens; text 512
    from diffusers import WanTransformer3DModel

    m = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=dim,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=layers,
        rope_max_seq_len=64,
        **over,
    )
    x = dict(
        hidden_states=rnd(batch, 4, frames, h, w),
        timestep=torch.tensor([500, 300][:batch]),
        encoder_hidden_states=rnd(batch, 12, 16, seed=2),
    )
    return m, x


def wan_i2v():  # Wan 2.1 I2V: image tokens in front of exactly 512 text tokens (hard-coded in WanAttnProcessor)
    m, x = wan(image_dim=16, added_kv_proj_dim=96)
    x["encoder_hidden_states"] = rnd(2, 512, 16, seed=2)
    x["encoder_hidden_states_image"] = rnd(2, 5, 16, seed=3)
    return m, x


def wan_ti2v():  # Wan 2.2 TI2V-5B: one timestep per token
    m, x = wan()
    x["timestep"] = torch.randint(0, 1000, (2, 105), generator=torch.Generator().manual_seed(1))
    return m, x


def wan_vace():
    from diffusers import WanVACETransformer3DModel

    m = WanVACETransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=4,
        rope_max_seq_len=64,
        vace_layers=[0, 2],
        vace_in_channels=12,
    )
    x = dict(
        hidden_states=rnd(2, 4, 3, 10, 14),
        timestep=torch.tensor([500, 300]),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        control_hidden_states=rnd(2, 12, 3, 10, 14, seed=4),
    )
    return m, x


def hunyuan(kind=None):
    from diffusers import HunyuanVideoTransformer3DModel

    m = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
        image_condition_type=kind,
    )
    x = dict(
        hidden_states=rnd(2, 4, 3, 10, 14),
        timestep=torch.tensor([500, 300]),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        encoder_attention_mask=mask(2, 12, 12, 7),
        pooled_projections=rnd(2, 8, seed=3),
        guidance=torch.tensor([6000.0, 6000.0]),
    )
    return m, x


def hunyuan15():
    from diffusers import HunyuanVideo15Transformer3DModel

    m = HunyuanVideo15Transformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=16,
        text_embed_2_dim=8,
        image_embed_dim=12,
        rope_axes_dim=(2, 2, 4),
        target_size=16,
        task_type="t2v",
    )
    x = dict(
        hidden_states=rnd(2, 4, 3, 5, 7),
        timestep=torch.tensor([500.0, 300.0]),
        encoder_hidden_states=rnd(2, 6, 16, seed=2),
        encoder_attention_mask=mask(2, 6, 6, 3),
        encoder_hidden_states_2=rnd(2, 4, 8, seed=3),
        encoder_attention_mask_2=mask(2, 4, 2, 4),
        image_embeds=torch.zeros(2, 3, 12),
    )
    return m, x


def framepack():
    from diffusers import HunyuanVideoFramepackTransformer3DModel

    m = HunyuanVideoFramepackTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
        image_condition_type=None,
        has_image_proj=True,
        image_proj_dim=16,
        has_clean_x_embedder=True,
    )
    x = dict(
        hidden_states=rnd(1, 4, 3, 4, 4),
        timestep=torch.tensor([500]),
        encoder_hidden_states=rnd(1, 12, 16),
        pooled_projections=rnd(1, 8),
        encoder_attention_mask=mask(1, 12, 9),
        guidance=torch.tensor([6000.0]),
        image_embeds=rnd(1, 12, 16),
        indices_latents=torch.arange(3.0),
        latents_clean=rnd(1, 4, 2, 4, 4),
        indices_latents_clean=torch.arange(2.0),
        latents_history_2x=rnd(1, 4, 2, 4, 4),
        indices_latents_history_2x=torch.arange(2.0),
        latents_history_4x=rnd(1, 4, 8, 4, 4),
        indices_latents_history_4x=torch.arange(8.0),
    )
    return m, x


def cogvideox(version="1.0"):  # 1.0: sin-cos embedding for the 2B, RoPE (given by the pipeline) for the 5B
    from diffusers import CogVideoXTransformer3DModel

    v15 = version == "1.5"
    frames = 4 if v15 else 3
    m = CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=14,
        sample_height=10,
        sample_frames=9,
        patch_size=2,
        patch_size_t=2 if v15 else None,
        temporal_compression_ratio=4,
        max_text_seq_length=12,
        use_rotary_positional_embeddings=True,
    )
    n = (frames // 2 if v15 else frames) * 5 * 7
    x = dict(
        hidden_states=rnd(2, frames, 4, 10, 14),
        timestep=torch.tensor([500, 300]),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        image_rotary_emb=(rnd(n, 16, seed=5).cos(), rnd(n, 16, seed=5).sin()),
    )
    return m, x


def ltx(per_token_timestep=False):
    from diffusers import LTXVideoTransformer3DModel

    m = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=16,
    )
    x = dict(
        hidden_states=rnd(2, 105, 4),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        timestep=torch.randint(0, 1000, (2, 105), generator=torch.Generator().manual_seed(1))
        if per_token_timestep
        else torch.tensor([500, 300]),
        encoder_attention_mask=mask(2, 12, 12, 7).long(),
        num_frames=3,
        height=5,
        width=7,
    )
    return m, x


def mochi():
    from diffusers import MochiTransformer3DModel

    m = MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        out_channels=None,
        qk_norm="rms_norm",
        text_embed_dim=16,
        time_embed_dim=4,
        activation_fn="swiglu",
        max_sequence_length=12,
    )
    x = dict(
        hidden_states=rnd(2, 4, 3, 10, 14),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        timestep=torch.tensor([500, 300]),
        encoder_attention_mask=mask(2, 12, 12, 7),
    )
    return m, x


def flux():
    from diffusers import FluxTransformer2DModel

    m = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    ids = torch.stack(torch.meshgrid(torch.arange(1.0), torch.arange(5.0), torch.arange(7.0), indexing="ij"), -1)
    x = dict(
        hidden_states=rnd(2, 35, 4),
        encoder_hidden_states=rnd(2, 11, 32, seed=2),
        pooled_projections=rnd(2, 32),
        img_ids=ids.view(35, 3),
        txt_ids=torch.zeros(11, 3),
        timestep=torch.tensor([0.5, 0.3]),
    )
    return m, x


def qwenimage():
    from diffusers import QwenImageTransformer2DModel

    m = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    x = dict(
        hidden_states=rnd(2, 35, 16),
        encoder_hidden_states=rnd(2, 11, 16, seed=2),
        encoder_hidden_states_mask=mask(2, 11, 11, 6).long(),
        timestep=torch.tensor([0.5, 0.3]),
        img_shapes=[(1, 5, 7)] * 2,
    )
    return m, x


def skyreels(df=False):
    from diffusers import SkyReelsV2Transformer3DModel

    m = SkyReelsV2Transformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=64,
        num_frame_per_block=2 if df else 1,
    )
    x = dict(
        hidden_states=rnd(2, 4, 4, 10, 14),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        timestep=torch.tensor([500, 300]),
    )
    if df:
        x.update(
            timestep=torch.randint(0, 1000, (2, 4), generator=torch.Generator().manual_seed(1)),
            enable_diffusion_forcing=True,
        )
    return m, x


def cosmos():
    from diffusers import CosmosTransformer3DModel

    m = CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=12,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=False,
        extra_pos_embed_type="learnable",
    )
    x = dict(
        hidden_states=rnd(1, 4, 3, 10, 14),
        timestep=torch.tensor([500]),
        encoder_hidden_states=rnd(1, 12, 16),
        attention_mask=torch.ones(1, 12),
        fps=30,
    )  # concat_padding_mask=True needs torchvision
    return m, x


def easyanimate():
    from diffusers import EasyAnimateTransformer3DModel

    m = EasyAnimateTransformer3DModel(
        attention_head_dim=16,
        num_attention_heads=4,
        in_channels=4,
        mmdit_layers=2,
        num_layers=2,
        out_channels=4,
        patch_size=2,
        sample_height=60,
        sample_width=90,
        text_embed_dim=16,
        time_embed_dim=8,
        time_position_encoding_type="3d_rope",
        timestep_activation_fn="silu",
    )
    x = dict(
        hidden_states=rnd(2, 4, 3, 10, 14),
        timestep=torch.tensor([500, 300]),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
    )
    return m, x


def allegro():
    from diffusers import AllegroTransformer3DModel

    m = AllegroTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=48,
        sample_width=14,
        sample_height=10,
        sample_frames=3,
        caption_channels=8,
    )
    x = dict(
        hidden_states=rnd(2, 4, 3, 10, 14),
        encoder_hidden_states=rnd(2, 12, 8, seed=2),
        timestep=torch.tensor([500, 300]),
        attention_mask=None,
        encoder_attention_mask=mask(2, 12, 12, 7).float(),
        image_rotary_emb=None,
    )
    return m, x


def sana_video():  # linear attention and a temporal convolution: must be refused
    from diffusers import SanaVideoTransformer3DModel

    m = SanaVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=12,
        num_layers=2,
        num_cross_attention_heads=4,
        cross_attention_head_dim=12,
        cross_attention_dim=48,
        caption_channels=8,
        mlp_ratio=2.5,
        sample_size=10,
        patch_size=(1, 2, 2),
        rope_max_seq_len=32,
    )
    x = dict(
        hidden_states=rnd(2, 4, 3, 10, 14),
        encoder_hidden_states=rnd(2, 12, 8, seed=2),
        timestep=torch.tensor([500, 300]),
    )
    return m, x


# Models to which nothing was fitted.


def image_ids(height=5, width=7):
    grid = torch.meshgrid(torch.arange(1.0), torch.arange(float(height)), torch.arange(float(width)), indexing="ij")
    return torch.stack(grid, -1).view(height * width, 3)


def pixart():
    from diffusers import PixArtTransformer2DModel

    m = PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        sample_size=14,
        caption_channels=16,
        use_additional_conditions=False,
    )
    return m, dict(
        hidden_states=rnd(2, 4, 10, 14),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        timestep=torch.tensor([500, 300]),
        encoder_attention_mask=mask(2, 12, 12, 7).long(),
        added_cond_kwargs=dict(resolution=None, aspect_ratio=None),
    )


def sd3():
    from diffusers import SD3Transformer2DModel

    m = SD3Transformer2DModel(
        sample_size=14,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=24,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return m, dict(
        hidden_states=rnd(2, 4, 10, 14),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        pooled_projections=rnd(2, 16, seed=3),
        timestep=torch.tensor([500, 300]),
    )


def auraflow():
    from diffusers import AuraFlowTransformer2DModel

    m = AuraFlowTransformer2DModel(
        sample_size=14,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=196,
    )
    return m, dict(
        hidden_states=rnd(2, 4, 10, 14), encoder_hidden_states=rnd(2, 12, 16, seed=2), timestep=torch.tensor([0.5, 0.3])
    )


def cogview4():
    from diffusers import CogView4Transformer2DModel

    m = CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        rope_axes_dim=(8, 8),
    )
    size = torch.tensor([[80, 112], [80, 112]])
    return m, dict(
        hidden_states=rnd(2, 4, 10, 14),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        timestep=torch.tensor([500, 300]),
        original_size=size,
        target_size=size,
        crop_coords=torch.zeros(2, 2),
    )


def lumina2():
    from diffusers import Lumina2Transformer2DModel

    m = Lumina2Transformer2DModel(
        sample_size=14,
        patch_size=2,
        in_channels=4,
        hidden_size=48,
        num_layers=3,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=2,
        axes_dim_rope=(4, 4, 4),
        cap_feat_dim=8,
    )
    return m, dict(
        hidden_states=rnd(2, 4, 10, 14),
        timestep=torch.tensor([0.5, 0.3]),
        encoder_hidden_states=rnd(2, 12, 8, seed=2),
        encoder_attention_mask=mask(2, 12, 12),
    )


def lumina2_padded():
    m, x = lumina2()
    return m, x | dict(encoder_attention_mask=mask(2, 12, 12, 7))


def latte():  # attends within frames and across frames in turn; the latter blocks are not split
    from diffusers import LatteTransformer3DModel

    m = LatteTransformer3DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=8,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        num_embeds_ada_norm=1000,
        activation_fn="gelu-approximate",
        video_length=3,
    )
    return m, dict(
        hidden_states=rnd(2, 4, 3, 8, 8), encoder_hidden_states=rnd(2, 12, 8, seed=2), timestep=torch.tensor([500, 300])
    )


def hunyuan_dit():
    from diffusers import HunyuanDiT2DModel

    m = HunyuanDiT2DModel(
        sample_size=14,
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        cross_attention_dim=16,
        cross_attention_dim_t5=16,
        pooled_projection_dim=4,
        hidden_size=32,
        text_len=6,
        text_len_t5=8,
        use_style_cond_and_image_meta_size=True,
    )
    return m, dict(
        hidden_states=rnd(2, 4, 14, 14),
        timestep=torch.tensor([500.0, 300.0]),
        encoder_hidden_states=rnd(2, 6, 16, seed=2),
        text_embedding_mask=mask(2, 6, 6, 4).long(),
        encoder_hidden_states_t5=rnd(2, 8, 16, seed=3),
        text_embedding_mask_t5=mask(2, 8, 8, 5).long(),
        image_meta_size=torch.ones(2, 6),
        style=torch.zeros(2, dtype=torch.long),
        image_rotary_emb=(rnd(49, 8, seed=5).cos(), rnd(49, 8, seed=5).sin()),
    )


def chroma():
    from diffusers import ChromaTransformer2DModel

    m = ChromaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    return m, dict(
        hidden_states=rnd(2, 35, 4),
        encoder_hidden_states=rnd(2, 11, 32, seed=2),
        img_ids=image_ids(),
        txt_ids=torch.zeros(11, 3),
        timestep=torch.tensor([0.5, 0.3]),
    )


def dit():
    from diffusers import DiTTransformer2DModel

    m = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=14
    )
    return m, dict(
        hidden_states=rnd(2, 4, 14, 14), timestep=torch.tensor([500, 300]), class_labels=torch.tensor([3, 5])
    )


def flux2():
    from diffusers import Flux2Transformer2DModel

    m = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
    )
    ids = torch.cat([image_ids(), torch.zeros(35, 1)], 1)[None].expand(2, -1, -1)
    return m, dict(
        hidden_states=rnd(2, 35, 4),
        encoder_hidden_states=rnd(2, 11, 32, seed=2),
        img_ids=ids,
        txt_ids=torch.zeros(2, 11, 4),
        timestep=torch.tensor([0.5, 0.3]),
        guidance=torch.tensor([1.0, 1.0]),
    )


def z_image():  # takes lists, and pads each sequence to a multiple of 32
    from diffusers import ZImageTransformer2DModel

    m = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    return m, dict(
        x=[rnd(4, 1, 10, 14), rnd(4, 1, 10, 14, seed=7)],
        t=torch.tensor([0.5, 0.3]),
        cap_feats=[rnd(12, 16, seed=2), rnd(9, 16, seed=3)],
    )


def chronoedit():
    from diffusers import ChronoEditTransformer3DModel

    m = ChronoEditTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=64,
        rope_temporal_skip_len=8,
    )
    return m, dict(
        hidden_states=rnd(2, 4, 2, 10, 14),
        timestep=torch.tensor([500, 300]),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
    )


def stable_audio():
    from diffusers import StableAudioDiTModel

    m = StableAudioDiTModel(
        sample_size=4,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        out_channels=4,
        cross_attention_dim=16,
        time_proj_dim=8,
        global_states_input_dim=16,
        cross_attention_input_dim=16,
    )
    angles = rnd(34, 4, seed=5)
    return m, dict(
        hidden_states=rnd(2, 4, 33),
        timestep=torch.tensor([500, 300]),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        global_hidden_states=rnd(2, 1, 16, seed=3),
        rotary_embedding=(angles.cos(), angles.sin()),
    )


def prx():
    from diffusers import PRXTransformer2DModel

    m = PRXTransformer2DModel(
        in_channels=4, patch_size=2, context_in_dim=16, hidden_size=32, num_heads=4, depth=2, axes_dim=[4, 4]
    )
    return m, dict(
        hidden_states=rnd(2, 4, 10, 14),
        timestep=torch.tensor([0.5, 0.3]),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        attention_mask=mask(2, 12, 12, 7),
    )


def hunyuan_image():
    from diffusers import HunyuanImageTransformer2DModel

    m = HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size=(1, 1),
        text_embed_dim=16,
        text_embed_2_dim=None,
        rope_axes_dim=(4, 4),
    )
    return m, dict(
        hidden_states=rnd(2, 4, 5, 7),
        timestep=torch.tensor([500.0, 300.0]),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        encoder_attention_mask=mask(2, 12, 12, 7),
    )


def sana():  # linear attention and convolutions
    from diffusers import SanaTransformer2DModel

    m = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=8,
        sample_size=14,
    )
    return m, dict(
        hidden_states=rnd(2, 4, 10, 14), encoder_hidden_states=rnd(2, 12, 8, seed=2), timestep=torch.tensor([500, 300])
    )


def kandinsky5():
    from diffusers import Kandinsky5Transformer3DModel

    m = Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        in_text_dim=16,
        in_text_dim2=8,
        time_dim=16,
        out_visual_dim=4,
        patch_size=(1, 2, 2),
        model_dim=32,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 4, 8),
    )
    return m, dict(
        hidden_states=rnd(1, 3, 10, 14, 4),
        encoder_hidden_states=rnd(1, 12, 16, seed=2),
        timestep=torch.tensor([500.0]),
        pooled_projections=rnd(1, 8, seed=3),
        visual_rope_pos=[torch.arange(3), torch.arange(5), torch.arange(7)],
        text_rope_pos=torch.arange(12),
    )


def ltx2():  # video and audio attend to each other; the audio is replicated
    from diffusers import LTX2VideoTransformer3DModel

    m = LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        caption_channels=16,
        use_prompt_embeddings=True,
    )
    return m, dict(
        hidden_states=rnd(2, 105, 4),
        audio_hidden_states=rnd(2, 9, 4, seed=6),
        encoder_hidden_states=rnd(2, 12, 16, seed=2),
        audio_encoder_hidden_states=rnd(2, 12, 16, seed=3),
        timestep=torch.tensor([500, 300]),
        encoder_attention_mask=mask(2, 12, 12, 7).long(),
        audio_encoder_attention_mask=mask(2, 12, 12, 7).long(),
        num_frames=3,
        height=5,
        width=7,
        fps=25.0,
        audio_num_frames=9,
    )


LISTED = dict(
    wan=wan,
    wan_i2v=wan_i2v,
    wan_ti2v=wan_ti2v,
    wan_vace=wan_vace,
    hunyuan=hunyuan,
    hunyuan_token_replace=lambda: hunyuan("token_replace"),
    hunyuan15=hunyuan15,
    framepack=framepack,
    cogvideox=cogvideox,
    cogvideox15=lambda: cogvideox("1.5"),
    ltx=ltx,
    ltx_i2v=lambda: ltx(True),
    mochi=mochi,
    flux=flux,
    qwenimage=qwenimage,
    skyreels=skyreels,
    skyreels_df=lambda: skyreels(True),
    cosmos=cosmos,
    easyanimate=easyanimate,
    allegro=allegro,
    sana_video=sana_video,
)
UNSEEN = dict(
    pixart=pixart,
    sd3=sd3,
    auraflow=auraflow,
    cogview4=cogview4,
    lumina2=lumina2,
    lumina2_padded=lumina2_padded,
    latte=latte,
    hunyuan_dit=hunyuan_dit,
    chroma=chroma,
    dit=dit,
    flux2=flux2,
    z_image=z_image,
    chronoedit=chronoedit,
    stable_audio=stable_audio,
    prx=prx,
    hunyuan_image=hunyuan_image,
    sana=sana,
    kandinsky5=kandinsky5,
    ltx2=ltx2,
)
MODELS = LISTED | UNSEEN


def build(name):
    """A model with random weights and the arguments of a call, the same at every call."""
    from support.diffusers_others import OTHERS

    torch.manual_seed(0)
    model, arguments = (MODELS | OTHERS)[name]()
    with torch.no_grad():  # some tables start at 0, which would hide errors
        for x in model.parameters():
            if x.abs().max() == 0:
                x.normal_(std=0.05)
    return model.eval(), arguments | {"return_dict": False}


def wan_pipeline():
    """A pipeline without text encoder, and the arguments of a call that ends with latents."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, transformer=build("wan")[0], vae=vae.eval(), scheduler=scheduler
    )
    return pipe, {
        "prompt_embeds": rnd(1, 12, 16),
        "negative_prompt_embeds": rnd(1, 12, 16, seed=2),
        "guidance_scale": 5.0,
    }


def hunyuan_pipeline():
    """Like `wan_pipeline`; guidance is an argument of the transformer."""
    from diffusers import AutoencoderKLHunyuanVideo, FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline

    vae = AutoencoderKLHunyuanVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=True,
    )
    pipe = HunyuanVideoPipeline(
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=build("hunyuan")[0],
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )
    return pipe, {
        "prompt_embeds": rnd(1, 12, 16),
        "pooled_prompt_embeds": rnd(1, 8),
        "prompt_attention_mask": mask(1, 12, 7),
    }


def cogvideox_pipeline():
    """Like `wan_pipeline`; guidance doubles the batch."""
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline

    vae = AutoencoderKLCogVideoX(
        in_channels=3,
        out_channels=3,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    pipe = CogVideoXPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae.eval(),
        transformer=build("cogvideox")[0],
        scheduler=CogVideoXDDIMScheduler(),
    )
    return pipe, {
        "prompt_embeds": rnd(1, 12, 16),
        "negative_prompt_embeds": rnd(1, 12, 16, seed=2),
        "guidance_scale": 5.0,
        "max_sequence_length": 12,
    }


PIPELINES = {"wan": wan_pipeline, "hunyuan": hunyuan_pipeline, "cogvideox": cogvideox_pipeline}


def denoise(pipe, arguments, *, seed=3, num_steps=4):
    """The latents of a few steps."""
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        **arguments,
        height=80,
        width=112,
        num_frames=9,
        num_inference_steps=num_steps,
        output_type="latent",
        generator=torch.Generator().manual_seed(seed),
        return_dict=False,
    )[0]
