"""The language of workflows: models, composed in Python, as graphs that the engine runs (LegoDiffusion, section 4).

Files that compose workflows are imported in a process of their own, and in workers: nothing here imports more than it
needs.
"""

from __future__ import annotations

from core.graph.form import picture, tensor, text
from entrypoints.workflows.data_type import Image
from entrypoints.workflows.model import Model
from entrypoints.workflows.workflow import Workflow, choose, steps

__all__ = ["Image", "Model", "Workflow", "choose", "picture", "steps", "tensor", "text"]
