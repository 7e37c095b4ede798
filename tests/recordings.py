"""Evidence to diagnose: the recorded incident, and layers measured on an H200."""

from db.diagnose import Ceilings, Evidence, EvidencePoint

LAYERS, ROW_BYTES = 61, 576 * 2
SWEEP_MS = {1024: 8, 32768: 159, 65536: 357, 131072: 714, 189440: 1430}
SWEEP, PROBE = "incident.Sweep.time_step", "incident.Probe.time_step"


def kv_bytes(context):
    return LAYERS * ROW_BYTES * context


def sweep_point(context, time_ms, **changes):
    params = changes.pop("params", f"context={context}, page_size=1")
    return EvidencePoint(
        SWEEP, params, context, time_ms / 1e3, 1, kv_bytes=kv_bytes(context), **changes
    )


PROBE_POINT = EvidencePoint(
    PROBE,
    "context=65536, page_size=1",
    65536,
    0.327,
    49,
    kv_bytes=kv_bytes(65536),
    commit_length=1.0,
    programs=8,
    num_sms=188,
    counters={
        "utilization_gpu_pct": 99.8,
        "utilization_memory_pct": 1.2,
        "power_w": 133.0,
        "sm_clock_mhz": 2359.0,
    },
)


def incident(sweep_ms=None, probe=PROBE_POINT, peak=1.8e12):
    points = [sweep_point(*pair) for pair in (sweep_ms or SWEEP_MS).items()]
    return Evidence(
        label="incident",
        gpu="RTX PRO 6000 Blackwell",
        ceilings=Ceilings(read_bytes_per_s=peak),
        peak_source="datasheet",
        points=(*points, probe),
        power_limit_w=600.0,
    )


def case_of(diagnosis, benchmark, context):
    return next(
        case
        for case in diagnosis.cases
        if (case.benchmark, case.context_tokens) == (benchmark, context)
    )


def claim_of(diagnosis, name):
    found = [claim for claim in diagnosis.claims if claim.name == name]
    assert len(found) == 1, [claim.name for claim in diagnosis.claims]
    return found[0]


def names(claims):
    return {claim.name for claim in claims}


H200 = Ceilings(read_bytes_per_s=4.55e12, matmul_flops_per_s=790e12, dtype="bf16")
LAYER_BYTES = 65536 * ROW_BYTES


def on_h200(*points):
    return Evidence("h200", "NVIDIA H200", H200, "measured", points, 700.0)


def layer(time_us, counters, **changes):
    fields = {
        "benchmark": "attention.Tree.time_layer",
        "params": "context=65536, page_size=1",
        "context_tokens": 65536,
        "time_s": time_us / 1e6,
        "n": 20,
        "bytes": LAYER_BYTES + 10**6,
        "kv_bytes": LAYER_BYTES,
        "flops": 2 * 72 * 65536 * (576 + 512),
        "programs": 8,
        "num_sms": 132,
        "counters": dict(
            zip(
                (
                    "utilization_gpu_pct",
                    "utilization_memory_pct",
                    "power_w",
                    "gpm_sm_active_pct",
                    "gpm_dram_bandwidth_pct",
                    "gpm_tensor_pct",
                ),
                counters,
                strict=True,
            )
        ),
    }
    return EvidencePoint(**{**fields, **changes})


SERIAL = layer(7173, (100, 0, 131, 5.4, 0.22, 0.36))
SPLIT = layer(101.5, (99, 25, 501, 81, 18, 29), programs=66)
COPY = layer(18.0, (100, 100, 615, 98, 86, 0.5), programs=1000)
MATMUL = EvidencePoint(
    "ceiling.Matmul.time_burst",
    "size=8192",
    None,
    1.644e-3,
    20,
    bytes=3 * 8192**2 * 2,
    flops=2 * 8192**3,
    counters={
        "utilization_gpu_pct": 100.0,
        "utilization_memory_pct": 23.0,
        "power_w": 693.0,
        "sm_clock_mhz": 1485.0,
        "clock_event_reasons": 4.0,
        "gpm_sm_active_pct": 91.0,
        "gpm_tensor_pct": 89.0,
    },
)
