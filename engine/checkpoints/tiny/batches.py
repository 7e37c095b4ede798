"""Training sequences: stretches of code, prose and predictable text, packed one behind another.

All text lies in one stream of bytes; a batch is a matrix of places in that stream, drawn on the
host from a seeded generator and looked up on the device. So a stretch that repeats itself costs
no more than one that does not. A zero byte, which text has none of, stands for the end token.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.checkpoints.tiny.synthetic import documents
from engine.presets import END_TOKEN

Places = NDArray[np.int64]

SEPARATOR = b"\0"
CODE, PROSE, TEMPLATED, PERIODIC, ECHOING = range(5)
SHARES = (0.45, 0.30, 0.10, 0.09, 0.06)  # of the stretches, in that order
STRETCH = 1500  # mean bytes of a stretch, roughly: sequences are cut into at most length / this
PERIODS = (20, 600)  # bytes; a few are as long as half the stretch
MOST_ECHOES = 6


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The stream on a device, and where code, prose and templated text lie in it."""

    stream: Tensor  # [n] uint8; it begins with a separator
    spans: tuple[tuple[int, int], ...]  # half-open, of code, prose and templated text

    def tokens(self, places: Places) -> Tensor:
        """Look `places` up, the same shape int64."""
        index = torch.from_numpy(places)
        if self.stream.is_cuda:
            index = index.pin_memory()
        found = self.stream[index.to(self.stream.device, non_blocking=True)].long()
        return found.masked_fill(found == 0, END_TOKEN)


def make_corpus(
    code: bytes, prose: bytes, *, num_templated: int, seed: int, device: torch.device | str
) -> Corpus:
    """Join code, prose and `num_templated` bytes of predictable documents."""
    templated = _templated(num_templated, seed)
    spans, end = [], len(SEPARATOR)
    for text in (code, prose, templated):
        spans.append((end, end + len(text)))
        end += len(text)
    stream = np.frombuffer(SEPARATOR + code + prose + templated, dtype=np.uint8)
    return Corpus(torch.from_numpy(stream.copy()).to(device), tuple(spans))


def read_corpus(
    directory: Path, *, num_templated: int, seed: int, device: torch.device | str
) -> Corpus:
    """Read `code.bin` and `prose.bin`, which `corpus.py` wrote."""
    code, prose = ((directory / name).read_bytes() for name in ("code.bin", "prose.bin"))
    return make_corpus(code, prose, num_templated=num_templated, seed=seed, device=device)


def _templated(num_bytes: int, seed: int) -> bytes:
    """Chain predictable documents, half of them behind a separator, half behind an empty line."""
    rng = np.random.default_rng(seed)
    parts, size = [], 0
    for text in documents(seed + 1):
        if size >= num_bytes:
            break
        parts.append((SEPARATOR if rng.random() < 0.5 else b"\n") + text.encode())
        size += len(parts[-1])
    return b"".join(parts)[:num_bytes]


def draw_places(
    spans: tuple[tuple[int, int], ...], shape: tuple[int, int], rng: np.random.Generator
) -> Places:
    """Draw the places of `shape` = (sequences, bytes): stretches with separators between them."""
    places = np.zeros(shape, dtype=np.int64)
    for row in places:
        cuts = rng.integers(1, shape[1], rng.integers(1 + max(1, shape[1] // STRETCH)))
        for start, end in pairwise(sorted({0, shape[1], *cuts.tolist()})):
            # Place 0 is a separator; the first stretch goes without, as prompts do.
            first = start + 1 if start else 0
            if first < end:
                row[first:end] = _stretch(spans, end - first, rng)
    return places


def _stretch(spans: tuple[tuple[int, int], ...], length: int, rng: np.random.Generator) -> Places:
    kind = rng.choice(len(SHARES), p=SHARES)
    source = kind if kind <= TEMPLATED else rng.integers(TEMPLATED)  # code or prose repeats
    if kind == PERIODIC:
        longest = length // 2 if rng.random() < 0.3 else PERIODS[1]
        period = _log_uniform(rng, PERIODS[0], longest)
        return _run(spans[source], period, rng)[np.arange(length) % period]
    run = _run(spans[source], length, rng)
    if kind == ECHOING:
        _echo(run, rng)
    return run


def _run(span: tuple[int, int], length: int, rng: np.random.Generator) -> Places:
    """Return `length` consecutive places somewhere in `span`, round its end if it is short."""
    start, end = span
    offset = rng.integers(max(1, end - start - length))
    return start + (offset + np.arange(length)) % (end - start)


def _echo(run: Places, rng: np.random.Generator) -> None:
    """Say parts of `run` again later in it (mutated)."""
    for _ in range(rng.integers(1, MOST_ECHOES + 1)):
        size = _log_uniform(rng, PERIODS[0], min(PERIODS[1], len(run) // 3))
        if len(run) < 2 * size:
            return
        target = rng.integers(size, len(run) - size + 1)
        source = rng.integers(target - size + 1)
        run[target : target + size] = run[source : source + size].copy()


def _log_uniform(rng: np.random.Generator, least: int, most: int) -> int:
    most = max(least, most)
    return round(float(np.exp(rng.uniform(np.log(least), np.log(most)))))


def windows(text: bytes, length: int, num_windows: int) -> Tensor:
    """Return evenly spread windows of a held-out text, [num_windows, length] int64."""
    starts = np.linspace(0, len(text) - length, num_windows).astype(int).tolist()
    rows = [list(text[start : start + length]) for start in starts]
    return torch.tensor(rows, dtype=torch.int64)
