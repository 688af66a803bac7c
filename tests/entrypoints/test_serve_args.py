"""The command line: defaults, one-line errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from workflow_texts import SOUND

from core.config import AdapterConfig, CacheConfig, EngineConfig, ModelConfig, StencilConfig
from core.errors import ConfigError, WorkflowError
from entrypoints.model_paths import check_model
from entrypoints.serve import with_workflows
from entrypoints.serve_args import parse_options


def test_defaults_are_the_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STENCIL_API_KEY", raising=False)
    monkeypatch.delenv("STENCIL_API_KEYS", raising=False)
    options = parse_options([])
    assert options.config == StencilConfig()
    assert (options.host, options.port, options.api_keys) == ("127.0.0.1", 8000, ())
    assert options.rate_limit == 0


@pytest.mark.parametrize("flag", ["--workers-per-engine", "--data-parallel-size"])
def test_one_gpu_cannot_be_shared(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--device", "cuda:1", flag, "2"])
    assert "--device cuda:1 is one device" in capsys.readouterr().err
    assert parse_options(["--device", "cuda:1"]).models[0].device == "cuda:1"


def test_every_flag_sets_its_option() -> None:
    flags = "--model m/n --served-model-name x --dtype bfloat16 --device cuda --threads 3 --max-num-seqs 2"
    flags += " --quantization torchao-int8 --kernels torch --variant fp16"
    flags += " --max-num-batched-tokens 99 --max-queue 5 --image-workers 4 --workers-per-engine 2 --max-stage-ms 7.5"
    flags += " --data-parallel-size 3 --router-policy least-tokens"
    flags += " --max-upload-bytes 1000 --max-pixels 4096 --drain-seconds 1.5 --api-key k --api-key l --port 0"
    flags += " --log-level debug --rate-limit 30"
    flags += " --allowed-origin HTTP://a:3000 --allowed-origin https://b:443 --allowed-origin *"
    options = parse_options(flags.split())
    (model,), scheduler, image = options.models, options.config.engine.scheduler, options.config.image
    assert (model.model, model.name, model.dtype, model.device, model.threads) == ("m/n", "x", "bfloat16", "cuda", 3)
    assert (model.quantization, model.kernels, model.variant) == ("torchao-int8", "torch", "fp16")
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_stage_ms) == (2, 99, 7.5)
    assert (image.image_workers, image.max_upload_bytes, image.max_pixels) == (4, 1000, 4096)
    assert (options.config.max_queue, options.config.engine.workers_per_engine) == (5, 2)
    assert (options.config.engine.data_parallel_size, options.config.router_policy) == (3, "least-tokens")
    assert (options.config.engine.drain_seconds, options.rate_limit, options.port) == (1.5, 30, 0)
    assert (options.api_keys, options.allowed_origins) == (("k", "l"), ("http://a:3000", "https://b", "*"))
    assert "'k'" not in repr(options)


def test_a_pictures_bits_may_depend_on_its_company_unless_a_flag_says_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not parse_options([]).models[0].batch_invariant
    assert parse_options(["--batch-invariant"]).models[0].batch_invariant
    with pytest.raises(SystemExit):
        parse_options(["--batch-invariant", "--kernels", "torch"])
    assert "give --kernels auto" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_options(["--batch-invariant", "--quantization", "torchao-int8"])
    assert "give --quantization none" in capsys.readouterr().err


def test_cache_flags_set_their_options() -> None:
    flags = (
        "--no-mask-aware --cache-keyframes per-step --cache-dtype bf16 --cache-device-bytes 1G --cache-host-bytes 512M"
    )
    flags += (
        " --cache-disk-bytes 3k --cache-dir /pages --cache-admission manual --block-plan auto --template-bytes 1000"
        " --cache-scope server"
    )
    options = parse_options(flags.split())
    (model,), cache = options.models, options.config.engine.cache
    assert (model.mask_aware, model.cache_keyframes, model.cache_dtype) == (False, "per-step", "bfloat16")
    assert (cache.device_bytes, cache.host_bytes, cache.disk_bytes) == (1024**3, 512 * 1024**2, 3072)
    assert (cache.directory, cache.admission, cache.block_plan) == ("/pages", "manual", "auto")
    assert cache.scope == "server"
    assert options.config.template_bytes == 1000


@pytest.mark.parametrize(
    ("flag", "value", "kept"),
    [("keyframes", "2", "2"), ("keyframes", "64", "64"), ("dtype", "fp32", "float32"), ("dtype", "float32", "float32")],
)
def test_spellings_of_cache_flags(flag: str, value: str, kept: str) -> None:
    assert getattr(parse_options([f"--cache-{flag}", value]).models[0], f"cache_{flag}") == kept


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("STENCIL_API_KEY", "from-env")
    assert parse_options([]).api_keys == ("from-env",)
    assert parse_options(["--api-key", "flag"]).api_keys == ("flag",)
    with pytest.raises(SystemExit, match="0"):
        parse_options(["--help"])
    assert "from-env" not in capsys.readouterr().out


def test_as_many_engines_as_a_cluster_has_room_for() -> None:
    engine = parse_options(["--data-parallel-size", "auto", "--data-parallel-backend", "ray"]).config.engine
    assert (engine.follows_cluster, engine.most_engines, engine.num_local) == (True, 256, 0)
    assert engine.of_engine(255).data_parallel_rank == 255
    assert not EngineConfig().follows_cluster


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--data-parallel-size auto", "give --data-parallel-backend ray"),
        ("--data-parallel-size 0", "'0' is not a whole number from 1 to 256"),
        ("--data-parallel-size many", "'many' is not"),
        (
            "--data-parallel-size auto --data-parallel-backend ray --data-parallel-size-local 1",
            "leave --data-parallel-size-local out",
        ),
        ("--data-parallel-size 2 --data-parallel-size-local 1", "without --data-parallel-backend ray all 2 engines"),
        ("--data-parallel-size 2 --data-parallel-size-local 3", "is more than --data-parallel-size 2"),
        (
            "--data-parallel-size 2 --data-parallel-size-local 3 --data-parallel-backend ray",
            "is more than --data-parallel-size 2",
        ),
    ],
)
def test_numbers_of_engines_that_cannot_be(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(flags.split())
    assert said in capsys.readouterr().err


def test_engines_that_follow_a_cluster_are_all_alike() -> None:
    with pytest.raises(ConfigError, match="all engines have all models; leave `engines` out"):
        EngineConfig(data_parallel_size=0, data_parallel_backend="ray", engines={0: (ModelConfig().name,)})


def test_all_engines_may_be_local_with_mp() -> None:
    engine = parse_options(["--data-parallel-size", "2", "--data-parallel-size-local", "2"]).config.engine
    assert (engine.num_local, engine.num_workers) == (2, 2)


@pytest.mark.parametrize("name", ["STENCIL_API_KEY", "STENCIL_API_KEYS"])
@pytest.mark.parametrize("text", ["", " "])
def test_a_blank_variable_is_one_line(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--host", "0.0.0.0"])
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--ray-address", "nowhere", "Supported values are: auto or HOST:PORT."),
        ("--priming-prompt", "\udcff", "Invalid type for 'priming_prompt'"),  # as Python has bytes that are no UTF-8
        ("--cache-dir", "\udcff", "Invalid type for 'directory'"),
        ("--served-model-name", "\udcff", "Invalid type for 'served_model_name'"),
        ("--model", "\udcff", "Invalid type for 'model'"),
    ],
)
def test_a_value_that_its_setting_refuses_is_one_line_with_the_flag(
    flag: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options([flag, value])
    error = capsys.readouterr().err
    assert error.startswith(f"stencil: error: argument {flag}: ")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        "--port 70000",
        "--port x",
        "--dtype int8",
        "--quantization int8",
        "--kernels fast",
        "--device tpu",
        "--threads -1",
        "--max-num-seqs 0",
        "--drain-seconds nan",
        "--max-queue",
        "--cache-keyframes 1",
        "--cache-keyframes 65",
        "--cache-keyframes per-stepp",
        "--cache-dtype int4",
        "--cache-host-bytes -1",
        "--cache-host-bytes 1T",
        "--cache-disk-bytes 1.5G",
        "--cache-admission never",
        "--block-plan on",
        "--cache-scope key",
        "--log-format xml",
        "--rate-limit -1",
        "--allowed-origin a.example",
        "--allowed-origin https://a.example/path",
        "--allowed-origin https://*.example",
        "--allowed-origin https://a.example?x",
        "--api-key= --api-key k",
        "--api-key-file /nowhere/keys",
        "--otlp-traces-endpoint localhost:4317",
        "--lora hat=~nobody.here/hat.safetensors",
        f"--lora hat={'x' * 300}",
        "--nonsense",
        "--max-q 3",
        "stray",
    ],
)
def test_bad_flag_is_one_line(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(flags.split())
    error = capsys.readouterr().err
    assert error.startswith("stencil: error: ")
    assert error.count("\n") == 1


def test_each_of_several_workers_may_have_pages_in_device_memory() -> None:
    engine = parse_options(["--workers-per-engine", "2", "--cache-device-bytes", "1G"]).config.engine
    assert (engine.workers_per_engine, engine.cache.device_bytes) == (2, 1024**3)


def test_device_pages_take_the_rest_of_the_memory_share(capsys: pytest.CaptureFixture[str]) -> None:
    cache = parse_options([]).config.engine.cache
    assert (cache.device_bytes, cache.gpu_memory_utilization) == (None, 0.9)
    flags = ["--gpu-memory-utilization", "0.45", "--cache-device-bytes"]
    assert parse_options([*flags, "auto"]).config.engine.cache == CacheConfig(gpu_memory_utilization=0.45)
    assert parse_options([*flags, "0"]).config.engine.cache.device_bytes == 0
    for bad in ("0", "1.5", "90"):
        with pytest.raises(SystemExit, match="2"):
            parse_options(["--gpu-memory-utilization", bad])
        assert "--gpu-memory-utilization" in capsys.readouterr().err


def test_help_shows_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_options(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("(default: 8000)", "(default: 256)", "(default: 60.0)", "(default: auto)", "(default: 52428800)"):
        assert default in text


def test_check_model(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for bad in (tmp_path, tmp_path / "file", tmp_path / "missing", "./missing", "missing", "a/b/c"):
        with pytest.raises(ConfigError):
            check_model(str(bad))
    (tmp_path / "model_index.json").touch()
    check_model(str(tmp_path))
    check_model("black-forest-labs/FLUX.1-Fill-dev")


def test_lora_flags_add_adapters(tmp_path: Path) -> None:
    for name in ("a=b.safetensors", "hat.safetensors"):
        (tmp_path / name).touch()
    odd, hat = tmp_path / "a=b.safetensors", tmp_path / "hat.safetensors"
    options = parse_options(["--lora", f"v1.2:odd={odd}", "--lora", f"hat={hat}"])
    assert options.models[0].adapters == (AdapterConfig("v1.2:odd", str(odd)), AdapterConfig("hat", str(hat)))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("hat", "'hat' is not NAME=PATH"),
        ("hat=", "'hat=' is not NAME=PATH"),
        ("=hat", "'=hat' is not NAME=PATH"),
        ("a hat=x", "'a hat=x' is not NAME=PATH"),
        ("hat=/nowhere/hat.safetensors", "there is no file '/nowhere/hat.safetensors'"),
    ],
)
def test_invalid_lora_flags_are_refused(value: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--lora", value])
    assert why in capsys.readouterr().err


def test_an_adapter_has_a_name_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--served-model-name", "hat", "--lora", f"hat={tmp_path}"])
    assert "--lora hat: adapters need names of their own" in capsys.readouterr().err


def test_workflow_flags_register_what_their_files_have(tmp_path: Path) -> None:
    flags = []
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(SOUND.replace("NAME", name))
        flags += ["--workflow", str(tmp_path / f"{name}.py")]
    engine = with_workflows(parse_options(flags)).config.engine
    assert [workflow.name for workflow in engine.workflows] == ["one", "two"]
    assert [Path(each.file).name for each in engine.classes] == ["one.py", "two.py"]
    with pytest.raises(WorkflowError, match=r"none\.py: cannot be read"):
        with_workflows(parse_options(["--workflow", str(tmp_path / "none.py")]))
    (tmp_path / "one.py").write_text(
        SOUND.replace('workflow.add_input("x"', 'workflow.add_input("model"').replace("NAME", "one")
    )
    with pytest.raises(WorkflowError, match=r"workflow one, input .model.: requests name the workflow by this field"):
        with_workflows(parse_options(flags[:2]))


def test_admin_keys_are_read_from_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "admin.keys"
    file.write_text("# ours\nadmin-1\nadmin-2\n")
    file.chmod(0o600)
    options = parse_options(["--allow-runtime-workflows", "--admin-key-file", str(file)])
    assert (options.runtime_workflows, options.admin_keys, options.api_keys) == (True, ("admin-1", "admin-2"), ())
    assert "admin-2" not in repr(options)
    file.chmod(0o644)
    with pytest.raises(SystemExit):
        parse_options(["--admin-key-file", str(file)])
    assert "chmod 600" in capsys.readouterr().err


def test_a_scheduling_policy_is_checked_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    path = "benchmarks.baselines.clockwork:Clockwork"
    assert parse_options(["--scheduling-policy", path]).config.engine.scheduler.policy == path
    with pytest.raises(SystemExit):
        parse_options(["--scheduling-policy", "benchmarks.baselines.clockwork:Watch"])
    assert "has no attribute 'Watch'" in capsys.readouterr().err
