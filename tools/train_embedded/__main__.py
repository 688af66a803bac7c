"""Train the embedded model: `python -m tools.train_embedded` runs the stages of the published weights in order; it can
be resumed.
"""

import argparse
from pathlib import Path

from tools.train_embedded.seeds import TEST_CASES

STAGES = ("vae", "denoiser", "boxes", "distil", "export", "evaluate", "examples", "gallery")
"""What made the published weights, and what is made from them."""

EXTRAS = ("start", "decoder", "refine", "limits")
"""Lay the exported checkpoint out to go on from it; two stages that go on; what keeps the scores down."""

EXPORTED = ("denoiser", "boxes", "distil", "refine")
NAMES = f"any of {', '.join(STAGES + EXTRAS)}; the first {len(STAGES)} by default"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_embedded", description=__doc__)
    parser.add_argument(
        "stages",
        nargs="*",
        metavar="stage",
        help=NAMES,
    )
    parser.add_argument("--work", type=Path, default=Path(".train"), help="checkpoints and logs (default: .train)")
    parser.add_argument("--out", type=Path, default=Path("model_executor/embedded"), help="the exported checkpoint")
    parser.add_argument("--export-stage", choices=EXPORTED, default="distil", help="whose weights `export` writes")
    parser.add_argument("--share", type=float, default=1.0, help="of them; the rest are those of distil")
    parser.add_argument("--ranks", type=int, default=2, help="training processes, one thread each")
    parser.add_argument("--vae-minutes", type=float, default=18.0)
    parser.add_argument("--denoiser-minutes", type=float, default=71.0)
    parser.add_argument("--boxes-minutes", type=float, default=100.0)
    parser.add_argument("--distil-minutes", type=float, default=20.0)
    parser.add_argument("--decoder-minutes", type=float, default=60.0)
    parser.add_argument("--refine-minutes", type=float, default=360.0)
    parser.add_argument("--sheet", type=Path, default=Path("docs/embedded_model_sheet.png"))
    parser.add_argument("--examples", type=Path, default=Path("examples"))
    parser.add_argument("--cases", type=int, default=TEST_CASES, help="held-out edits to evaluate on")
    parser.add_argument("--tuning", action="store_true", help="evaluate on the tuning scenes, write no JSON")
    options = parser.parse_args()
    unknown = [stage for stage in options.stages if stage not in STAGES + EXTRAS]
    if unknown:
        parser.error(f"unknown stage {unknown[0]!r}; choose from {', '.join(STAGES + EXTRAS)}")
    return options


def run(stage: str, options: argparse.Namespace) -> None:
    """Each stage's module is imported only when it runs: they differ in what they need."""
    match stage:
        case "vae":
            from tools.train_embedded.vae import train_vae

            train_vae(options.work, options.vae_minutes * 60, options.ranks)
        case "denoiser":
            from tools.train_embedded.denoiser import train_denoiser

            train_denoiser(options.work, options.denoiser_minutes * 60, options.ranks)
        case "boxes":
            from tools.train_embedded.denoiser import train_on_boxes

            train_on_boxes(options.work, options.boxes_minutes * 60, options.ranks)
        case "distil":
            from tools.train_embedded.denoiser import distil_guidance

            distil_guidance(options.work, options.distil_minutes * 60, options.ranks)
        case "decoder":
            from tools.train_embedded.decoder import train_decoder

            train_decoder(options.work, options.decoder_minutes * 60, options.ranks)
        case "refine":
            from tools.train_embedded.denoiser import refine

            refine(options.work, options.refine_minutes * 60, options.ranks)
        case "export":
            from tools.train_embedded.export import export

            export(options.work, options.out, options.export_stage, options.share)
        case "start":
            from tools.train_embedded.export import resume_from

            resume_from(options.out, options.work)
        case "limits":
            from tools.train_embedded.limits import limits

            limits(options.out, options.cases)
        case "evaluate":
            from entrypoints import ImageEngine
            from tools.train_embedded.editing import with_engine
            from tools.train_embedded.evaluate import STEPS, evaluate, summary, write
            from tools.train_embedded.sheet import contact_sheet

            with ImageEngine(str(options.out)) as engine:
                edit = with_engine(engine, STEPS)
                outcome = evaluate(options.out, final=not options.tuning, edit=edit, number=options.cases)
            print(summary(outcome.numbers), flush=True)
            if not options.tuning:
                write(outcome.numbers, options.out / "evaluation.json")
            contact_sheet(*outcome.shown, options.sheet)
        case "examples":
            from tools.train_embedded.examples import write_examples

            write_examples(options.examples)
        case "gallery":
            from tools.train_embedded.gallery import FOLDER, write_gallery

            write_gallery(FOLDER)
        case _:
            raise ValueError(stage)


def main() -> None:
    options = parse()
    for stage in options.stages or STAGES:
        run(stage, options)


if __name__ == "__main__":
    main()
