"""Files of other tools, as they write them."""

PYTEST_BENCHMARK = {
    "machine_info": {
        "node": "bench-01",
        "processor": "",
        "machine": "x86_64",
        "python_version": "3.11.7",
        "release": "6.1",
        "system": "Linux",
        "cpu": {"brand_raw": "EPYC", "count": 2},
    },
    "commit_info": {
        "id": "b" * 40,
        "time": "2026-05-01T10:00:00+02:00",
        "author_time": "2026-05-01T10:00:00+02:00",
        "dirty": False,
        "project": "p",
        "branch": "main",
    },
    "benchmarks": [
        {
            "group": None,
            "name": "test_sum[10-a]",
            "fullname": "test_b.py::test_sum[10-a]",
            "params": {"n": 10, "mode": "a"},
            "param": "10-a",
            "extra_info": {"gflops": 1.5, "note": "warm"},
            "options": {"disable_gc": False, "timer": "perf_counter"},
            "stats": {
                "min": 1e-6,
                "max": 4e-6,
                "mean": 2.2e-6,
                "stddev": 1e-6,
                "rounds": 3,
                "median": 2e-6,
                "iqr": 1e-6,
                "q1": 1.5e-6,
                "q3": 3e-6,
                "ops": 454545.0,
                "data": [1e-6, 2e-6, 4e-6],
                "iterations": 17,
            },
        },
        {
            "group": None,
            "name": "test_plain",
            "fullname": "test_b.py::test_plain",
            "params": None,
            "param": None,
            "extra_info": {},
            "options": {},
            "stats": {"rounds": 5, "median": 3e-6, "q1": 2e-6, "q3": 4e-6, "iterations": 1},
        },
    ],
    "datetime": "2026-05-01T12:00:00.5+00:00",
    "version": "5.3.1",
}


def _run(name, index, real, **more):
    return {
        "name": name,
        "family_index": 0,
        "per_family_instance_index": 0,
        "run_name": name,
        "run_type": "iteration",
        "repetitions": 3,
        "repetition_index": index,
        "threads": 1,
        "iterations": 11836,
        "real_time": real,
        "cpu_time": real * 0.5,
        "time_unit": "us",
    } | more


def _aggregate(name, kind, real, **more):
    return {
        "name": f"{name}_{kind}",
        "run_name": name,
        "run_type": "aggregate",
        "repetitions": 3,
        "threads": 1,
        "aggregate_name": kind,
        "aggregate_unit": "time",
        "iterations": 3,
        "real_time": real,
        "cpu_time": real * 0.5,
        "time_unit": "us",
    } | more


GOOGLE_BENCHMARK = {
    "context": {
        "date": "2026-05-01T12:00:00+00:00",
        "host_name": "bench-01",
        "executable": "./bench",
        "num_cpus": 2,
        "mhz_per_cpu": 2445,
        "cpu_scaling_enabled": False,
        "caches": [],
        "load_avg": [2.0],
        "library_build_type": "release",
    },
    "benchmarks": [
        *(
            _run("BM_walk/64/page:16/real_time", index, real, items_per_second=1e6, gflops=1.5)
            for index, real in enumerate((5.0, 3.0, 4.0))
        ),
        _aggregate("BM_walk/64/page:16/real_time", "mean", 4.0),
        _aggregate("BM_walk/64/page:16/real_time", "median", 4.0),
        _aggregate("BM_only/8", "mean", 7.5),
        _aggregate("BM_only/8", "median", 7.0),
        _aggregate("BM_only/8", "stddev", 0.5),
        _run("Fixture/BM_broken", 0, 0.0, error_occurred=True, error_message="no device"),
        _run("BM_later", 0, 0.0, skipped=True, skip_message="not here"),
    ],
}


def _summary(tag, value, kind="float64", **more):
    data = [{"name": "value", "type": kind, "value": str(value)}]
    return {"tag": tag, "name": tag, "description": "", "data": data} | more


def _state(value, summaries, **more):
    axes = [{"name": "Elements", "type": "int64", "value": str(value)}]
    return {
        "name": f"Device=0 Elements={value}",
        "device": 0,
        "type_config_index": 0,
        "axis_values": axes,
        "summaries": summaries,
        "is_skipped": False,
    } | more


NVBENCH = {
    "meta": {"argv": ["bench"], "version": {"json": {"major": 1, "minor": 0, "patch": 0}}},
    "devices": [{"id": 0, "name": "NVIDIA H200", "sm_version": 900, "number_of_sms": 132}],
    "benchmarks": [
        {
            "name": "copy",
            "index": 0,
            "devices": [0],
            "axes": [{"name": "Elements", "type": "int64", "flags": "", "values": []}],
            "states": [
                _state(
                    1024,
                    [
                        _summary("nv/cold/sample_size", 499, "int64"),
                        _summary("nv/cold/time/cpu/mean", 1.1e-3),
                        _summary("nv/cold/time/gpu/mean", 1.0e-3),
                        _summary("nv/cold/time/gpu/median", 0.9e-3),
                        _summary("nv/cold/time/gpu/q1", 0.8e-3),
                        _summary("nv/cold/time/gpu/q3", 1.2e-3),
                        _summary("nv/cold/time/gpu/stdev/relative", 0.01),
                        _summary("nv/cold/bw/global/bytes_per_second", 2.0e12),
                        _summary("nv/cold/walltime", 0.5, hide="Hidden by default."),
                        _summary("accuracy", 0.75),
                        {
                            "tag": "nv/json/bin:nv/cold/sample_times",
                            "name": "Samples",
                            "data": [
                                {"name": "filename", "type": "string", "value": "/etc/passwd"},
                                {"name": "size", "type": "int64", "value": "499"},
                            ],
                        },
                    ],
                ),
                _state(2048, [], is_skipped=True, skip_reason="too large"),
            ],
        }
    ],
}
