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


def save_repeated_work():
    """Let Triton's interpreter do once what it does at every call, which is half of its time.

    At each call of a function by a kernel it looks through all of Triton's language for members to
    put its own in the place of, where the kernel's start has done so already; and for each value it
    builds the table of NumPy's types anew.
    """
    from triton import language  # noqa: PLC0415 - conftest.py asks only where there is an interpreter
    from triton.runtime import interpreter  # noqa: PLC0415

    patch, is_builtin = interpreter._patch_builtin, language.core.is_builtin
    a_builtin = {}

    def patch_what_is_not(place, *rest):
        if place not in a_builtin:
            members = dir(place)
            a_builtin[place] = next(one for one in members if is_builtin(getattr(place, one)))
        if is_builtin(getattr(place, a_builtin[place])):
            patch(place, *rest)

    convert = interpreter._get_np_dtype
    converted = {}

    def look_up(kind):
        scalar = kind.scalar
        if isinstance(scalar, language.pointer_type):
            return convert(scalar)
        if scalar.name not in converted:
            converted[scalar.name] = convert(scalar)
        return converted[scalar.name]

    interpreter._patch_builtin = patch_what_is_not
    interpreter._get_np_dtype = look_up
