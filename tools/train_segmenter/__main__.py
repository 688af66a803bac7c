"""Train the segmenter beside the embedded model; can be resumed."""

import argparse
from pathlib import Path

import torch

STAGES = ("train", "export", "evaluate")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_segmenter", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"any of {', '.join(STAGES)}; default: all in order")
    parser.add_argument("--work", type=Path, default=Path(".train/segmenter"), help="training state and tokenizer")
    parser.add_argument("--out", type=Path, default=Path("model_executor/embedded_segmenter"), help="the checkpoint")
    parser.add_argument("--minutes", type=float, default=65.0, help="CPU time of training, earlier runs included")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sheet", type=Path, default=Path("docs/segmenter_sheet.png"))
    parser.add_argument("--tuning", action="store_true", help="evaluate on the tuning scenes, write no files")
    options = parser.parse_args()
    unknown = [stage for stage in options.stages if stage not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]!r}; choose from {', '.join(STAGES)}")
    return options


def run(stage: str, options: argparse.Namespace) -> None:
    """Each stage's modules are imported only when it runs."""
    match stage:
        case "train":
            from tools.train_segmenter.trainer import Recipe, Trainer

            Trainer(Recipe(), options.work, options.minutes * 60).train()
        case "export":
            from tools.train_segmenter.export import export

            export(options.work, options.out)
        case "evaluate":
            from tools.train_segmenter.evaluate import evaluate, summary, write
            from tools.train_segmenter.segmenter import Segmenter
            from tools.train_segmenter.sheet import write_sheet

            segmenter = Segmenter(options.out)
            scores = evaluate(segmenter, final=not options.tuning)
            print(summary(scores), flush=True)
            if not options.tuning:
                write(scores, options.out / "evaluation.json")
                write_sheet(segmenter, options.sheet)
        case _:
            raise ValueError(stage)


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    for stage in options.stages or STAGES:
        run(stage, options)


if __name__ == "__main__":
    main()
