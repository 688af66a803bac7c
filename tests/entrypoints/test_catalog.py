"""Several models on the command line and in a catalog: what is read, and what is refused with its entry and key."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from core.config import (
    EMBEDDED_MODEL,
    EMBEDDED_NAME,
    EMBEDDED_SEGMENTER,
    REFINER_ROLES,
    AdapterConfig,
    ControlNetConfig,
    EngineConfig,
    ModelConfig,
    RequestDefaults,
)
from core.control_type import ControlType
from core.errors import ConfigError
from core.sampler_defaults import SamplerDefaults
from entrypoints.catalog import read_catalog
from entrypoints.serve_args import parse_options

COMMON = ModelConfig(dtype="bfloat16", device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a checkpoint `fill`, as far as the command line looks, and an adapter."""
    (tmp_path / "fill").mkdir()
    (tmp_path / "fill" / "model_index.json").touch()
    (tmp_path / "hat.safetensors").touch()
    return tmp_path


def catalog(folder: Path, text: str) -> Path:
    file = folder / "models.toml"
    file.write_text(text)
    return file


def refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="2"):
        parse_options(flags)
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_models_have_the_settings_of_their_entries_and_else_the_flags(folder: Path) -> None:
    file = catalog(
        folder,
        """
        [[model]]
        name = "person"
        path = "fill"
        dtype = "float32"
        cache_keyframes = "per-step"
        mask_aware = false
        [model.loras]
        hat = "hat.safetensors"

        [[model]]
        path = "black-forest-labs/FLUX.1-dev"
        quantization = "torchao-int8"

        [[model]]
        """,
    )
    person, dev, embedded = read_catalog(file, COMMON).models
    assert (person.name, person.model, person.dtype) == ("person", str(folder / "fill"), "float32")
    assert (person.cache_keyframes, person.mask_aware, person.device) == ("per-step", False, "cpu")
    assert person.adapters == (AdapterConfig("hat", str(folder / "hat.safetensors")),)
    assert (dev.name, dev.dtype, dev.quantization, dev.adapters) == (dev.model, "bfloat16", "torchao-int8", ())
    assert (embedded.name, embedded.model) == (EMBEDDED_NAME, EMBEDDED_MODEL)
    assert parse_options(["--catalog", str(file), "--dtype", "bfloat16", "--device", "cpu"]).models == (
        person,
        dev,
        embedded,
    )


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("dtyp = 'float32'", "model 2: dtyp: is not known; there are name, path, loras, variant, segmenter, dtype"),
        ("dtype = 'int4'", "model 2: dtype: Invalid value: 'int4'. Supported values are: 'auto'"),
        ("mask_aware = 'no'", "model 2: mask_aware: Invalid type for 'mask_aware'"),
        ("name = 3", "model 2: name: is text, not int"),
        ("path = 'nowhere'", "model 2: path: there is no directory"),
        ("path = 'hat.safetensors'", "model 2: path: '{folder}/hat.safetensors' is a file"),
        ("loras = ['hat.safetensors']", "model 2: loras: is a table"),
        ("loras = { hat = 'gone' }", "model 2: loras: there is no file '{folder}/gone' for hat"),
        ("name = 'a'\nloras = { a = 'hat.safetensors' }", "model 2: --lora a: adapters need names of their own"),
        (
            "batch_invariant = true\nkernels = 'torch'",
            "model 2: --batch-invariant cannot hold with --kernels torch",
        ),
        ("segmenter = '~nobody.here/clipseg'", "model 2: segmenter: ~nobody.here/clipseg: there is no such home"),
        ("segmenter = '" + "x" * 300 + "'", "model 2: segmenter: File name too long"),
        ("loras = { a = { file = 'b' } }", "model 2: loras: a: file is not known; there are path, defaults"),
        ("loras = { a = { defaults = {} } }", "model 2: loras: a: a table has its path"),
        ("loras = { a = { path = 'gone' } }", "model 2: loras: there is no file '{folder}/gone' for a"),
        (
            "loras = { a = { path = 'hat.safetensors', defaults = { steps = 4 } } }",
            "model 2: loras: a: defaults: steps is not known; there are num_inference_steps, guidance_scale",
        ),
        (
            "loras = { a = { path = 'hat.safetensors', defaults = { shift = 0 } } }",
            "model 2: loras: a: defaults: Invalid 'shift': decimal below minimum value",
        ),
        ("path = '~nobody.here/fill'", "model 2: path: ~nobody.here/fill: there is no such home directory"),
        ("loras = { hat = '~nobody.here/hat' }", "model 2: loras: hat: ~nobody.here/hat: there is no such home"),
        ("loras = { hat = '" + "x" * 300 + "' }", "model 2: loras: hat: File name too long"),
        ("path = '" + "x" * 300 + "'", "model 2: path: cannot read"),
        ("controlnets = 'edges'", "model 2: controlnets: is a list of names"),
        ("controlnets = ['edges']", "model 2: controlnets: there is no edges in [controlnets]; there are none"),
        ("device = 'cpu'", "model 2: device: all models share it; give --device"),
    ],
)
def test_a_bad_entry_is_named_with_its_key(folder: Path, entry: str, said: str) -> None:
    file = catalog(folder, f"[[model]]\n[[model]]\n{entry}\n")
    with pytest.raises(ConfigError) as caught:
        read_catalog(file, COMMON)
    assert str(caught.value).startswith(f"{file}, {said.format(folder=folder)}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lists no model: each is a table that begins with [[model]]"),
        ("model = 'fill'", "lists no model"),
        ("[[models]]", "models is not known; models are tables that begin with [[model]]"),
        ("[[model]\n", "is no TOML: "),
        (f"x = {'[' * 5000}", "nested too deeply"),
    ],
)
def test_a_file_that_lists_no_models_is_refused(folder: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"models\.toml.*") as caught:
        read_catalog(catalog(folder, text), COMMON)
    assert said in str(caught.value)


def test_models_share_the_controlnets_that_they_name(folder: Path) -> None:
    text = """
        [controlnets]
        edges = "fill"
        union = { path = "fill", types = { canny = 0, depth = 2 } }
        [[model]]
        controlnets = ["union", "edges"]
        [[model]]
        path = "fill"
        controlnets = ["edges"]
        """
    first, second = read_catalog(catalog(folder, text), COMMON).models
    edges = ControlNetConfig("edges", str(folder / "fill"))
    assert first.controlnets == (ControlNetConfig("union", str(folder / "fill"), {"canny": 0, "depth": 2}), edges)
    assert second.controlnets == (edges,)
    types = {"canny": ControlType("union", 0), "depth": ControlType("union", 2), "edges": ControlType("edges")}
    assert first.controls == types


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("edges = 3", "controlnets: edges: its path is the text of a directory or a hub id"),
        ("edges = 'nowhere'", "controlnets: edges: there is no directory"),
        ("edges = { path = 'fill', modes = {} }", "controlnets: edges: modes is not known; there are path, types"),
        ("edges = { path = 'fill', types = { a = -1 } }", "controlnets: edges: Invalid 'types': integer below minimum"),
        ("edges = { path = 'fill', types = ['a'] }", "controlnets: edges: Invalid type for 'types'"),
        (
            "a = 'fill'\nb = { path = 'fill', types = { a = 1 } }",
            "model 1: controlnets: Invalid 'controlnets': two have",
        ),
    ],
)
def test_a_bad_controlnet_is_named(folder: Path, line: str, said: str) -> None:
    text = f"[controlnets]\n{line}\n[[model]]\ncontrolnets = ['a', 'b']\n"
    with pytest.raises(ConfigError) as caught:
        read_catalog(catalog(folder, text), COMMON)
    assert said in str(caught.value)


def test_a_catalog_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    (folder / "models.toml").write_text("[[model]]\nname = 'one'\n", encoding="utf-8-sig")
    assert [model.name for model in read_catalog(folder / "models.toml", COMMON).models] == ["one"]


def test_a_catalog_that_cannot_be_read_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(["--catalog", str(folder / "gone.toml")], capsys)
    assert f"cannot read the catalog {folder}/gone.toml: No such file or directory" in line
    (folder / "models.toml").write_bytes(b"\xff")
    assert "is no TOML" in refused(["--catalog", str(folder / "models.toml")], capsys)


def test_models_of_the_command_line_may_have_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = str(folder / "fill")
    named, plain, embedded = parse_options(
        ["--model", f"team/person={fill}", "--model", fill, "--model", "stencil-embedded", "--dtype", "bfloat16"]
    ).models
    assert (named.name, named.model, named.dtype) == ("team/person", fill, "bfloat16")
    assert (plain.name, plain.model, plain.dtype) == (fill, fill, "bfloat16")
    assert (embedded.name, embedded.model) == (EMBEDDED_NAME, EMBEDDED_MODEL)
    monkeypatch.chdir(folder)
    (folder / "a=b").mkdir()
    assert parse_options(["--model", "a=b"]).models[0].model == "a=b", "a directory is meant as before"
    assert parse_options([]).models[0].model == EMBEDDED_MODEL
    too_long = "x" * 300  # for a file's name: the start names it, as any other that is not there
    assert parse_options(["--model", f"a={too_long}"]).models[0].model == too_long


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model a/b --model a/b", "two models or adapters are called a/b; give each a name of its own"),
        ("--model x=a/b --model x=c/d", "two models or adapters are called x"),
        ("--model a/b --model c/d --served-model-name x", "--served-model-name is the name of one model"),
        ("--model x=a/b --served-model-name y", "both name the model"),
        ("--model a/b --model c/d --lora hat={folder}/hat.safetensors", "--lora is an adapter of one model"),
        ("--catalog {folder}/m.toml --model a/b", "--catalog lists the models; leave --model out"),
        ("--catalog {folder}/m.toml --lora hat={folder}/hat.safetensors", "--lora is an adapter of one model"),
    ],
)
def test_flags_that_fit_one_model_only_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    (folder / "m.toml").write_text("[[model]]\n")
    assert said in refused(flags.format(folder=folder).split(), capsys)


@pytest.mark.parametrize(("field", "values"), [("device", ("cpu", "auto")), ("threads", (1, 2))])
def test_an_engines_models_share_device_and_threads(field: str, values: tuple[object, object]) -> None:
    models = tuple(ModelConfig(model=f"a/{value}", **{field: value}) for value in values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"the same {field}; give it once, as --{field}"):
        EngineConfig(models=models)
    with pytest.raises(ConfigError, match="at least one model"):
        EngineConfig(models=())


# ------------------------------------------------------------------------------------------- models for each other


def test_an_entry_says_who_works_for_a_model_and_what_requests_leave_open(folder: Path) -> None:
    file = catalog(
        folder,
        """
        [[model]]
        name = "base"
        path = "fill"
        workflow = "refined"
        refiner = "polish"
        defaults = { num_inference_steps = 40, guidance_scale = 5, refiner_start = 0.7 }

        [[model]]
        name = "polish"
        path = "fill"
        loras = { fast = { path = "hat.safetensors", defaults = { shift = 3, sigmas = [1, 0.5] } } }

        [[model]]
        name = "other"
        path = "fill"
        roles = { refiner = "polish", refiner_vae = "polish" }
        """,
    )
    base, polish, other = parse_options(["--catalog", str(file)]).models
    assert (base.workflow, base.players) == ("refined", dict.fromkeys(REFINER_ROLES, "polish"))
    assert base.defaults == RequestDefaults(num_inference_steps=40, guidance_scale=5.0, refiner_start=0.7)
    assert (polish.players, polish.defaults) == ({}, RequestDefaults())
    (fast,) = polish.adapters
    assert fast.defaults == SamplerDefaults(num_inference_steps=2, shift=3.0, sigmas=(1.0, 0.5))
    assert other.players == {"refiner": "polish", "refiner_vae": "polish"}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("refiner = 3", "refiner: Invalid type for 'refiner'"),
        ("workflow = 3", "workflow: Invalid type for 'workflow'"),
        ("roles = 'polish'", "roles: Invalid type for 'roles'"),
        ("roles = { refiner = 3 }", "roles: Invalid type for 'roles'"),
        ("refiner = 'a'\nroles = { refiner_vae = 'b' }", "roles: Invalid 'roles': refiner_vae is the refiner's"),
        ("defaults = 3", "defaults: is a table; there are num_inference_steps"),
        ("defaults = { steps = 3 }", "defaults: steps is not known; there are num_inference_steps, guidance_scale"),
        ("defaults = { num_inference_steps = 0 }", "num_inference_steps: Invalid 'num_inference_steps'"),
        ("defaults = { refiner_start = 1 }", "refiner_start: Invalid 'refiner_start'"),
    ],
)
def test_bad_values_of_these_keys_are_named(folder: Path, entry: str, said: str) -> None:
    file = catalog(folder, f"[[model]]\n[[model]]\nname = 'b'\n{entry}\n")
    with pytest.raises(ConfigError) as caught:
        read_catalog(file, COMMON)
    assert str(caught.value).startswith(f"{file}, model 2: {said}")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("refiner = 'gone'", "base: refiner: there is no model gone; there are polish"),
        ("refiner = 'base'", "base: refiner: base is this model itself; name another one, or leave it out"),
        ("refiner = 'hat'", "base: refiner: hat is an adapter; name a model"),
        ("roles = { vae = 'gone' }", "base: roles.vae: there is no model gone"),
        ("refiner = 'polish'", "base: refiner: models play roles for each other in a circle: base -> polish -> base"),
    ],
)
def test_players_that_cannot_be_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], entry: str, said: str
) -> None:
    back = "refiner = 'base'" if "circle" in said else "loras = { hat = 'hat.safetensors' }"
    text = f"[[model]]\nname = 'base'\npath = 'fill'\n{entry}\n[[model]]\nname = 'polish'\npath = 'fill'\n{back}\n"
    line = refused(["--catalog", str(catalog(folder, text))], capsys)
    assert said in line


def test_a_segmenter_is_of_one_model_or_of_all(folder: Path) -> None:
    (folder / "sam").mkdir()
    file = catalog(
        folder,
        """
        [[model]]
        name = "own"
        path = "fill"
        segmenter = ["sam", "IDEA-Research/grounding-dino-tiny"]
        [[model]]
        name = "all"
        path = "fill"
        [[model]]
        name = "without"
        segmenter = "none"
        [[model]]
        """,
    )
    common = msgspec.structs.replace(COMMON, segmenter=("some/clipseg",))
    own, every, without, embedded = read_catalog(file, common).models
    assert own.segmenter_checkpoints == (str(folder / "sam"), "IDEA-Research/grounding-dino-tiny")
    assert every.segmenter_checkpoints == embedded.segmenter_checkpoints == ("some/clipseg",)
    assert without.segmenter_checkpoints == ()
    with pytest.raises(ConfigError, match="model 1: segmenter: is text, not int"):
        read_catalog(catalog(folder, "[[model]]\nsegmenter = 3"), COMMON)


def test_the_embedded_model_has_a_segmenter_of_its_own() -> None:
    def of(*flags: str) -> tuple[str, ...]:
        (model,) = parse_options([*flags]).config.engine.models
        return model.segmenter_checkpoints

    assert of() == of("--segmenter", "stencil-embedded-segmenter") == (EMBEDDED_SEGMENTER,)
    assert of("--segmenter", "none") == of("--model", "some/model") == ()
    assert of("--segmenter", "a/b", "--segmenter", "c") == ("a/b", "c")


def test_no_segmenter_beside_one_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for values in (("none", "a/b"), ("a/b", "none")):
        flags = [word for value in values for word in ("--segmenter", value)]
        assert "argument --segmenter: Invalid 'segmenter': none is given beside others" in refused(flags, capsys)
    with pytest.raises(ConfigError, match=r"model 1: segmenter: .*none is given beside others"):
        read_catalog(catalog(folder, "[[model]]\nsegmenter = ['none', 'a/b']"), COMMON)


THREE = "[[model]]\nname = 'base'\npath = 'fill'\nrefiner = 'polish'\n" + "".join(
    f"[[model]]\nname = '{name}'\npath = 'fill'\n" for name in ("polish", "other")
)


def sets_of(folder: Path, engines: str, number: int) -> list[list[str]]:
    """Names of each engine's models."""
    file = catalog(folder, f"{THREE}[engines]\n{engines}\n")
    config = parse_options(["--catalog", str(file), "--data-parallel-size", str(number)]).config.engine
    return [[model.name for model in config.of_engine(rank).models] for rank in range(number)]


def test_engines_have_the_models_listed_for_them_and_what_these_need(folder: Path) -> None:
    everything = ["base", "polish", "other"]
    assert sets_of(folder, "", 2) == [everything] * 2
    assert sets_of(folder, "1 = ['other']", 2) == [everything, ["other"]]
    assert sets_of(folder, "0 = ['base']\n01 = ['other', 'other']", 2) == [["base", "polish"], ["other"]]
    assert sets_of(folder, "2 = ['other', 'polish']", 3) == [everything] * 2 + [["polish", "other"]]
    file = catalog(folder, f"engines = {{}}\n{THREE}")
    assert read_catalog(file, COMMON).engines == {}


def test_an_engine_is_configured_as_if_it_had_these_alone(folder: Path) -> None:
    file = catalog(folder, f"{THREE}[engines]\n1 = ['other']\n")
    whole = parse_options(["--catalog", str(file), "--data-parallel-size", "2"]).config.engine
    own = whole.of_engine(1)
    assert (own.data_parallel_rank, own.engines, own.num_workers) == (1, {}, 2)
    assert own.models == whole.models[2:]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=EngineConfig) == whole


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ("engines = 3", "{file}: engines: is a table: [engines], and a line 0 = "),
        ("engines.first = ['base']", "{file}: engines: first: is no engine's number; they are numbered from 0"),
        ("engines.-1 = ['base']", "{file}: engines: -1: is no engine's number"),
        (f"engines.{'1' * 5000} = ['base']", "is no engine's number"),
        ("engines.0 = 'base'", "{file}: engines: 0: is a list of models' names"),
        ("engines.0 = [1]", "{file}: engines: 0: is a list of models' names"),
        ("engines.0 = ['base']\nengines.00 = ['base']", "{file}: engines: 00: engine 0 is listed twice"),
        ("engines.2 = ['base']", "engines: 2: there are 2 engines, numbered from 0; give --data-parallel-size 3 or"),
        ("engines.0 = []", "engines: 0: it has no model; name one, or leave the engine out: it has all"),
        ("engines.0 = ['gone']", "engines: 0: there is no model gone; there are base, polish, other"),
        ("engines.0 = ['base']\nengines.1 = ['base']", "engines: no engine has the model other; add it to one of them"),
    ],
)
def test_engines_that_cannot_be_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], engines: str, said: str
) -> None:
    file = catalog(folder, f"{engines}\n{THREE}")
    assert said.format(file=file) in refused(["--catalog", str(file), "--data-parallel-size", "2"], capsys)
