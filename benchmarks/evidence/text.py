"""The words of docs/benchmarks.md; they hold whatever was measured."""

HEAD = """# Benchmarks

Written by `make bench` from files of results; do not edit. All systems serve the embedded checkpoint at 256 x 256 px,
float32, one torch thread and one engine each, behind the same HTTP; the client and the servers share one machine. What
is compared:

- **diffusers, one at a time**: FluxFillPipeline behind FastAPI, as diffusers' guide "Create a server" has it: one
  pipeline, one call at a time.
- **diffusers, static batches of 8**: the same; whoever waits when a call ends forms the next batch, which runs until
  all of it is done.
- **diffusers, static batches, first-block cache**: the same, skipping steps whose first block changed little, by
  diffusers' maintained relative of TeaCache, as fast as it gets with acceptable quality
  (`python -m benchmarks.baselines.tune_first_block_cache`).
- **mask-aware, one at a time (FISEdit emulated)**: Stencil with `--max-num-seqs 1`. FISEdit itself cannot run this
  model; it does not batch edits of different masks, which is what is emulated.
- **Stencil, mask-aware off**: continuous batches, every token computed.
- **Stencil's engine, image work in line**: continuous batches; files are decoded and encoded in the denoising process,
  between steps.
- **Stencil**: the default.

Masks are boxes; their *areas* follow FlashPS's distributions (its public trace, mean 0.19, unless said otherwise). The
mask ratio is what comes of them in tokens, margin included. Templates are 60 by Zipf's law, exponent 1.05, none cached
before a run's warm-ups (8 edits, 20 where latency is compared), which are the same for every system. Edits of systems
that compute every token are all alike, so for throughput they get the first quarter of the others' edits. Latency
counts from when an edit was due, failed edits have none and count as infinite.
`benchmarks/benchmark_serving.py` measures any server of the OpenAI images API in the same way.
"""

RATES = """## Latency against the request rate

As FlashPS's figure 12: a few seconds of arrivals at a low and a high rate for all systems, and for Stencil alone a
longer run at the rate that it has to keep up with. The load is the offered rate, as it was drawn, over what diffusers
serves one at a time. A system that fell below 0.75 of the low rate would not be tried at the high one. "Keeps up",
told of long runs alone: edits that came back, over the time from the first arrival to the last answer less the run's
shortest latency, are at least 0.98 of the offered rate, and none failed.
"""

STAGES = """## Where Stencil's time goes

Worker time of an edit under full load by stage, in milliseconds; a batch's is shared by its edits. One over the sum is
the bound in the tables of throughput. What the mask does not shorten limits the gain: encoding, priming (of templates
that are not cached yet) and decoding, and of a step the text tokens and what it takes to run at all. A larger model
spends a smaller share there: see "Where tokens dominate".
"""

FLEETS = {
    "one-at-a-time": "one edit at a time, all tokens (at 0.95 of its capacity, least-requests)",
    "same-rate": "Stencil, FlashPS's production masks (same rate, mask-aware)",
}
"""Rows of the table, by scenario."""

FLEET = """## Against the papers' figures

FlashPS reports up to 3x the throughput and 14.7x lower mean latency than diffusers on 8 GPUs. Throughput by this
factor and more is measured above. How much lower latency gets is a matter of the queue, which grows without limit as a
system nears its capacity: on one engine it is what "Latency at 0.95 of diffusers' capacity" says. For 8 GPUs there is
a simulation alone (`python -m benchmarks.simulate`): Stencil's own schedulers and router with a made-up worker, whose
step of FLUX.1 takes 6 ms and 0.1 s for each 4608 tokens, an assumption and no fit to a GPU, templates warm, 28 steps.
"""

LARGE = """## Where tokens dominate

512 x 512 px edits, 8 steps, of a checkpoint of random weights with FLUX-shaped blocks (hidden size 512, 4 + 8 of them),
4 templates that are warm (`python -m benchmarks.large_checkpoint DIR` writes it).
"""

TWO_ENGINES = """## Two engines

Two processes of diffusers behind a balancer, which gives each request to the one with the fewest under way, against
Stencil with `--data-parallel-size 2`; 16 clients. On 2 cores the client and Stencil's other processes compete with
them.
"""

QUALITY = """## Quality

As FlashPS's table 2: held-out scenes, each system against what diffusers makes with the same seed. SSIM and PSNR in the
mask's box compare after the upload's pixels were pasted back outside the mask. "As returned" compares whole pictures as
the paper does: diffusers sends all of a picture through its autoencoder, Stencil leaves what lies outside the mask as
it came. The feature distance is a Frechet distance on the features of a small network trained on this project's drawn
scenes (`benchmarks/feature_net.py`); it is no FID, and it depends on the number of pictures. In brackets: edits, where
they are fewer. Another seed of diffusers is the scale on which to read the rest. Both kinds of masks ran at once, one
system after the other, so seconds per edit are those of two busy cores.
"""

BATCH_SIZES = """## Throughput by batch size

As FlashPS's figure 14; without a server (`python -m benchmarks.benchmark_throughput`).
"""

MASK_RATIOS = """## Latency against the mask ratio

As FlashPS's figure 15: a denoising step of a lone edit (left), and a lone edit through HTTP (right, 28 steps). Dashed:
what floating-point operations allow.
"""

BATCHING = """## Batching and routing

As FlashPS's figure 16. Left: photos of 1 to 12 megapixels at random times
([reliability.md](reliability.md#image-processors) explains it). Right: 8 simulated engines ([routing.md](routing.md)).
"""

COST_MODEL = """## Cost model

As FlashPS's figure 11: held-out batches of 1 to 8 edits of any mask ratio.
"""

OVERHEADS = """## Overheads

As FlashPS's section 6.6.
"""
