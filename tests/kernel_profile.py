"""What Nsight Compute (`ncu`) says of the launches of one call, as a table.

Its times are those of a launch that is replayed under counters, and are left out. Metrics are named
as `ncu` 2025 has them for sm_90. Source: its manual (docs.nvidia.com/nsight-compute: Profiling
Guide, Nsight Compute CLI).
"""

import csv
import shutil
import subprocess
from dataclasses import dataclass

SECTIONS = ("LaunchStats", "Occupancy", "WarpStateStats", "MemoryWorkloadAnalysis")
REGISTERS = "launch__registers_per_thread"
SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
MOST_OCCUPANCY = "sm__maximum_warps_per_active_cycle_pct"
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
READ_SHARE = "dram__bytes_read.sum.pct_of_peak_sustained_elapsed"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
LOCAL = ("smsp__sass_inst_executed_op_local_ld.sum", "smsp__sass_inst_executed_op_local_st.sum")
LATENCY = "smsp__average_warp_latency_per_inst_issued.ratio"
# Cycles between two instructions of a warp that it spent on a reason; they sum to LATENCY.
STALL = ("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio")
NO_STALL = "selected"  # the cycle in which it issues
# Beside what the sections hold anyway: none of them has all of these in every version.
METRICS = (REGISTERS, *SHARED, OCCUPANCY, MOST_OCCUPANCY, READ, WRITTEN, READ_SHARE, TENSOR,
           *LOCAL, LATENCY)  # fmt: skip
THOUSANDS = {"K": 1e3, "M": 1e6, "G": 1e9}  # of a unit; no base unit begins with these
MOST_STALLS = 5


class ProfileError(Exception):
    """Nothing was profiled; the message is one line for the user."""


@dataclass(frozen=True)
class Launch:
    """One kernel's launch and its metrics in base units; what was not counted is not there."""

    kernel: str
    values: dict[str, float]

    @property
    def stalls(self):
        """Reasons and their cycles, the longest first."""
        before, after = STALL
        found = {
            name.removeprefix(before).removesuffix(after): cycles
            for name, cycles in self.values.items()
            if name.startswith(before) and name.endswith(after)
        }
        found.pop(NO_STALL, None)
        longest = sorted(found.items(), key=lambda one: -one[1])[:MOST_STALLS]
        return [f"{reason} {cycles:.2f}" for reason, cycles in longest]


def profiled(command, log, **how):
    """Run a command under `ncu` and return the launches that it was told to look at."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise ProfileError("ncu: expected Nsight Compute on the path, found none (for --profile)")
    options = ["--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "function",
               "--log-file", str(log), "--profile-from-start", "off", "--clock-control", "none"]  # fmt: skip
    sections = [word for name in SECTIONS for word in ("--section", name)]
    ended = subprocess.run(
        [ncu, *options, *sections, "--metrics", ",".join(METRICS), *command],
        capture_output=True,
        text=True,
        check=False,
        **how,
    )
    said = log.read_text(encoding="utf-8") if log.is_file() else ""
    launches = parsed(said)
    if ended.returncode or not launches:
        lines = (said + ended.stderr).strip().splitlines()
        errors = [line for line in lines if line.startswith("==ERROR==")]
        raise ProfileError(f"ncu: expected launches, got {[*errors, *lines[-1:], 'nothing'][0]}")
    return launches


def parsed(text):
    """Read the launches from CSV of the page `raw`: a line of names, one of units, the values."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = list(csv.DictReader(line for line in lines[start:] if line.startswith('"')))
    if not rows:
        return []
    units, *launches = rows
    return [
        Launch(
            row["Kernel Name"],
            {
                name: number * THOUSANDS.get(units[name][:1], 1.0)
                for name, text in row.items()
                if "__" in name and (number := _number(text)) is not None
            },
        )
        for row in launches
    ]


def _number(text):
    """Give a value; None where `ncu` has none ("n/a") or a text."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def table(launches):
    """Return launches as a Markdown table, one column each."""
    lines = [["", *(one.kernel for one in launches)]]
    lines.append(["---"] * len(lines[0]))
    for title, write in ROWS.items():
        lines.append([title, *(write(one.values) for one in launches)])
    for place in range(MOST_STALLS):
        texts = [" ".join(one.stalls[place : place + 1] or ["-"]) for one in launches]
        lines.append([f"stall {place + 1}, cycles of these", *texts])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _written(*names, scale=1.0, digits=0):
    """Return what writes metrics of a launch, several side by side."""

    def write(values):
        texts = [f"{values[name] / scale:.{digits}f}" if name in values else "-" for name in names]
        return " / ".join(texts)

    return write


ROWS = {
    "registers a thread": _written(REGISTERS),
    "shared memory a block, static / dynamic, bytes": _written(*SHARED),
    "occupancy / at most, %": _written(OCCUPANCY, MOST_OCCUPANCY, digits=1),
    "DRAM read / written, MB": _written(READ, WRITTEN, scale=1e6, digits=2),
    "DRAM read, % of its peak": _written(READ_SHARE, digits=1),
    "tensor pipe, % of active cycles": _written(TENSOR, digits=1),
    "local loads / stores, instructions": _written(*LOCAL),
    "cycles between instructions of a warp": _written(LATENCY, digits=2),
}
