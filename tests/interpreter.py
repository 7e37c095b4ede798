"""Running a test file once more with Triton's interpreter in the place of a GPU."""

import os
import subprocess
import sys


def assert_passes_in_the_interpreter(*files):
    """Everything of `files` that needs no GPU, in a process of its own: Triton reads it at import."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]

    run = subprocess.run(
        [*command, "-m", "not gpu"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
