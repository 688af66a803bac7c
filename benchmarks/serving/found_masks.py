"""Latency of edits whose mask is found by words, against edits with the same mask given, through HTTP.

First edits of a picture (`new`), for which the segmenter sees it, and second ones with the same words (`again`), whose
mask was kept. Each kind with the mask given and found, in turns. What finding costs beside the segmenter's own time, as
the answer says it, is the median over rounds of their difference. The server is started with the flags given here.
"""

from __future__ import annotations

import argparse
import base64
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.command import command, model_flags
from benchmarks.load.server import ready_server
from benchmarks.report import print_report
from core.config import EMBEDDED_MODEL

PICTURE = Path(__file__).resolve().parents[2] / "examples" / "person.png"


class Client:
    """Edits variants of one picture, which differ in the pixels of a corner."""

    def __init__(self, url: str, words: str, steps: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)
        self._pixels = np.array(Image.open(PICTURE).convert("RGB"))
        self._words = words
        self._fields = {"prompt": "a red striped shirt", "seed": "1", "num_inference_steps": str(steps)}
        self._num_pictures = 0
        self.segment_ms: dict[str, list[float]] = {}
        _, answer = self._send("images/masks", {"mask_prompt": words}, {})
        self.mask = base64.b64decode(answer["data"][0]["b64_json"])
        self.mask_ratio = float(answer["stencil"]["mask_ratio"])

    def edit(self, way: str, *, is_new: bool, is_given: bool) -> float:
        """Milliseconds of an edit."""
        self._num_pictures += is_new
        fields = self._fields if is_given else self._fields | {"mask_prompt": self._words}
        ms, answer = self._send("images/edits", fields, {"mask": self.mask} if is_given else {})
        self.segment_ms.setdefault(way, []).append(answer["stencil"]["ms"].get("segment", 0.0))
        return ms

    def _send(self, path: str, fields: dict[str, str], files: dict[str, bytes]) -> tuple[float, dict[str, Any]]:
        self._pixels[:4, :4] = np.frombuffer(self._num_pictures.to_bytes(3, "little"), np.uint8)
        file = io.BytesIO()
        Image.fromarray(self._pixels).save(file, "png")
        sent = {name: (f"{name}.png", content) for name, content in {"image": file.getvalue(), **files}.items()}
        answer = self._http.post(f"/v1/{path}", data=fields, files=sent)
        answer.raise_for_status()
        return answer.elapsed.total_seconds() * 1e3, answer.json()


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, rounds=15)
    parser.add_argument("--words", default="the shirt", help="what is edited in the example picture")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps")
    args = parser.parse_args(argv)
    with ready_server(model_flags(args)) as server:
        _report(args, *_measure(args, Client(server.url, args.words, args.steps)))


def _measure(args: argparse.Namespace, client: Client) -> tuple[Client, dict[str, list[float]]]:
    def way(name: str, *, is_new: bool, is_given: bool) -> Any:
        return lambda: client.edit(name, is_new=is_new, is_given=is_given)

    ways = {
        "new, given": way("new, given", is_new=True, is_given=True),
        "new, found": way("new, found", is_new=True, is_given=False),
        "again, found": way("again, found", is_new=False, is_given=False),
        "again, given": way("again, given", is_new=False, is_given=True),
    }
    # An edit again follows one of the same picture with the same words: reversed rounds would not have it so.
    rounds = [{name: run() for name, run in ways.items()} for _ in range(args.rounds + 1)]
    return client, {name: [each[name] for each in rounds[1:]] for name in ways}


def _report(args: argparse.Namespace, client: Client, taken: dict[str, list[float]]) -> None:
    rows, result = [], {"benchmark": "found_masks", "mask_ratio": client.mask_ratio, "steps": args.steps}
    for kind in ("new", "again"):
        given, found = taken[f"{kind}, given"], taken[f"{kind}, found"]
        segment = client.segment_ms[f"{kind}, found"][1:]
        beside = statistics.median(f - g - s for f, g, s in zip(found, given, segment, strict=True))
        medians = [statistics.median(values) for values in (given, found, segment)]
        rows.append((f"{kind}: mask given, found; segmenter", "{:.1f} ms, {:.1f} ms; {:.1f} ms".format(*medians)))
        rows.append((f"{kind}: found costs beside the segmenter", f"{beside:+.1f} ms"))
        result |= {f"{kind}_given_ms": medians[0], f"{kind}_found_ms": medians[1], f"{kind}_segment_ms": medians[2]}
        result |= {f"{kind}_beside_ms": beside}
    title = (
        f"'{args.words}', mask ratio {client.mask_ratio:.2f}, {args.steps} steps, {args.dtype}, {args.rounds} rounds"
    )
    print_report(title, rows, result, args.output)


if __name__ == "__main__":
    main()
