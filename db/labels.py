"""How things are called by people: an environment, a variant, a case's parameters."""

from collections.abc import Mapping, Sequence

from db.models import Runner, RunnerEnvironment

NOTHING_DECLARED = "existing environment"


def environment_label(runner: Runner, environment: RunnerEnvironment) -> str:
    """Say what a machine imposed: `NVIDIA H200, driver 580.159.04, 700 W`."""
    limit = environment.power_limit_w
    parts = (
        runner.name,
        None if environment.driver is None else f"driver {environment.driver}",
        None if environment.runtime is None else f"runtime {environment.runtime}",
        None if limit is None else f"{limit:g} W",
        environment.clock_policy,
    )
    return ", ".join(part for part in parts if part)


def variant_label(python: str, requirements: Mapping[str, str], env_vars: Mapping[str, str]) -> str:
    """Say what a commit declared: `python 3.11, torch 2.13.0, THREADS=1`; nothing has a name."""
    needs = (f"{name} {version}".strip() for name, version in sorted(requirements.items()))
    variables = (f"{name}={value}" for name, value in sorted(env_vars.items()))
    interpreter = [f"python {python}"] if python else []
    return ", ".join((*interpreter, *needs, *variables)) or NOTHING_DECLARED


def canonical_params(names: Sequence[str], values: Sequence[str]) -> str:
    """Write a case's parameters so that equal cases read equal: `context=1024, page_size=16`.

    Names that do not fit the values in number are those of another version of the benchmark;
    asv's own default names stand in then.
    """
    fitting = names if len(names) == len(values) else [f"param{i + 1}" for i in range(len(values))]
    return ", ".join(f"{name}={value}" for name, value in zip(fitting, values, strict=True))
