"""What a rank's table says of its rows, in lines and as a file."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks._device import DEVICE, cpu_device, cuda_device
from engine import STAGES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks._ceilings import Ceilings
    from benchmarks._device_work import DeviceWork


@dataclass(frozen=True, slots=True)
class Row:
    """All figures of one context and backend."""

    context: int
    backend: str
    commit_length: int
    step_times_s: tuple[float, ...]
    stages_s: dict[str, float]
    floors_s: dict[str, float]  # of what the step reads, the experts that its rows chose
    experts_by_layer: tuple[int, ...]  # that the step's rows chose
    experts_expected: float  # the same if rows chose independently
    prefill_tokens: int
    prefill_s: float  # of that many tokens behind the context, the target's pass alone

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_times_s)

    @property
    def experts_hit(self) -> float:
        """The experts that a layer's rows chose, the mean."""
        return statistics.mean(self.experts_by_layer)

    @property
    def floor_s(self) -> float:
        """The floors of all stages together."""
        return sum(self.floors_s.values())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table."""
        pairs = ((self.stages_s[stage] * 1e3, self.floors_s[stage] * 1e3) for stage in STAGES)
        parts = "  ".join(f"{stage_ms:8.3f}/{floor_ms:5.3f}" for stage_ms, floor_ms in pairs)
        yield (
            f"{self.context:8} {self.backend:14} {self.step_s * 1e3:9.3f} "
            f"{self.floor_s * 1e3:7.3f} {self.step_s / self.floor_s:6.2f}  {parts}"
        )
        yield (
            f"{'':8} experts of a layer: {self.experts_hit:.1f} hit ({min(self.experts_by_layer)} "
            f"to {max(self.experts_by_layer)}), {self.experts_expected:.1f} if rows chose "
            "independently"
        )
        if self.prefill_tokens:
            rate = self.prefill_tokens / self.prefill_s
            yield (
                f"{'':8} prefill: {self.prefill_tokens} tokens in {self.prefill_s * 1e3:.1f} ms, "
                f"{rate:.0f} a second"
            )

    def work_lines(self, work: DeviceWork) -> Iterator[str]:
        """Yield what a profiled step asked of the device."""
        share = 100 * work.busy_s / self.step_s
        yield (
            f"{self.context:8} {self.backend:14} commits {self.commit_length}, "
            f"{work.launches} launches of {work.kernels} kernels, {work.waits} waits, "
            f"{work.copies_up} copies up, {work.copies_back} back, "
            f"busy {work.busy_s * 1e3:.3f} ms, {share:.0f} %"
        )
        for kernel in work.slowest:
            yield f"{'':10}{kernel.seconds * 1e6:9.1f} us in {kernel.count:4} x {kernel.name[:80]}"


def title() -> str:
    """Return the first line of a table."""
    stages = "  ".join(f"{stage:>8}/floor" for stage in STAGES)
    return f"{'context':>8} {'backend':14} {'step ms':>9} {'floor':>7} {'times':>6}  {stages}"


class Report:
    """Prints rows as they come and keeps them in a file, if there is one; `common` beside them."""

    def __init__(self, path: Path | None, common: dict[str, Any], ceilings: Ceilings) -> None:
        self._path = path
        self.ceilings = ceilings
        device = cpu_device() if DEVICE == "cpu" else cuda_device()[0]
        self._facts: dict[str, Any] = {
            "device": asdict(device),
            "ceilings": asdict(ceilings),
            **common,
            "rows": [],
            "fills": [],
        }

    def add(self, preset: str, measured: Row) -> None:
        """Tell a row."""
        for line in measured.lines():
            say(line)
        names = ("step_s", "floor_s", "experts_hit")
        derived = {name: getattr(measured, name) for name in names}
        self._facts["rows"].append({"preset": preset} | asdict(measured) | derived)
        self._keep()

    def add_work(self, preset: str, measured: Row, work: DeviceWork) -> None:
        """Tell what the step of a row asked of the device."""
        for line in measured.work_lines(work):
            say(line)
        named = (preset, measured.context, measured.backend)
        for facts in self._facts["rows"]:
            if (facts["preset"], facts["context"], facts["backend"]) == named:
                facts["work"] = asdict(work)
        self._keep()

    def add_fill(self, preset: str, num_tokens: int, backend: str, seconds: float) -> None:
        """Tell how long a whole prompt took."""
        chunk = self._facts["layout"]["prefill_chunk"]
        say(
            f"{num_tokens:8} {backend:14} filled in {seconds:.2f} s by chunks of {chunk}, "
            f"{num_tokens / seconds:.0f} tokens a second"
        )
        named = {"preset": preset, "num_tokens": num_tokens, "backend": backend}
        self._facts["fills"].append(named | {"seconds": seconds})
        self._keep()

    def add_failure(self, preset: str, context: int, backend: str, error: Exception) -> None:
        """Tell why there is no row."""
        reason = f"{type(error).__name__}: {error}"
        say(f"{context:8} {backend:14} failed: {reason}")
        facts = {"preset": preset, "context": context, "backend": backend, "error": reason}
        self._facts["rows"].append(facts)
        self._keep()

    def _keep(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self._facts, indent=1) + "\n", encoding="utf-8")


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
