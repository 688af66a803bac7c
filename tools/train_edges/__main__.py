"""Train the embedded model's edge ControlNet; can be resumed."""

import argparse
from pathlib import Path

import torch

STAGES = ("train", "export", "evaluate")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_edges", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"any of {', '.join(STAGES)}; default: all in order")
    parser.add_argument("--work", type=Path, default=Path(".train/edges"), help="training state and examples")
    parser.add_argument("--out", type=Path, default=Path("model_executor/embedded_edges"), help="the checkpoint")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time, earlier runs included")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sheet", type=Path, default=Path("docs/edges_sheet.png"))
    parser.add_argument("--cases", type=int, default=60, help="held-out edits to evaluate on")
    parser.add_argument("--tuning", action="store_true", help="evaluate on the tuning scenes, write no JSON")
    options = parser.parse_args()
    unknown = [stage for stage in options.stages if stage not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]!r}; choose from {', '.join(STAGES)}")
    return options


def run(stage: str, options: argparse.Namespace) -> None:
    """Each stage's modules are imported only when it runs."""
    match stage:
        case "train":
            from tools.train_edges.trainer import Recipe, Trainer

            Trainer(Recipe(), options.work, options.minutes * 60).train()
        case "export":
            from tools.train_edges.export import export

            export(options.work, options.out)
        case "evaluate":
            from tools.train_edges.evaluate import evaluate

            evaluate(options.out, options.sheet, final=not options.tuning, number=options.cases)
        case _:
            raise ValueError(stage)


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    for stage in options.stages or STAGES:
        run(stage, options)


if __name__ == "__main__":
    main()
