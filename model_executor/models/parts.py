"""The classes of diffusers and transformers that checkpoints may consist of, and the modules that define them."""

from collections.abc import Mapping

MODULES = {
    "FluxTransformer2DModel": "diffusers.models.transformers.transformer_flux",
    "SD3Transformer2DModel": "diffusers.models.transformers.transformer_sd3",
    "Flux2Transformer2DModel": "diffusers.models.transformers.transformer_flux2",
    "QwenImageTransformer2DModel": "diffusers.models.transformers.transformer_qwenimage",
    "ZImageTransformer2DModel": "diffusers.models.transformers.transformer_z_image",
    "DiTTransformer2DModel": "diffusers.models.transformers.dit_transformer_2d",
    "Transformer2DModel": "diffusers.models.transformers.dit_transformer_2d",
    "UNet2DConditionModel": "diffusers.models.unets.unet_2d_condition",
    "AutoencoderKL": "diffusers.models.autoencoders.autoencoder_kl",
    "AutoencoderKLFlux2": "diffusers.models.autoencoders.autoencoder_kl_flux2",
    "AutoencoderKLQwenImage": "diffusers.models.autoencoders.autoencoder_kl_qwenimage",
    "FlowMatchEulerDiscreteScheduler": "diffusers.schedulers.scheduling_flow_match_euler_discrete",
    "FlowMatchHeunDiscreteScheduler": "diffusers.schedulers.scheduling_flow_match_heun_discrete",
    "FlowMatchLCMScheduler": "diffusers.schedulers.scheduling_flow_match_lcm",
    "DDIMScheduler": "diffusers.schedulers.scheduling_ddim",
    "PNDMScheduler": "diffusers.schedulers.scheduling_pndm",
    "EulerDiscreteScheduler": "diffusers.schedulers.scheduling_euler_discrete",
    "EulerAncestralDiscreteScheduler": "diffusers.schedulers.scheduling_euler_ancestral_discrete",
    "DPMSolverMultistepScheduler": "diffusers.schedulers.scheduling_dpmsolver_multistep",
    "CLIPTextModel": "transformers.models.clip.modeling_clip",
    "CLIPTextModelWithProjection": "transformers.models.clip.modeling_clip",
    "T5EncoderModel": "transformers.models.t5.modeling_t5",
    "Qwen2_5_VLForConditionalGeneration": "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "Qwen3Model": "transformers.models.qwen3.modeling_qwen3",
    "Qwen3ForCausalLM": "transformers.models.qwen3.modeling_qwen3",
    "ControlNetModel": "diffusers.models.controlnets.controlnet",
    "ControlNetUnionModel": "diffusers.models.controlnets.controlnet_union",
    "SD3ControlNetModel": "diffusers.models.controlnets.controlnet_sd3",
    "FluxControlNetModel": "diffusers.models.controlnets.controlnet_flux",
    "CLIPSegForImageSegmentation": "transformers.models.clipseg.modeling_clipseg",
    "GroundingDinoForObjectDetection": "transformers.models.grounding_dino.modeling_grounding_dino",
    "MMGroundingDinoForObjectDetection": "transformers.models.mm_grounding_dino.modeling_mm_grounding_dino",
    "Sam2Model": "transformers.models.sam2.modeling_sam2",
    "Sam3Model": "transformers.models.sam3.modeling_sam3",
    "CLIPTokenizer": "transformers",
    "T5Tokenizer": "transformers",
    "T5TokenizerFast": "transformers",
    "Qwen2Tokenizer": "transformers",
    "Qwen2TokenizerFast": "transformers",
    "Qwen2VLProcessor": "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    "Qwen2_5_VLProcessor": "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
}
"""Class named by model_index.json -> the module that defines it, or its substitute in `IN_PLACE_OF`."""

IN_PLACE_OF = {
    "Qwen2VLProcessor": "Qwen2VLImageProcessorPil",
    "Qwen2_5_VLProcessor": "Qwen2VLImageProcessorPil",
    "Transformer2DModel": "DiTTransformer2DModel",
}
"""Class named by model_index.json -> the class loaded instead: of a processor of pictures, videos and chats the image
processor alone, in the form that works without torchvision; a DiT's transformer, as it was named before
it had a class of its own."""

SEGMENTERS = {
    "clipseg": "CLIPSegForImageSegmentation",
    "grounding-dino": "GroundingDinoForObjectDetection",
    "mm-grounding-dino": "MMGroundingDinoForObjectDetection",
    "sam2": "Sam2Model",
    "sam2_video": "Sam2Model",
    "sam3": "Sam3Model",
    "sam3_video": "Sam3Model",
}
"""The model_type of a config.json -> the class that its checkpoint is loaded with, for models that find masks. Meta
publishes SAM 2 and 3 as models for videos; the classes for pictures leave out the weights that only videos need."""

CONTROLNETS = ("ControlNetModel", "ControlNetUnionModel", "FluxControlNetModel", "SD3ControlNetModel")
"""Classes of ControlNets, which diffusers saves without an index."""

FLOW_SCHEDULERS = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler")
"""Schedulers of transformer denoisers."""

TIMESTEP_SCHEDULERS = (
    "DDIMScheduler",
    "PNDMScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler",
)
"""Schedulers of UNets; DiTs have some of them."""

Classes = Mapping[str, tuple[str, ...]]
"""Part of a checkpoint, named as in model_index.json -> the classes it may have."""

CLIP: Classes = {"text_encoder": ("CLIPTextModel",), "tokenizer": ("CLIPTokenizer",)}
"""CLIP as a text encoder, and its tokenizer."""


def projected_clip(number: str = "") -> Classes:
    """CLIP with a projected pooled output, and its tokenizer. number: suffix of the parts' names, such as "_2"."""
    return {f"text_encoder{number}": ("CLIPTextModelWithProjection",), f"tokenizer{number}": ("CLIPTokenizer",)}


def t5(number: str) -> Classes:
    """T5 and its tokenizer. number: suffix of the parts' names."""
    return {f"text_encoder{number}": ("T5EncoderModel",), f"tokenizer{number}": ("T5Tokenizer", "T5TokenizerFast")}
