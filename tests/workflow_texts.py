"""Texts of files with workflows."""

from __future__ import annotations

SOUND = """
from entrypoints.workflows import Model, Workflow

class Twice(Model):
    def setup_io(self):
        self.add_input("x", int)
        self.add_output("y", int)

    def load(self, device, dtype):
        pass

    def execute(self, x):
        return {"y": 2 * x}

with Workflow(name="NAME") as workflow:
    workflow.add_output(Twice()(workflow.add_input("x", int)), name="y")
"""
"""Of a workflow called NAME: twice an integer x."""
