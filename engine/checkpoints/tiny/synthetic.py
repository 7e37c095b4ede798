"""Documents whose next line follows from the lines before: counting, records, logs, tables.

Names and numbers are drawn anew for every document, so that they must be read off the context;
from then on all is determined. What a document shows is a function of the generator alone.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")
Line = Callable[[int], str]  # the text of row i

_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
_LEVELS = ("INFO", "DEBUG", "WARNING", "ERROR")
_STEPS = (1, 1, 1, 2, 5, 10, 100)
LEAST_BYTES, MOST_BYTES = 600, 9000  # of a document


def word(rng: np.random.Generator) -> str:
    """Make up a pronounceable word."""
    syllables = rng.integers(1, 4)
    letters = (_pick(rng, _CONSONANTS) + _pick(rng, _VOWELS) for _ in range(syllables))
    return "".join(letters) + _pick(rng, ("", "n", "r", "s"))


def documents(seed: int) -> Iterator[str]:
    """Give documents without end, the same for the same seed."""
    rng = np.random.default_rng(seed)
    while True:
        yield document(rng)


def document(rng: np.random.Generator) -> str:
    """Make one document: a first line where the kind has one, then rows until it is long enough."""
    head, line = KINDS[rng.integers(len(KINDS))](rng)
    wanted = round(np.exp(rng.uniform(np.log(LEAST_BYTES), np.log(MOST_BYTES))))
    parts, size, row = [head], len(head), 0
    while size < wanted:
        parts.append(line(row) + "\n")
        size += len(parts[-1])
        row += 1
    return "".join(parts)


def _counting(rng: np.random.Generator) -> tuple[str, Line]:
    number = _counter(rng)
    before, after = _pick(rng, ("", f"{word(rng)} ", f"{word(rng)}_")), _pick(rng, (".", "", ":"))
    tail = " ".join(word(rng) for _ in range(rng.integers(0, 5)))
    return "", lambda row: f"{before}{number(row)}{after} {tail}".rstrip()


def _csv(rng: np.random.Generator) -> tuple[str, Line]:
    columns = [_column(rng) for _ in range(rng.integers(2, 6))]
    number, mark = _counter(rng), _pick(rng, (",", ";", "\t"))
    head = mark.join(["id", *(word(rng) for _ in columns)]) + "\n"
    return head, lambda row: mark.join([number(row), *(column(row) for column in columns)])


def _json(rng: np.random.Generator) -> tuple[str, Line]:
    fields = [(word(rng), _column(rng)) for _ in range(rng.integers(1, 5))]
    number, key = _counter(rng), word(rng)

    def line(row: int) -> str:
        shown = ", ".join(f'"{name}": "{column(row)}"' for name, column in fields)
        return f'{{"{key}": {number(row)}, {shown}}}'

    return "", line


def _log(rng: np.random.Generator) -> tuple[str, Line]:
    when, number, level = _clock(rng), _counter(rng), _cycle(rng, _LEVELS)
    source, verb, thing = word(rng), word(rng), _column(rng)
    return "", lambda row: f"{when(row)} {level(row)} {source}: {verb} {number(row)} {thing(row)}"


def _table(rng: np.random.Generator) -> tuple[str, Line]:
    columns = [_counter(rng), *(_column(rng) for _ in range(rng.integers(1, 5)))]
    names = [word(rng) for _ in columns]
    width = int(rng.integers(8, 16))
    head = _bars(names, width) + "\n" + _bars(["-" * width for _ in names], width) + "\n"
    return head, lambda row: _bars([column(row) for column in columns], width)


def _code(rng: np.random.Generator) -> tuple[str, Line]:
    number, name, call, other = _counter(rng), word(rng), word(rng), word(rng)
    shape = _pick(
        rng,
        (
            "{name}_{n} = {call}({n})",
            "    {name}[{n}] = {call}({other}, {n})",
            "def {call}_{n}({name}):\n    return {other}({name}, {n})\n",
            "{other}.{call}({n}, '{name}{n}')",
        ),
    )
    return "", lambda row: shape.format(name=name, call=call, other=other, n=number(row))


KINDS = (_counting, _csv, _json, _log, _table, _code)


def _column(rng: np.random.Generator) -> Line:
    """Make a column that is constant, goes round a few words, counts or tells the time."""
    kind = rng.integers(6)
    if kind == 0:
        constant = word(rng)
        return lambda _: constant
    if kind == 1:
        return _counter(rng)
    if kind == 2:
        return _clock(rng)
    return _cycle(rng, tuple(word(rng) for _ in range(rng.integers(2, 6))))


def _cycle(rng: np.random.Generator, values: tuple[str, ...]) -> Line:
    shift = int(rng.integers(len(values)))
    return lambda row: values[(row + shift) % len(values)]


def _counter(rng: np.random.Generator) -> Line:
    start, step = int(rng.integers(0, 10 ** rng.integers(1, 5))), _pick(rng, _STEPS)
    width = int(rng.integers(4, 7)) if rng.random() < 0.3 else 0
    return lambda row: f"{start + step * row:0{width}d}"


def _clock(rng: np.random.Generator) -> Line:
    start = datetime(2001, 1, 1, tzinfo=UTC) + timedelta(minutes=int(rng.integers(12_000_000)))
    step = _pick(rng, (timedelta(seconds=1), timedelta(seconds=10), timedelta(minutes=1)))
    shape = _pick(rng, ("%Y-%m-%d %H:%M:%S", "%H:%M:%S", "%d/%m/%Y %H:%M:%S"))
    return lambda row: (start + step * row).strftime(shape)


def _bars(cells: list[str], width: int) -> str:
    return "| " + " | ".join(cell.ljust(width)[:width] for cell in cells) + " |"


def _pick(rng: np.random.Generator, values: Sequence[Item]) -> Item:
    return values[int(rng.integers(len(values)))]
