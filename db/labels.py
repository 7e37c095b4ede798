"""How things are called by people: an environment, a variant, a case's parameters."""

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.models import Runner, RunnerEnvironment
from db.session import chunks

NOTHING_DECLARED = "existing environment"


def environment_label(runner: Runner, environment: RunnerEnvironment) -> str:
    """Say under what it ran: `NVIDIA H200, driver 580.159.04, runtime torch 2.11, 700 W`."""
    runtime = None if environment.runtime is None else f"runtime {environment.runtime}"
    name, driver, *rest = _imposed(runner, environment)
    return _listed([name, driver, runtime, *rest])


def environment_labels(session: Session, ids: Collection[int | None]) -> dict[int | None, str]:
    """Give the labels of environments: rows that name one by its number come much faster."""
    found: dict[int | None, str] = {}
    for chunk in chunks(sorted({one for one in ids if one is not None})):
        query = (
            select(RunnerEnvironment, Runner).join(Runner).where(RunnerEnvironment.id.in_(chunk))
        )
        for environment, runner in session.execute(query):
            found[environment.id] = environment_label(runner, environment)
    return found


def imposed_label(runner: Runner, environment: RunnerEnvironment) -> str:
    """Say what a machine imposed: `NVIDIA H200, driver 580.159.04, 700 W`."""
    return _listed(_imposed(runner, environment))


def _imposed(runner: Runner, environment: RunnerEnvironment) -> list[str | None]:
    limit = environment.power_limit_w
    return [
        runner.name,
        None if environment.driver is None else f"driver {environment.driver}",
        None if limit is None else f"{limit:g} W",
        environment.clock_policy,
    ]


def _listed(parts: Sequence[str | None]) -> str:
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
