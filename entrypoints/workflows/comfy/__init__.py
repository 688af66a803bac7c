"""ComfyUI graphs, in the form that its API takes, as workflows in the language.

    JSON --graph_reader--> Graph --composition_reader--> Composition --program--> text of a file of the language

A graph says everything of one picture; a workflow says what its requests have in common. So what a request may say,
such as prompt, seed and number of steps, becomes a default of the workflow's requests. `node_class` has all classes and
inputs that are known. A graph of these is refused by node and input, too, where it has several of what a request has
one of: prompts, guidance and adapters of samplers, scales of an adapter, VAEs, pictures that are results.

What differs from ComfyUI:

- Noise levels are those of the served model's scheduler_config.json. `normal`, `simple`, `sgm_uniform` and
  `ddim_uniform` stand for any even ones. Where that file is in a directory, it must ask for what samplers and the other
  schedules do.
- Without a picture the noise is ComfyUI's, the first that the seed draws. Over a picture it is that of diffusers'
  inpainting pipelines, which first draw what the VAE samples of it.
- VAEEncodeForInpaint: the VAE sees the picture itself under the mask, not grey. VAEEncodeForInpaint and
  InpaintModelConditioning: what is outside of the mask is the picture's, pasted back; `noise_mask` has no effect.
- Text encoders and VAEs that are loaded apart are the served model's, whatever their files are called; a VAE beside a
  whole checkpoint is refused.
- Every token is computed, unless a request says `mask_aware`.
- The texts of FLUX and SD3 are as long as ComfyUI pads them, and cut there. FLUX is told by the type of its text
  encoders, FluxGuidance, or a file's name with "flux" in it; SD3 by "sd3", or EmptySD3LatentImage.
- Of several samplers in a row the last one's picture is the result, in the order of execution; the others are left out.
"""
