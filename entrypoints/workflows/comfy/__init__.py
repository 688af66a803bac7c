"""ComfyUI graphs, in the form that its API takes, as workflows in the language.

    JSON --graph_reader--> Graph --composition_reader--> Composition --program--> text of a file of the language

A graph says everything of one picture; a workflow says what its requests have in common. So what a request may say,
such as prompt, seed and number of steps, becomes a default of the workflow's requests. `node_class` has all classes and
inputs that are known. A graph of these is refused by node and input, too, where it has several of what a request has
one of: prompts, guidance and adapters of samplers, scales of an adapter, VAEs, pictures that are results.

What differs from ComfyUI, held against its source (October 2025, a125cd84):

    what                      ComfyUI                                     here
    noise, no picture         the first that the seed draws, on the CPU   the same; of a prompt's batch in turn
    noise over a picture      likewise                                    drawn after what the VAE samples, as
                                                                          diffusers' inpainting pipelines do
    noise of steps, batch     drawn for all pictures at once              as if by seed + 1, ... after the first
    latents of a picture      the mean of what the VAE predicts           a sample of it, as in diffusers
    normal                    timesteps from 999 down to 0, even          the same with timestep_spacing linspace
    simple                    every (1000 / steps)-th from 999 down       the same with trailing
    ddim_uniform              every (1000 // steps)-th from 1 up          the same with leading, steps_offset 1
    steps not dividing 1000   ddim_uniform has a step more; simple cuts   as many steps as are asked for; trailing
                              timesteps off                               rounds them
    sgm_uniform               normal with a step more, but its last       nearly that of trailing
    karras, exponential       from the highest noise level to the lowest  the same with timestep_spacing linspace
    beta                      timesteps by the distribution               noise levels by it, as in diffusers
    SD3                       shift 3; normal is diffusers' schedule      the shift of scheduler_config.json
    FLUX                      shift e^1.15; simple is diffusers'          a shift by the size, the same at 1024 x 1024
                              schedule
    highest noise level       noise * sqrt(1 + sigma^2)                   the same with spacing leading, else noise *
                                                                          sigma
    denoise                   the last of int(steps / denoise) steps      the same
    KSamplerAdvanced          from step to step, noise added or not       the same where samplers go on from one
                                                                          another
    euler_ancestral, lcm      noise of steps drawn anew from the seed     drawn on after the first noise
    ddim, under a mask        noise outside is that of seed + 1           that of the seed
    SetLatentNoiseMask        a soft mask, interpolated                   a hard one, from 128 of 255 on; outside, the
                                                                          picture itself is pasted back
    VAEEncodeForInpaint       the VAE sees grey under the mask; an even   it sees the picture; the mask grows alike on
                              size grows it less on one side              all sides; pasted back likewise
    InpaintModelConditioning  with noise_mask false all may change        pasted back: noise_mask has no effect
    ControlNet                from start to end percent by noise level    the steps that these are in the graph's
                                                                          schedule
    control pictures          cut to the proportions, in the middle       other proportions are refused
    LatentUpscale(By)         bislerp, beside PyTorch's methods           PyTorch's methods
    LoraLoader                two strengths                               they must be equal
    FluxGuidance              3.5 where no node says it                   the same
    CLIPTextEncode            (word:1.2), embedding:name; 75 tokens, and  refused; cut at the text encoder's length
                              then 75 more
    T5 of FLUX and SD3        padded to 256 and 77 tokens, not cut        padded likewise, cut there

- A model has the noise levels of its scheduler_config.json, whatever schedule of even ones (normal, simple,
  ddim_uniform, sgm_uniform) a graph names. Where that file is in a directory, it must ask for what samplers and the
  other schedules do.
- Text encoders and VAEs that are loaded apart are the served model's, whatever their files are called; a VAE beside a
  whole checkpoint is refused.
- Every token is computed, unless a request says `mask_aware`.
- FLUX is told by the type of its text encoders, FluxGuidance, or a file's name with "flux" in it; SD3 by "sd3", or
  EmptySD3LatentImage.
- Of several samplers in a row the last one's picture is the result of a served graph, in the order of execution; the
  others are left out. Prompts (`entrypoints.comfy_api`) get them all.
"""
