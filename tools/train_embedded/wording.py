"""Pretrains the text encoders for a minute: classify the garments in a caption, with linear heads that are discarded.

Otherwise the encoders would first have to learn to distinguish colours from the denoiser's gradients.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn
from transformers import CLIPTextModel, T5EncoderModel

from tools.train_embedded.captions import caption
from tools.train_embedded.garments import COLOURS, KINDS, PATTERNS, Slot, draw_garment
from tools.train_embedded.models import TEXT_WIDTH
from tools.train_embedded.tokenizing import Tokenizers

STEPS, BATCH = 300, 96
SLOTS: tuple[Slot, ...] = ("top", "bottom", "hat")
ALL_KINDS = tuple(kind for slot in SLOTS for kind in KINDS[slot])


def teach_wording(clip: CLIPTextModel, t5: T5EncoderModel, tokenizers: Tokenizers) -> float:
    """Train both encoders in place; returns the share of the last batch's captions that are read without any error."""
    rng = random.Random(0)
    counts = (len(COLOURS), len(PATTERNS), len(ALL_KINDS)) * 2  # of the first garment, then of the second
    heads = nn.ModuleList(nn.Linear(TEXT_WIDTH, n + 1) for n in counts * 2)
    params = [*clip.parameters(), *t5.parameters(), *heads.parameters()]
    optimiser = torch.optim.AdamW(params, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    right = 0.0
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 20) * (1 - step / STEPS)
        captions, labels = _lesson(rng)
        clip_ids, t5_ids = tokenizers(captions)
        pooled, words = clip(clip_ids).pooler_output, t5(t5_ids)[0].mean(1)
        answers = [head(pooled) for head in heads[:6]] + [head(words) for head in heads[6:]]
        loss = sum((F.cross_entropy(a, labels[:, i % 6]) for i, a in enumerate(answers)), torch.zeros(()))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimiser.step()
        correct = torch.stack([a.argmax(-1) == labels[:, i % 6] for i, a in enumerate(answers)])
        right = float(correct.all(0).float().mean())
    return right


def _lesson(rng: random.Random) -> tuple[list[str], torch.Tensor]:
    """Captions of one or two garments, and labels: colour, pattern and kind of each of the two; 0: no garment."""
    captions, labels = [], []
    for _ in range(BATCH):
        garments = [draw_garment(rng, rng.choice(SLOTS))]
        if rng.random() < 0.3:
            garments.append(draw_garment(rng, rng.choice(SLOTS)))
        captions.append(caption(tuple(garments), rng))
        row = [
            n + 1
            for g in garments
            for n in (COLOURS.index(g.colour), PATTERNS.index(g.pattern), ALL_KINDS.index(g.kind))
        ]
        labels.append(row + [0] * (6 - len(row)))
    return captions, torch.tensor(labels)
