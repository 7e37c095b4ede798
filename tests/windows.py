"""Prompts for the trained pair: windows of the texts that it never saw."""

import random

from engine.presets import TEXTS, sample_text

LONGEST = 80


def windows(count, *, seed=0):
    """Cut `count` prompts of 1..80 bytes, half of them under 20, the texts in turn."""
    source = random.Random(seed)
    texts = [sample_text(name) for name in TEXTS]
    prompts = []
    for n in range(count):
        length = 1 + int((LONGEST - 1) * (n * 0.618034 % 1.0) ** 2 + 0.5)
        start = source.randrange(len(texts[n % 3]) - length)
        prompts.append(list(texts[n % 3][start : start + length]))
    return prompts
