"""Times of an op's kernels in several checkouts, and how they are written as a table."""

import statistics
from dataclasses import asdict, dataclass

from db.sequential import Plan, decide

HERE = "here"
ALPHA = 0.05  # one look, one interval
COLUMNS = ("cell", "implementation", "checkout", "median us", "quartiles", "least to most",
           "floor us", "times floor", f"{HERE} against it")  # fmt: skip


@dataclass(frozen=True)
class Checkout:
    """Whose engine is timed."""

    name: str  # as it was asked for
    commit: str
    engine_tree: str  # git's hash of engine/ on disk
    is_dirty: bool  # it differs from the commit's


@dataclass(frozen=True)
class Timing:
    """An implementation of one checkout in a cell."""

    turns_s: list[list[float]]  # samples, by round
    error_rel: float  # of the result, against the definition
    validity: list[str]  # what was wrong with samples

    @property
    def samples_s(self):
        return [one for turn in self.turns_s for one in turn]

    @property
    def medians_s(self):
        return [statistics.median(turn) for turn in self.turns_s]


@dataclass(frozen=True)
class Race:
    """An implementation in a cell, by checkout."""

    cell: str
    implementation: str
    timings: dict[str, Timing]
    absent: dict[str, str]  # why it was not timed
    floor: dict  # its seconds, the least bytes and FLOP, and the rates that were measured

    def difference(self, other):
        """How much more time it takes here than there, relative to there, with the interval."""
        if HERE not in self.timings or other == HERE:
            return None
        here, there = (self.timings[name].medians_s for name in (HERE, other))
        ratios = [after / before for after, before in zip(here, there, strict=True)]
        return decide(ratios, Plan(looks=(len(ratios),), alpha=ALPHA))


def row(one, name):
    """Write a timing as a line of the table, microseconds."""
    timing, floor_s = one.timings[name], one.floor["floor_s"]
    samples = timing.samples_s
    median_s = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    shift = one.difference(name)
    texts = [
        one.cell,
        one.implementation,
        name,
        f"{median_s * 1e6:.1f}",
        f"{low * 1e6:.1f} to {high * 1e6:.1f}",
        f"{min(samples) * 1e6:.1f} to {max(samples) * 1e6:.1f}",
        f"{floor_s * 1e6:.1f}",
        f"{median_s / floor_s:.2f}",
        "" if shift is None
        else f"{shift.relative_change:+.1%} [{shift.low:+.1%}, {shift.high:+.1%}]",
    ]  # fmt: skip
    return f"| {' | '.join(texts)} |"


def head(device, checkouts, asked):
    """Say what was measured, where and how."""
    yield f"{device['name']}, driver {device['driver'] or 'none'}, {device['runtime']}"
    for one in checkouts:
        state = "dirty, its engine is not that commit's" if one.is_dirty else "its engine"
        yield f"{one.name}: {one.commit[:12]}, {state} (tree {one.engine_tree[:12]})"
    rows = "fp8 rows, " if asked.fp8 else ""
    turns = f"{asked.rounds} rounds of {asked.samples} samples, cold caches"
    if device["kind"] == "cpu":
        yield f"{asked.op}, {rows}{turns}, calls by the wall on a CPU, which say nothing of a kernel"
    else:
        yield f"{asked.op}, {rows}{turns}, graph replays between events"


def body(races):
    """Write all timings as a table, and below it what there is to say of them."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * len(COLUMNS)}"
    yield from (row(one, name) for one in races for name in one.timings)
    for one in races:
        where = f"{one.cell}, {one.implementation}"
        for name, reason in one.absent.items():
            yield f"not timed: {where}, {name}: {reason}"
        for name, timing in one.timings.items():
            if timing.validity:
                yield f"doubtful: {where}, {name}: {', '.join(timing.validity)}"


def kept(device, checkouts, races, asked):
    """Give all that was measured, for a file."""
    return {
        "device": device,
        "checkouts": [asdict(one) for one in checkouts],
        "op": asked.op,
        "is_fp8": asked.fp8,
        "rounds": asked.rounds,
        "samples": asked.samples,
        "races": [
            asdict(one)
            | {
                "differences": {
                    name: shift.to_dict() for name in one.timings if (shift := one.difference(name))
                }
            }
            for one in races
        ],
    }
