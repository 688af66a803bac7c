"""The words of docs/gpu.md; they hold whatever was measured."""

HEAD = """# GPUs

Written by `make gpu-check`; do not edit. The words are in `benchmarks/gpu/text.py`, the figures come from files
of results or are computed from shapes.

## What there is

- `--device cuda`, `cuda:N`, or `auto`, which takes a GPU when PyTorch sees one; bfloat16 unless `--dtype` says
  otherwise.
- One worker per GPU: engine i of W workers takes the GPUs i * W to i * W + W - 1 of those that `CUDA_VISIBLE_DEVICES`
  leaves. `--data-parallel-size` is the number of engines; where there are too few GPUs the server ends at once and says
  so.
- Cached pages lie in the GPU's memory first. After loading, a worker runs its largest batches (what `--max-num-seqs`
  and `--max-num-batched-tokens` allow at the native size, priming, encoding, decoding), and what weights, batches and
  what requests keep between their steps leave of `--gpu-memory-utilization` (0.9) is for pages; `--cache-device-bytes`
  sets it instead. Where one picture's pages have no room, the server ends with a line that says what takes how much and
  which flags help.
- Below that pages lie in host memory (`--cache-host-bytes`) and come up on a stream of their own while steps are
  computed: a block's attention waits for that block alone. All of that memory is taken and pinned when the server
  starts, for each engine, and not given back before it ends; where CUDA refuses, the server ends with a line that says
  so. The default of 4 GiB holds less than one FLUX template at 1024 px, whose 5 keyframes take 7.4 GB;
  `--cache-host-bytes 64G` holds nine. Without room in the GPU's memory (`--cache-device-bytes 0`, several workers in an
  engine) every token is computed.
- Besides products and attention a step is Triton kernels (`model_executor/triton_kernels.py`): pages are dequantised,
  interpolated between their keyframes and overlaid with what the edit computes in one pass over memory; norm and
  modulation, rotation, gated additions, and making pages, are one pass each, for all requests of a batch without a copy
  per token. Triton comes with PyTorch's packages for GPUs and needs a C compiler and Python's headers. Kernels are
  tried out at the start; where they do not work, the log says why, and PyTorch's operators compute the same within
  rounding. They are compiled when they are first needed, mostly before the server is ready, and kept in the folder
  `stencil/triton` of the user's cache.
- Attention in half precision is cuDNN's where PyTorch prefers that (Hopper, cuDNN 9.15 and later): neighbours in a
  batch with as many keys and about as many queries share a call, and a request's queries count as a multiple of 128,
  since cuDNN prepares itself anew for every number. Elsewhere it is one call over requests of any length of PyTorch's
  flash attention, as it is on Hopper with the package flash-attn 3 (`flash_attn_interface`) installed; in float32 a
  call per request.
- A UNet's rows share passes: exact ones of one size, templates of one size, and of a mask-aware edit prompt and
  negative prompt. `--kernels compile` runs a UNet's residual and transformer blocks through `torch.compile`, once for
  all masks, at the first start, for one row and for the two of a guided edit. Transformers are not compiled, since what
  that could fuse is fused. Nothing is a CUDA graph.
- `--kernels torch` leaves all of it to PyTorch's operators: where a picture looks wrong, or a server does not start,
  try it first, since it tells where the fault lies.
- A product of another number of rows may be rounded otherwise, so what shares a picture's steps may change its last
  bits; on a CPU it does not.
- A step that runs out of memory is done in halves until whoever is at fault is alone, and what is cached of memory is
  given back before each attempt ([reliability.md](reliability.md)).
"""

NOT_RUN = """## What has not been run

**Nothing on this page has run on a GPU.** No machine that this project was built on had one. All of it was written
against its twin on the CPU, where every piece has tests:

- pages, tiers, scheduling, memory arithmetic and faults: the same code over CPU tensors;
- Triton's kernels: by its interpreter against PyTorch's operators, in float32, bfloat16 and float16, with head dims of
  16 to 128 and numbers of tokens that fill no tile, within one unit in the last place of the dtype; and compiled by it
  to machine code for an H200, which needs none;
- whole passes of models shaped as FLUX, SD3 and UNets on PyTorch's meta device, where a pass fails that mixes devices,
  moves a tensor from the host or waits for a number from the GPU; there also the call of varlen attention, of which
  nothing but shapes is checked; that of cuDNN's way by PyTorch's attention of a CPU;
- copies beside computing: on a stand-in for streams and events that notes their order;
- `--kernels compile`: traced, and run without generating code;
- `benchmarks.gpu` itself: at a tiny size.

That leaves to the first run all that only a GPU shows: whether kernels launch, races between streams, pinning,
attention's numbers, GELU within cuBLASLt's products (on a CPU that operator computes another approximation), and every
time. So expect it to find faults, and please report them. The tests of kernels, of attention and of copies run on a GPU
too:

    TRITON_INTERPRET=0 make test ARGS="tests/model_executor/test_triton_kernels.py"
    TRITON_INTERPRET=0 make test ARGS="-m gpu"

Figures in the README and in [benchmarks.md](benchmarks.md) are all of CPUs.
"""

HOW = """## How to check a GPU machine

    make gpu-check                                  # 10 minutes at most
    make gpu-check ARGS="--minutes 5"               # the most important sections alone
    make gpu-check ARGS="--only flux_steps sdxl"    # these; others keep what an earlier run found
    make gpu-check ARGS="--write-only"              # this page, from what a run that was cut off has left
    make gpu-check ARGS="--device cpu --size tiny"  # no GPU: shows that the check itself runs

It needs nothing from the internet but what `make` installs. For a machine without one that has torch and a Python of
version 3.12, fetch the rest elsewhere, 68 MB on 64-bit x86:

    wheels="--dest wheels --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64
        --platform manylinux_2_26_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64"
    pip download $wheels -r benchmarks/gpu/requirements.txt
    pip download $wheels --no-deps accelerate  # it would bring torch along

and there, `wheels` copied into the clone:

    pip install --no-index --find-links wheels -r benchmarks/gpu/requirements.txt accelerate
    python3 -m benchmarks.gpu

It takes about 60 GB of GPU memory: FLUX.1-dev's transformer in bfloat16 with random weights, and pages of 8 templates.
Weights do not change the time of a step. Each figure is a median, both sides of a comparison take turns in one process,
and diffusers runs eager and with its blocks compiled, as its guide to `torch.compile` has it. A section that breaks,
hangs or breaks the device costs the others nothing: what is left is done in a new process. It prints a line for each
bar, and writes `docs/gpu_results.json` after every figure and this page at its end:

| section | what |
| --- | --- |
| `correctness` | edits of the embedded model and of small random checkpoints of every family against a CPU's |
| `kernel_tests` | the tests of kernels, attention and copies |
| `flux_steps` | a step by mask ratio, in batches of 1, 4 and 8 |
| `attention` | of FLUX's shape, as steps compute it and by other ways that PyTorch has |
| `flux_cold` | priming; the first edit of a new picture against an exact one, both without text encoders |
| `flux_host_pages` | a run whose pages come up from host memory, and how much of the copies lies under kernels |
| `overhead` | a step of 8 edits from the scheduler to its first kernel |
| `served` | the embedded model behind the processes of a server: start, memory for pages, pixels |
| `sdxl` | a guided step, and a warm edit, of Stable Diffusion XL's shape |
"""

EXPECT = """## What to expect

What floating-point operations allow, counted from the shapes: a step's products and its attention both grow with the
tokens that are computed, text included. Compiled kernels and the GPU's memory decide how much of it is reached; reading
int8 pages of a step's two keyframes alone takes {page_ms:.1f} ms at 4 TB/s.
"""

EXPECT_HOST = """
A GPU also waits for its host where that launches slower than it computes. A step of one edit of FLUX.1-dev's depth is
817 launches, whatever its mask, for which one core of an AMD EPYC took 13 to 17 ms without CUDA's own part, a step of 8
edits 1,780 and 38 ms (`python -m benchmarks.micro.launches`). The operations of one edit at mask ratio 0.1 are {tflop:.1f}
TFLOP: {step_ms:.0f} ms at 800 TFLOP/s, before anything else, and of 8 edits 8 times that. So by these figures a GPU is
kept busy without CUDA graphs; what a run measures is in the column "launched in". A UNet has more launches for less to
compute, which is what `--kernels compile` is for.
"""

EXPECT_PAGES = """
A template of this size is {entry_gb:.2f} GB per keyframe. Over a link of 50 GB/s a keyframe comes up in
{load_ms:.0f} ms, and is needed once in {steps_per_keyframe:.0f} of {steps} steps.

Stable Diffusion XL's convolutions compute the box around the mask, so that a step at mask ratio 0.2 can be 3.38 times
faster by operations (`python -m benchmarks.micro.unet_step --unet sdxl`). The bar of 2.2 is the paper's, against diffusers
eager. A mask-aware step launches more kernels than an exact one, and smaller ones, so that without `--kernels compile`
launching them may be what takes longest.
"""

MACHINE = """## Measured

{device}, {memory_gb:.0f} GB, CUDA {cuda}, {versions}; {seconds:.0f} s in all.
"""

NOT_A_GPU = "**Of a {device_type} at {size} size: these figures show that the check runs, and nothing else.**\n"

STEPS = """### A step of FLUX's transformer

{billion_parameters:.1f} billion parameters, {image_tokens} image and {text_tokens} text tokens, int8 pages between two
keyframes, on the device. Our exact step's result differs from diffusers' by {exact_from_diffusers:.2g} of its norm, and
a mask-aware one of the template's own content, over its own int8 pages, from the exact one by {masked_from_exact:.2g}.
An exact step is {exact_tflop:.3g} TFLOP. Stencil computes with PyTorch and {operators}. Beside milliseconds: how much
faster than diffusers compiled, and in brackets which share that is of the bound by operations; "launched in": a step at
mask ratio 0.1, by the host.
"""

COLD = "### Priming and the first edit of a new picture\n"

HOST = """### Pages in host memory

One edit of {steps} steps, whose {copied_gb:.1f} GB of pages come up meanwhile. Copies and kernels are timed by the
{seen_by}.
"""

SDXL = """### Stable Diffusion XL's shape

Guided: two rows a step. An edit is {steps} steps, encoding and decoding; the bound by operations of a step at mask
ratio {ratio:g} is {bound:.2f}.
"""

CORRECTNESS = """### Against a CPU in float32

Differences of pixel values, in levels of 255, the larger of exact and mask-aware edits. Random weights magnify what
bfloat16 rounds; of the embedded model it means something.
"""

KERNEL_TESTS = "### Tests of kernels\n"

SERVED = """### By a server's own processes

The embedded model in float32, one worker.
"""

OVERHEAD = "### Before a step's first kernel, 8 edits\n"

ATTENTION = """### Attention

{heads} heads of {head_dim} numbers, {keys} keys each request: all requests together (varlen), those alike together,
each by itself; steps take the way "{chosen}".
"""

SKIPPED = "### Not finished\n"

BROKEN = "### Broken off\n"
