"""ComfyUI's HTTP API, for its API clients: prompts, their history, the queue, uploads, pictures, and a websocket.

    POST /prompt --graph--> GraphEdit (one for each picture that is decoded) --> AsyncEngine --> Files, History
                                                                  |
                                                                  +--> Sockets --> /ws

A graph's pictures are what `--workflow graph.json` makes of it, with what the graph says; there are as many as its
nodes decode and its batch_size says. Every path is also served below /api, as ComfyUI does.

What differs from ComfyUI:

- POST /interrupt without a prompt_id ends all that run of the caller's.
- Of `extra_data`, extra_pnginfo and preview_method are kept. PNGs carry no graph. A prefix's %width% stays as it is.
- Prompts are admitted as edits are: one that there is no place for is refused at once (503, retry-after). Several run
  at the same time, in the engine's order; `number` and `front` change nothing. /queue says which ones a worker has
  begun.
- With API keys, callers see only their own history, uploads, pictures, queue and messages. All of these are in memory,
  and the oldest are forgotten (`Files`, `History`).
- A refiner is the one of the model's catalog entry. A model whose entry names a workflow makes no pictures of graphs.
- Nodes of one picture are executed together, so `progress` of a sampler comes at its end, or with previews, which
  `preview_method` of `extra_data` asks for: auto, latent2rgb or taesd.
- An upload is stored as it came: /view ignores `preview`, and refuses a `channel` other than rgba.
- /upload/mask keeps the mask beside the picture that it is for; it must have its size.
"""
