# Stencil from a clean clone: `make serve` starts the server, `make test` runs the tests. Everything is installed into .venv.

PYTHON ?= python3
VENV := .venv
LATEST := .venv-latest
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
BROWSER := tests/browser/node_modules/.installed
TYPED := core engine model_executor entrypoints benchmarks tools
ON_RAY := faults deaths hangs takeover step_faults poison controlnet_faults workflow_faults late_adapters_served resumed_edits data_parallel guarded_served model_workflows_at_run_time approximate_caching overload rude_clients templates adapters_served runtime_adapters_served workflows_over_http
LOOPBACK := unshare --net --mount --map-root-user sh -c 'ip link set lo up && exec "$$@"' sh
ARGS ?=
BENCHMARKS := bench compare bench-quick bench-serving bench-throughput bench-startup bench-responsiveness bench-edit bench-found-masks bench-shared-denoiser bench-two-workflows bench-twelve-workflows bench-workflows bench-written-workflow bench-adapter-wait bench-approximate-caching bench-overload bench-goodput bench-step bench-lora-step bench-model-load bench-parallel-step bench-controlnet-beside bench-workflow-node bench-elastic bench-unet bench-vae bench-cache bench-block-plan bench-cost-model bench-courier bench-remote bench-api bench-router-decision bench-scheduler-scale bench-coordinator bench-quality simulate soak

.DEFAULT_GOAL := help
.PHONY: $(BENCHMARKS) soak-ray help serve test test-ray test-on-ray test-slow test-latest test-browser fuzz lint types format wheel train-embedded train-edges train-segmenter train-unet gpu-run bench-playground calibrate profile clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 24

serve: $(RUNTIME)  ## Start the server on 127.0.0.1:8000; flags by ARGS="--port 9000"
	$(BIN)/python -m entrypoints.serve $(ARGS)

test: $(DEV)  ## Run the tests, three at a time, since many of them wait; pytest options by ARGS="-k scheduler"
	$(BIN)/python -m pytest -q -n 3 --dist loadfile $(ARGS)

test-slow: $(DEV)  ## Run the tests that take minutes each: a GPU machine's run in small, compiled layers, calibration
	$(BIN)/python -m pytest -q -m slow $(ARGS)

test-ray: $(DEV)  ## Run the tests with a Ray cluster of two machines, in a network namespace with loopback alone
	$(LOOPBACK) $(BIN)/python -m pytest -q -m ray $(wildcard tests/e2e/test_ray*.py) $(ARGS)

test-on-ray: $(DEV)  ## Run end-to-end and fault tests with their engines on two machines of a Ray cluster (half an hour)
	$(LOOPBACK) $(BIN)/python -m pytest -q --on-ray $(ON_RAY:%=tests/e2e/test_%.py) $(ARGS)

test-latest:  ## Run the tests with the newest releases that pyproject.toml allows, in .venv-latest: once a week
	rm -rf $(LATEST)
	$(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install --disable-pip-version-check --editable ".[dev]"
	$(LATEST)/bin/python -m pip freeze --exclude-editable
	$(LATEST)/bin/python -m pytest -q -n 3 --dist loadfile $(ARGS)

test-browser: $(DEV) $(BROWSER)  ## Run the playground's tests in Chromium, which is installed where it may be
	npm --prefix tests/browser test

fuzz: $(DEV)  ## Send a real server and an ImageEngine thousands of bad requests and adapters; how many by FUZZ_REQUESTS=20000
	FUZZ_REQUESTS=$${FUZZ_REQUESTS:-6000} $(BIN)/python -m pytest -q -s tests/e2e/test_fuzz.py tests/e2e/test_fuzz_offline.py tests/e2e/test_fuzz_adapters.py $(ARGS)

lint: $(DEV)  ## Check style and formatting, the Dockerfiles' too
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile Dockerfile.gpu

types: $(DEV)  ## Check types
	$(BIN)/mypy $(TYPED)

format: $(DEV)  ## Rewrite files in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(RUNTIME)  ## Build the wheel, embedded model included, into dist/
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

train-embedded: $(DEV)  ## Train the embedded model again, as the published weights were (3.5 hours of two cores)
	$(BIN)/python -m tools.train_embedded $(ARGS)

train-segmenter: $(DEV)  ## Train the segmenter beside the embedded model again (an hour of one core)
	$(BIN)/python -m tools.train_segmenter $(ARGS)

train-edges: $(DEV)  ## Train the embedded model's edge ControlNet again (an hour of one core)
	$(BIN)/python -m tools.train_edges $(ARGS)

train-unet: $(DEV)  ## Train a small Stable Diffusion checkpoint to measure UNets with (62 minutes of one core, into .train_unet)
	$(BIN)/python -m tools.train_unet $(ARGS)

# Benchmarks: each runs one module; flags by ARGS.
bench: MODULE := benchmarks.evidence  ## All claims in one sweep (about 40 minutes), written up as docs/benchmarks.md; ARGS="--only quality"
compare: MODULE := benchmarks.compare $(REF)  ## Pictures by hash and speeds in turns against another commit: REF=<commit>
bench-quick: MODULE := benchmarks.quick  ## The few ratios that must not fall, in 3 to 4 minutes
bench-serving: MODULE := benchmarks.benchmark_serving  ## Latency and throughput of a server that runs; ARGS="--base-url URL --request-rate 2"
bench-throughput: MODULE := benchmarks.serving.throughput_vs_diffusers  ## Edits per second against a loop over diffusers' FluxFillPipeline
bench-startup: MODULE := benchmarks.serving.startup  ## Time to alive and ready, memory, latency of a lone edit, idle CPU
bench-responsiveness: MODULE := benchmarks.serving.responsiveness  ## Latency of /health while 12-megapixel edits pass through
bench-edit: MODULE := benchmarks.serving.latency  ## Latency of exact, warm and cold edits through HTTP
bench-found-masks: MODULE := benchmarks.serving.found_masks  ## Latency of edits whose mask is found by words, against a mask that is given
bench-shared-denoiser: MODULE := benchmarks.serving.shared_denoiser  ## Throughput of two served models that share a denoiser, against one
bench-two-workflows: MODULE := benchmarks.serving.two_workflows  ## Latency and memory of workflows with and without a ControlNet: two ranks for both, against one rank each
bench-twelve-workflows: MODULE := benchmarks.serving.twelve_workflows  ## Memory of twelve workflows in one server, and the steps that they share
bench-workflows: MODULE := benchmarks.serving.served_workflows  ## Twelve workflows on ranks whose memory holds a part of them, beside systems that swap whole workflows, and beside what is predicted; ARGS="--ranks 2 3 --rounds 2"
bench-written-workflow: MODULE := benchmarks.serving.written_workflow  ## Edits through a user's workflow that says what the shipped one says, against the shipped one
bench-adapter-wait: MODULE := benchmarks.serving.adapter_wait  ## How long a picture waits for an adapter that is fetched for it: first, and while its first steps run
bench-approximate-caching: MODULE := benchmarks.serving.approximate_caching  ## Latency and likeness of pictures that begin in the state of a similar prompt's, at each skip level
bench-overload: MODULE := benchmarks.serving.overload  ## Goodput under a latency objective: at the knee, and at twice its rate
bench-goodput: MODULE := benchmarks.serving.goodput_cells  ## Requests in time on two ranks in six cells: the scheduling policy default, goodput that was before it, and Clockwork, beside what the simulation predicts; ARGS="--cells 3 --rounds 5"
bench-step: MODULE := benchmarks.micro.denoiser_step  ## One denoising step, mask-aware against exact and against diffusers
bench-lora-step: MODULE := benchmarks.micro.lora_step  ## One denoising step of 8 requests with up to three LoRA adapters against the same without
bench-model-load: MODULE := benchmarks.micro.model_load  ## Steps beside which a component of 500 MB is loaded, on the same rank and on another one
bench-parallel-step: MODULE := benchmarks.micro.parallel_step  ## One denoising step on several ranks, against one
bench-controlnet-beside: MODULE := benchmarks.micro.controlnet_beside  ## A step whose ControlNet is on a rank of its own, against one rank for both
bench-workflow-node: MODULE := benchmarks.micro.workflow_node  ## What a node of a user's class takes beyond calling the class
bench-elastic: MODULE := benchmarks.serving.elastic_mix  ## Latency of a mix of large and small edits: the policy default, elastic that was before it, and fixed degrees
bench-unet: MODULE := benchmarks.micro.unet_step  ## One denoising step of a UNet: what the mask leaves of its FLOPs; timed by ARGS="--time 512"
bench-vae: MODULE := benchmarks.micro.vae_region  ## Decoding the region of an edit against the whole picture: time and error by mask ratio
bench-cache: MODULE := benchmarks.micro.cache_policy  ## Cost of the cache manager's bookkeeping, and its hit ratio against LRU and the optimum
bench-block-plan: MODULE := benchmarks.micro.block_plan  ## A step whose pages come from a slow tier: naive, pipelined, Algorithm 1, ours, ideal
bench-cost-model: MODULE := benchmarks.micro.cost_model  ## How well the cost model predicts held-out batches
bench-courier: MODULE := benchmarks.micro.courier  ## The way to an engine of another machine: time of an edit's arrays, and of the API server's event loop meanwhile
bench-remote: MODULE := benchmarks.serving.remote_engines  ## Two engines as on other machines against two of this one: throughput, and latency of a lone edit
bench-api: MODULE := benchmarks.serving.api_ceiling  ## Requests per second of one API server, with engines that answer at once
bench-router-decision: MODULE := benchmarks.micro.router_decision  ## Time of a routing decision, and what the router costs
bench-scheduler-scale: MODULE := benchmarks.micro.scheduler_scale  ## CPU time of an engine's loop with 16 to 256 ranks and up to 5,000 waiting requests; of the scheduling policy by ARGS="--policy default --ranks 64 --waiting 300"
bench-coordinator: MODULE := benchmarks.micro.coordinator  ## CPU time of the scheduler with the default policy and of its messages, per node, with 16 to 256 ranks and 500 requests in flight
bench-quality: MODULE := benchmarks.quality  ## SSIM and accuracy of mask-aware edits against exact ones, and what every knob does
simulate: MODULE := benchmarks.simulation  ## Latency by routing policy on simulated fleets; ARGS="--paper neustream": goodput by scheduling policy; ARGS="--paper ddit": latency and device time of videos; ARGS="--paper lego": workflows that share models; ARGS="--models five": models that take turns in the memory of ranks; ARGS="--arena": the default scheduling policy against those before it
soak: MODULE := benchmarks.soak  ## 20 minutes of mixed traffic with a fault every 30 s: requests, lost, wrong, restarts, memory slope; ARGS="--minutes 10 --single-deaths" kills single workers of one engine

$(BENCHMARKS): $(DEV)
	$(BIN)/python -m $(MODULE) $(ARGS)

soak-ray: $(DEV)  ## 10 minutes of mixed traffic on two machines of a Ray cluster, one of which is killed or stopped every 60 s
	$(LOOPBACK) $(BIN)/python -m benchmarks.soak --ray --minutes 10 $(ARGS)

gpu-run: $(DEV)  ## On a GPU machine, 8 minutes: correctness, speed and bars, written up as docs/gpu.md
	PYTHON=$(BIN)/python benchmarks/gpu/run.sh $(ARGS)

bench-playground: $(RUNTIME) $(BROWSER)  ## A person's first edit in the playground, and drawing on a 12-megapixel photo
	npm --prefix tests/browser run measure

calibrate: $(RUNTIME)  ## Choose keyframes, page dtype, margin and full_steps on your images; flags by ARGS
	$(BIN)/python -m entrypoints.calibrate $(ARGS)

profile: $(RUNTIME)  ## Measure a model's latencies by batch size and tokens, kept for the server's next start; flags by ARGS
	$(BIN)/python -m model_executor.worker.probes.profiler $(ARGS)

clean:  ## Remove .venv and all build products
	rm -rf $(VENV) $(LATEST) tests/browser/node_modules build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Stamps: nothing is installed again until pyproject.toml or constraints.txt changes.
$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $(RUNTIME) $@

$(BROWSER): tests/browser/package-lock.json
	tests/browser/install.sh
	npm --prefix tests/browser ci --no-audit --no-fund
	@touch $@

# A half-made .venv (Debian without python3-venv) must not be taken for a whole one by the next run.
$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { echo "stencil: '$(PYTHON)' not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "stencil: Python 3.11 or newer is needed, '$(PYTHON)' is $$($(PYTHON) -V 2>&1); name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
