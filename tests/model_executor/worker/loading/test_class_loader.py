"""Classes of users as a worker imports, loads and measures them."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod

import pytest
import torch
from torch import nn
from user_classes import Panic

from core.errors import ConfigError, InvalidRequestError
from core.failure import Failure
from core.messages.worker import WorkerFailed
from core.run_class import MAX_SOURCE, RunClass
from model_executor.worker.loading.class_loader import ClassLoader
from model_executor.worker.stores.time_limits import TimeLimits
from model_executor.worker.stores.user_classes import UserClasses

CPU = torch.device("cpu")


def loader_of(name: str, dtype: str = "float32") -> tuple[ClassLoader, UserClasses, RunClass]:
    config = RunClass(name="blur", path=name if ":" in name else f"{__name__}:{name}", dtype=dtype)
    classes = UserClasses([config])
    return ClassLoader(classes, CPU, TimeLimits(0, lambda failed: None)), classes, config


class Abstract(ABC):
    @abstractmethod
    def load(self) -> None: ...


class Lazy:
    def load(self, device: str, dtype: torch.dtype) -> None: ...


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:Blur", "ModuleNotFoundError.*PYTHONPATH"),
        ("run_workflows:Blur", "no attribute 'Blur'"),
        ("run_workflows:mixer", "is no class that can be made"),
        (f"{__name__}:Abstract", "is no class that can be made"),
        (f"{__name__}:Lazy", "has no method execute; define it"),
        ("core.graph.form:Form", "has no method load; define it"),
    ],
)
def test_what_is_no_class_of_a_user_is_refused_with_field_and_remedy(path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^classes: blur: path {path}.*{reason}"):
        loader_of(path)


TEXT = """
class Blur:
    def __init__(self, radius=1):
        self.radius = radius

    def load(self, device, dtype):
        return self.radius

    def execute(self) -> "dict":
        return {"file": __file__, "module": __name__}
"""


def test_a_text_is_run_whatever_becomes_of_its_file() -> None:
    """Once, for all of its classes; each is made with its settings."""
    common = {"path": "blur_0123:Blur", "source": TEXT, "file": "/no/such/blur.py"}
    configs = [RunClass(name=f"blur{radius}", settings={"radius": radius}, **common) for radius in (3, 5)]  # type: ignore[arg-type]
    classes = UserClasses(configs)
    loader = ClassLoader(classes, CPU, TimeLimits(0, lambda failed: None))
    assert [loader.load(each.key).nbytes for each in configs] == [3, 5]
    one, other = (classes.of(each.name) for each in configs)
    assert type(one) is type(other)
    assert one.execute() == {"file": "/no/such/blur.py", "module": "blur_0123"}
    assert type(one).execute.__annotations__ == {"return": "dict"}


def test_a_text_that_fails_is_run_again_and_named() -> None:
    config = RunClass(name="blur", path="blur_4567:Blur", source="raise ValueError('it will not')")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"classes: blur: path blur_4567:Blur: ValueError: it will not$"):
            ClassLoader(UserClasses([config]), CPU, TimeLimits(0, lambda failed: None))


class Tells:
    def load(self, device: str, dtype: torch.dtype) -> int:
        self.weight = torch.ones(100)
        return 1000


class Keeps:
    def load(self, device: str, dtype: torch.dtype) -> None:
        self.weight = torch.ones(100, dtype=dtype, device=device)
        self.layer = self.again = nn.Linear(4, 4, bias=False)


class Consists(nn.Module):
    def load(self, device: str, dtype: torch.dtype) -> None:
        self.layer = nn.Linear(4, 4, bias=False)

    def execute(self) -> dict[str, object]:
        return {}


class Slotted:
    __slots__ = ()

    def load(self, device: str, dtype: torch.dtype) -> None: ...


for each in (Tells, Keeps, Slotted):
    each.execute = Consists.execute  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "dtype", "nbytes"),
    [
        ("Tells", "float32", 1000),
        ("Keeps", "float32", 400 + 64),
        ("Keeps", "bfloat16", 200 + 64),
        ("Consists", "float32", 64),
        ("Slotted", "float32", 0),
    ],
)
def test_its_bytes_are_what_it_tells_or_what_it_keeps(name: str, dtype: str, nbytes: int) -> None:
    loader, classes, config = loader_of(name, dtype)
    loaded = loader.load(config.key)
    assert loaded.nbytes == nbytes
    assert classes.find(config.key) == loaded
    assert type(classes.of("blur")).__name__ == name
    assert loader.load(config.key) is loaded, "it is loaded once"
    loader.unload(config.key)
    assert classes.find(config.key) is None


class Leaves:
    def load(self, device: str, dtype: torch.dtype) -> None:
        raise SystemExit(2)

    def execute(self) -> dict[str, object]:
        return {}


class Panics(Leaves):
    def load(self, device: str, dtype: torch.dtype) -> None:
        raise Panic("unwrap on None")


class Untold(Exception):
    def __str__(self) -> str:
        raise ValueError


class Mute(Leaves):
    def load(self, device: str, dtype: torch.dtype) -> None:
        raise Untold


class Refers(Leaves):
    def load(self, device: str, dtype: torch.dtype) -> None:
        self.gone = weakref.proxy(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Leaves", "SystemExit: 2"),
        ("Panics", "Panic: unwrap on None"),
        ("Mute", "Untold"),
        ("Refers", "ReferenceError: weakly-referenced object"),
    ],
)
def test_a_load_that_fails_names_the_class_whatever_it_raises(name: str, cause: str) -> None:
    loader, _, config = loader_of(name)
    with pytest.raises(ConfigError, match=rf"^blur \(.*:{name}\): {cause}"):
        loader.load(config.key)


class Sleeps(Leaves):
    def load(self, device: str, dtype: torch.dtype) -> None:
        time.sleep(0.3)


def test_a_load_beyond_its_time_limit_is_reported_with_its_component() -> None:
    config = RunClass(name="blur", path=f"{__name__}:Sleeps", load_seconds=0.05)
    said: list[WorkerFailed] = []
    ClassLoader(UserClasses([config]), CPU, TimeLimits(3, said.append)).load(config.key)
    cause = f"blur ({config.path}): loading took longer than its 0.05 s"
    assert said == [WorkerFailed(3, Failure("config", cause), config.key)]
    in_time = RunClass(name="blur", path=f"{__name__}:Keeps")
    ClassLoader(UserClasses([in_time]), CPU, TimeLimits(3, said.append)).load(in_time.key)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"name": "", "path": "a:B"}, "name"),
        ({"name": "blur", "path": "a.B"}, "path"),
        ({"name": "blur", "path": "a:B", "seconds": 0.0}, "seconds"),
        ({"name": "blur", "path": "a:B", "load_seconds": 3601.0}, "load_seconds"),
        ({"name": "blur", "path": "a:B", "nbytes": -1}, "nbytes"),
        ({"name": "blur", "path": "a:B", "dtype": "int8"}, "dtype"),
        ({"name": "blur", "path": "a:B", "source": "#" * (MAX_SOURCE + 1)}, "source"),
        ({"name": "blur", "path": "a:B", "settings": {"radius": [1]}}, "settings"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RunClass(**settings)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_classes_of_one_path_dtype_and_settings_are_one_component() -> None:
    one, other = (RunClass(name=name, path="a:B") for name in ("one", "other"))
    assert one.key == other.key != RunClass(name="one", path="a:B", dtype="bfloat16").key
    several = [
        RunClass(name="one", path="a:B", settings=each) for each in ({"x": 1, "y": 2}, {"y": 2, "x": 1}, {"x": 2})
    ]
    assert several[0].key == several[1].key
    assert len({each.key for each in (one, *several)}) == 3
