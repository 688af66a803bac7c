"""What a Python caller gives to nodes of users' classes, by name, as an engine takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from core.errors import InvalidRequestError
from core.graph.port_checks import port_of
from core.graph.workflow import Workflow
from engine.client.input_files import InputFiles
from engine.client.run_values import RunValue
from engine.client.upload import BytesUpload, Upload
from entrypoints.openai.fields.own_fields import OwnFields
from entrypoints.pictures import ImageLike, encode_picture

ClassInput = RunValue | ImageLike
"""A value of a workflow's input: as RunValue has it, and of a picture any ImageLike."""


def class_inputs(workflow: Workflow, given: Mapping[str, ClassInput]) -> tuple[dict[str, RunValue], InputFiles]:
    """(values, pictures that have still to be decoded) of what a caller gives. Reads files. Raises InvalidRequestError
    that names the input and says what it takes; whether values are as declared is checked when they run.
    """
    ports = OwnFields.of(workflow).ports
    values, pictures = dict[str, RunValue](), dict[str, Upload]()
    for name, value in given.items():
        port = port_of(ports, name)
        if port is None:
            known = f"it takes {', '.join(each.name for each in ports)}" if ports else "it takes none; leave it out"
            message = f"Invalid '{name}': workflow '{workflow.name}' has no such input; {known}."
            raise InvalidRequestError(message, param=str(name))
        if port.type == "picture" and not _is_pixels(value):
            pictures[name] = BytesUpload(encode_picture(cast(ImageLike, value), name))
        else:
            values[name] = cast(RunValue, value)
    if lacking := next((port for port in ports if not port.is_optional and port.name not in given), None):
        raise InvalidRequestError(
            f"Missing input '{lacking.name}' of workflow '{workflow.name}'; give one: {lacking.form}.",
            param=lacking.name,
            code="missing_required_parameter",
        )
    return values, InputFiles(pictures=pictures)


def _is_pixels(value: object) -> bool:
    """Whether it is an array that needs no decoding."""
    return isinstance(value, np.ndarray) and value.ndim == 3 and value.shape[2] == 3 and value.dtype == np.uint8
