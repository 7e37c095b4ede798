"""A commit that pins a dependency is measured with it, or not at all."""

import subprocess
import sys
import zipfile

import pytest

from dashboard.asv_errors import AsvFailedError
from dashboard.asv_pins import WHEELS_VARIABLE, folder_of, missing_of, pins_of

DECLARED = """
[project]
dependencies = ["click>=8", "numpy==1.2.3; python_version < '3'", "loose==1.*", " some-lib == 2.5 "]
"""


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder with the wheel of a library that nobody else has."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "some_lib-2.5-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_lib.py", "VERSION = '2.5'\n")
        info = "some_lib-2.5.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: some-lib\nVersion: 2.5\n")
        tag = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv(WHEELS_VARIABLE, str(folder))
    return folder


def test_a_pin_names_one_version_for_every_machine(tmp_path):
    (tmp_path / "pyproject.toml").write_text(DECLARED, encoding="utf-8")

    assert pins_of(tmp_path) == {"some-lib": "2.5"}
    assert pins_of(tmp_path / "nowhere") == {}


def test_what_is_installed_already_is_not_missing():
    assert missing_of({"pytest": pytest.__version__, "some-lib": "2.5"}) == {"some-lib": "2.5"}


def test_a_missing_version_is_unpacked_once_into_the_checkout(tmp_path, wheels):
    folder = folder_of(tmp_path, {"some-lib": "2.5"})
    (wheels / "some_lib-2.5-py3-none-any.whl").unlink()
    words = (
        "import some_lib, importlib.metadata as m; print(some_lib.VERSION, m.version('some-lib'))"
    )
    said = subprocess.run(
        [sys.executable, "-c", words],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert said.split() == ["2.5", "2.5"]
    assert folder_of(tmp_path, {"some-lib": "2.5"}) == folder
    assert folder.is_relative_to(tmp_path / ".asv")


def test_a_version_of_which_there_is_no_wheel_is_refused_in_one_line(tmp_path, wheels):
    with pytest.raises(AsvFailedError, match=r"expected wheels of some-lib==9\.9") as found:
        folder_of(tmp_path, {"some-lib": "9.9"})

    assert "\n" not in str(found.value)
    assert not list((tmp_path / ".asv" / "pins").glob("*"))


def test_without_wheels_a_commit_that_pins_another_version_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.delenv(WHEELS_VARIABLE, raising=False)
    with pytest.raises(AsvFailedError, match=r"expected some-lib==2\.5, got other versions"):
        folder_of(tmp_path, {"some-lib": "2.5"})
