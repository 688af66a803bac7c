"""Parses the Dockerfile, compose.yaml and the files that they mount, for tests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE, GPU_DOCKERFILE = ROOT / "Dockerfile", ROOT / "Dockerfile.gpu"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile: its name, flags, remaining text, and the number of its stage, from 0."""

    name: str
    flags: dict[str, str]
    arguments: str
    stage: int

    @property
    def words(self) -> list[str]:
        """The arguments of an exec form, or of COPY, EXPOSE and the like."""
        return json.loads(self.arguments) if self.arguments.startswith("[") else self.arguments.split()


def read_dockerfile(file: Path = DOCKERFILE) -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    found: list[Instruction] = []
    stage = -1
    for line in filter(None, lines):
        name, rest = line.split(maxsplit=1)
        stage += name == "FROM"
        flags = {}
        while match := re.match(r"--([\w-]+)=(\S+)\s+", rest):
            flags[match[1]] = match[2]
            rest = rest[match.end() :]
        found.append(Instruction(name, flags, rest, stage))
    return found


def find(name: str, file: Path = DOCKERFILE) -> list[Instruction]:
    return [instruction for instruction in read_dockerfile(file) if instruction.name == name]


def image_environment() -> dict[str, str]:
    """The ENV variables of the image's last stage, without inherited ones."""
    instructions = read_dockerfile()
    own = [each for each in instructions if each.name == "ENV" and each.stage == instructions[-1].stage]
    return dict(word.split("=", 1) for each in own for word in each.words)


def health_command() -> list[str]:
    (instruction,) = find("HEALTHCHECK")
    name, command = instruction.arguments.split(maxsplit=1)
    assert name == "CMD"
    return json.loads(command)


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def services() -> dict[str, Any]:
    return read_yaml("compose.yaml")["services"]


def mounts(service: str) -> dict[str, str]:
    """Path in the container -> file of the repository, relative to its root."""
    binds = [mount for mount in services()[service]["volumes"] if isinstance(mount, dict) and mount["type"] == "bind"]
    return {mount["target"]: mount["source"] for mount in binds}
