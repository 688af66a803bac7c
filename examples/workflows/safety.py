"""A model of one's own that looks at a picture, and blacks it out if it is too red.

Served by ``--workflow examples/workflows/safety.py``; or, with ``--allow-runtime-workflows --admin-key-file FILE``,
while the server runs:

    curl localhost:8000/v1/workflows -H "authorization: Bearer $ADMIN_KEY" --data-binary @examples/workflows/safety.py
    curl localhost:8000/v1/workflows/safety -H "authorization: Bearer $ADMIN_KEY" -X DELETE

The answer comes when every worker has imported it, and its classes are loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from entrypoints.workflows import Image, Model, Workflow


class Safety(Model):
    """Stands for a classifier: `load` would read its weights."""

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_input("most_red", float, required=False)
        self.add_output("picture", Image)
        self.add_output("is_safe", bool)

    def load(self, device: str, dtype: torch.dtype) -> None:
        self.red = torch.tensor([1.0, -0.5, -0.5], dtype=dtype, device=device)

    def execute(self, image: Tensor, most_red: float = 100.0) -> dict[str, object]:
        redness = float((image.to(self.red.dtype) @ self.red).mean())
        is_safe = redness <= most_red
        return {"picture": image if is_safe else torch.zeros_like(image), "is_safe": is_safe}


workflow = Workflow(name="safety")
checked = Safety()(workflow.add_input("image", Image), most_red=80.0)
workflow.add_output(checked.picture, name="picture")
workflow.add_output(checked.is_safe, name="is_safe")
