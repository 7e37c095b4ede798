"""What a hostile archive of results may try, without a database or a forge: it is refused in one line."""

import io
import json
import random
import stat
import struct
import zipfile

import pytest

from dashboard import artifact
from dashboard.artifact import ArtifactError, unpack
from db.cases import Verdict
from db.confirmed import ConfirmationError, confirmed, read_decisions
from db.gate import FAIL_ON, Policies, gate
from db.sequential import Decision
from tests.compared import UNMEASURED, case, comparison
from tests.test_gate import TODAY

BASE, HEAD, OTHER = "1a" * 20, "2b" * 20, "5e" * 20
NAME = "bw-1/2b2b2b2b-existing-py_bin_python.json"
DEEP = b"[" * 100_000


def result(commit=HEAD, benchmark="step.Step.time_step", **more):
    return json.dumps({"commit_hash": commit, "results": {benchmark: [[1.0]]}} | more).encode()


def line(**more):
    return json.dumps({"commit": HEAD, "benchmark": "step.Step.time_step"} | more).encode()


HONEST = {
    "benchmarks.json": json.dumps({"step.Step.time_step": {}, "version": 2}).encode(),
    "bw-1/machine.json": b'{"machine": "bw-1", "version": 1}',
    "bw-1/1a1a1a1a-existing-py_bin_python.json": result(BASE),
    NAME: result(),
    "telemetry/20261130T115603Z-6d7445f3.jsonl": line() + b"\n\n" + line(commit=BASE) + b"\n",
    "telemetry/20261130T115603Z-6d7445f3.run": b"no JSON, and nobody reads it",
    "confirmed.json": b'{"base": 1, "cases": {}}',
}


def archive(folder, changes=None, method=zipfile.ZIP_DEFLATED):
    path = folder / "results.zip"
    with zipfile.ZipFile(path, "w", method) as made:
        for name, content in HONEST.items():
            made.writestr(name, content)
        for name, content in (changes or {}).items():
            made.writestr(name, content)
    return path


def opened(folder, path):
    into = folder / "into"
    into.mkdir()
    return unpack(path, into, {BASE, HEAD})


def test_what_a_run_leaves_is_unpacked_and_its_record_is_left(tmp_path):
    found = opened(tmp_path, archive(tmp_path))

    written = {str(one.relative_to(found.results)) for one in found.results.rglob("*.*")}
    assert written == {one for one in HONEST if not one.endswith(".run")} - {"confirmed.json"}
    assert found.confirmed == {"base": 1, "cases": {}}


def entry(name, mode):
    made = zipfile.ZipInfo(name)
    made.external_attr = mode << 16
    return made


ATTACKS = {
    "another tool's results of another commit": ({"evil.json": b"{}"}, "files of results"),
    "a file that is a folder too": ({"benchmarks.json/x.json": result()}, "files of results"),
    "a second tree": ({"sub/benchmarks.json": b'{"version": 2}'}, "expected results of"),
    "a machine called telemetry": ({"telemetry/x.json": result()}, "files of results"),
    "telemetry elsewhere": ({"x.jsonl": line()}, "files of results"),
    "a record elsewhere": ({"../../x.run": b""}, "names of results"),
    "a record among machines": ({"bw-1/x.run": b""}, "files of results"),
    "a settings file": ({"ddtree-bench.toml": b""}, "files of results"),
    "a cyrillic twin": ({"b\u0435nch/x.json": result()}, "names of results"),
    "a composed letter": ({"be\u0301/x.json": result()}, "names of results"),
    "text from right to left": ({"\u202egnp/x.json": result()}, "names of results"),
    "another system's path": ({"..\\..\\x.json": result()}, "names of results"),
    "another system's drive": ({"C:/x.json": result()}, "names of results"),
    "a dot": ({"./benchmarks.json": b"{}"}, "names of results"),
    "an empty part": ({"bw-1//x.json": result()}, "names of results"),
    "a long name": ({f"{'a' * 300}.json": b"{}"}, "names of results"),
    "a line end": ({"bw-1/x\n.json": result()}, "names of results"),
    "a file twice": ({"bw-1/MACHINE.json": b"{}"}, "each file once"),
    "a pipe": ({entry("bw-1/x.json", stat.S_IFIFO): result()}, "plain files"),
    "a linked record": ({entry("telemetry/x.run", stat.S_IFLNK): b"/etc"}, "plain files"),
    "very many folders": ({f"{number}/": b"" for number in range(5000)}, "at most 5000"),
    "a list for a commit": ({"bw-1/x.json": result([HEAD])}, "expected results of"),
    "half a commit": ({"bw-1/x.json": result(HEAD[:8])}, "expected results of"),
    "a commit in capitals": ({"bw-1/x.json": result(HEAD.upper())}, "expected results of"),
    "a commit said twice": (
        {"bw-1/x.json": result()[:-1] + f', "commit_hash": "{OTHER}"}}'.encode()},
        "got '5e5e",
    ),
    "another commit's line": ({"telemetry/x.jsonl": line() + b"\n" + line(commit=OTHER)}, "5e5e"),
    "a broken line": ({"telemetry/x.jsonl": line() + b"\n{"}, "expected JSON"),
    "a script for a benchmark": (
        {"bw-1/x.json": result(benchmark="<script>alert(1)</script>")},
        "names of benchmarks",
    ),
    "a mention in a list": ({"telemetry/x.jsonl": line(benchmark="a.@octocat")}, "names of bench"),
    "no benchmark in a line": ({"telemetry/x.jsonl": line(benchmark=None)}, "names of benchmarks"),
    "markup for a machine": (
        {"bw-2/machine.json": b'{"machine": "<b>@octocat"}', "bw-2/x.json": result()},
        "its folder's name",
    ),
    "a machine's list": ({"bw-2/machine.json": b"[]"}, "expected an object"),
    "deep results": ({"bw-1/x.json": b'{"results": ' + DEEP}, "expected JSON"),
    "a deep machine": ({"bw-2/machine.json": DEEP + b"]" * len(DEEP)}, "expected"),
    "a number without end": (
        {"bw-1/x.json": result()[:-1] + b', "x": ' + b"9" * 5000 + b"}"},
        "JSON",
    ),
    "other letters": ({"bw-1/x.json": result().decode().encode("utf-16")}, "expected JSON"),
    "half a letter": ({"bw-1/x.json": b'{"commit_hash": "\xff"}'}, "expected JSON"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_refused_in_one_line(tmp_path, name):
    changes, said = ATTACKS[name]

    with pytest.raises(ArtifactError) as caught:
        opened(tmp_path, archive(tmp_path, changes))

    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500


def test_one_file_is_small_enough_to_be_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(artifact, "MOST_BYTES_OF_A_FILE", 1000)

    with pytest.raises(ArtifactError, match="at most 1000 bytes, stored or deflated, got 1001"):
        opened(tmp_path, archive(tmp_path, {"bw-1/x.json": b" " * 1001}))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_methods_that_take_memory_unseen_are_refused(tmp_path, method):
    with pytest.raises(ArtifactError, match="stored or deflated"):
        opened(tmp_path, archive(tmp_path, method=method))


CENTRAL, END = b"PK\x01\x02", b"PK\x05\x06"
FIELDS = {  # which field of the archive's own list says what
    "encrypted": (CENTRAL, 8, "<H", 1),
    "of another method": (CENTRAL, 10, "<H", 99),
    "shorter than it is": (CENTRAL, 24, "<I", 3),
    "far larger than it is": (CENTRAL, 24, "<I", 2**31),
    "nowhere": (CENTRAL, 42, "<I", 2**32 - 16),
    "listed nowhere": (END, 16, "<I", 2**32 - 16),
}


@pytest.mark.parametrize("name", FIELDS)
def test_an_archive_that_lies_about_its_first_file_is_refused(tmp_path, name):
    mark, offset, form, value = FIELDS[name]
    path = archive(tmp_path)
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, content.index(mark) + offset, value)
    path.write_bytes(content)

    with pytest.raises(ArtifactError):
        opened(tmp_path, path)


def test_letters_that_are_none_in_a_listed_name_are_refused(tmp_path):
    path = archive(tmp_path)
    content = bytearray(path.read_bytes())
    place = content.index(CENTRAL)
    struct.pack_into("<H", content, place + 8, 0x800)  # says that the name is UTF-8
    content[place + 46] = 0xFF
    path.write_bytes(content)

    with pytest.raises(ArtifactError, match="readable zip file"):
        opened(tmp_path, path)


def damaged(count, folder):
    """Flip bytes of an archive, a few at a time; whatever happens has our type or is harmless."""
    rng, whole = random.Random(7), archive(folder).read_bytes()
    path = folder / "damaged.zip"
    refused = 0
    for number in range(count):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content[: rng.randrange(len(content))] if number % 5 == 0 else content)
        into = folder / str(number)
        into.mkdir()
        try:
            unpack(path, into, {BASE, HEAD})
        except ArtifactError:
            refused += 1
    return refused


def test_flipped_bytes_are_refused_or_mean_nothing(tmp_path):
    assert damaged(100, tmp_path) > 50


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_many_flipped_bytes_are_refused_or_mean_nothing(tmp_path):
    assert damaged(20_000, tmp_path) > 10_000


def test_zip_inside_a_zip_stays_unopened(tmp_path):
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as made:
        made.writestr("bw-1/x.json", result(OTHER))

    with pytest.raises(ArtifactError, match="files of results"):
        opened(tmp_path, archive(tmp_path, {"inner.zip": inner.getvalue()}))


CHANGE = {"verdict": "regression", "pairs": 8, "relative_change": 0.2, "low": 0.1, "high": 0.3}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"high": 10**400}, "finite"),
        ({"high": 1e300}, "finite"),
        ({"low": float("nan")}, "finite"),
        ({"relative_change": True}, "finite"),
        ({"low": 0.4, "high": 0.1}, "within its interval"),
        ({"relative_change": -3.0, "low": -4.0}, "above -1"),
        ({"relative_change": 0.5}, "within its interval"),
        ({"relative_change": -0.2, "low": -0.3, "high": -0.1}, "no regression"),
        ({"verdict": "improvement"}, "no improvement"),
        ({"verdict": "removed"}, "expected a verdict"),
        ({"verdict": ["regression"]}, "expected a verdict"),
        ({"pairs": True}, "pairs"),
        ({"pairs": 8.0}, "pairs"),
    ],
)
def test_confirmation_that_no_pairs_can_give_is_refused(changes, said):
    told = {"base": BASE, "head": HEAD, "cases": {"a.B.time_c": CHANGE | changes}}

    with pytest.raises(ConfirmationError, match=said):
        read_decisions(told, BASE, HEAD)


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.REMOVED, Verdict.SKIPPED])
def test_no_confirmation_brings_back_a_case_that_is_gone(verdict):
    gone = case(verdict, benchmark="a.B.time_c", params="", **(UNMEASURED | {"base_value": 1e-3}))
    decision = Decision(Verdict.NO_CHANGE, 8, 0.0, -0.01, 0.01)

    found = confirmed(comparison(gone), {"a.B.time_c": decision})

    assert found.cases == (gone,)
    assert not gate(found, FAIL_ON["confirmed"], Policies(), TODAY, confirmed_only=True).passes
