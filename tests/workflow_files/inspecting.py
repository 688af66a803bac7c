"""A workflow of a user with inputs of all kinds but tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoints.workflows import Image, Model, Workflow, picture, tensor, text

if TYPE_CHECKING:  # so that its import is fast
    import torch
    from torch import Tensor


class Inspect(Model):
    """Changes each value a little, so that a test sees where it came from."""

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_input("count", int)
        self.add_input("strength", float, required=False)
        self.add_input("flip", bool, required=False)
        self.add_input("words", text(16), required=False)
        self.add_input("style", picture(32, 48), required=False)
        for name, kind in (("count", int), ("strength", float), ("flip", bool), ("words", text(32))):
            self.add_output(name, kind)
        self.add_output("picture", Image)
        self.add_output("style", picture(32, 48))
        self.add_output("means", tensor("float32", 3))

    def load(self, device: str, dtype: torch.dtype) -> None:
        """It has no weights."""

    def execute(
        self,
        image: Tensor,
        count: int,
        strength: float = 0.5,
        flip: bool = False,
        words: str = "none",
        style: Tensor | None = None,
    ) -> dict[str, object]:
        if words == "fail":
            raise ValueError("/secret/path")
        return {
            "count": count + 1,
            "strength": strength * 2,
            "flip": not flip,
            "words": words + "!",
            "picture": image.flip(1) if flip else image,
            "style": image[:1, :1] if style is None else style,
            "means": image.float().mean((0, 1)),
        }


with Workflow(name="inspect") as inspect:
    values = {
        "image": inspect.add_input("image", Image),
        "count": inspect.add_input("count", int),
        "strength": inspect.add_input("strength", float, required=False),
        "flip": inspect.add_input("flip", bool, required=False),
        "words": inspect.add_input("words", text(16), required=False),
        "style": inspect.add_input("style", picture(32, 48), required=False),
    }
    made = Inspect()(**values)
    for name in ("style", "picture", "count", "strength", "flip", "words", "means"):
        inspect.add_output(getattr(made, name), name=name)
