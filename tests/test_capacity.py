"""The measurement of the store's capacity says what it stored and what each step took."""

import json
import re

import pytest

from db.capacity import CASES, CapacityError, main
from db.session import open_database


@pytest.mark.parametrize("samples", [0, 3])
def test_a_small_store_is_measured_as_a_large_one_is(
    empty_url, capsys, monkeypatch, tmp_path, samples
):
    monkeypatch.chdir(tmp_path)
    told = ["--series", "100", "--commits", "12", "--samples", str(samples)]

    main(["--db", empty_url, *told, "--no-detection", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert (found["results"], found["samples"]) == (13 * CASES, 13 * CASES * samples)
    assert found["bytes_per_result"] * found["results"] == pytest.approx(found["bytes_stored"])
    assert all(seconds > 0 for seconds in found["queries_s"].values())


def test_every_query_is_printed_with_its_time_and_detection_with_its_cpu(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'a.db'}"

    main(["--db", url, "--series", "100", "--commits", "1"])

    printed = capsys.readouterr().out
    assert "slowest query: " in printed
    assert {"stale runners", "all evidence"} <= set(re.findall(r"(?m)^(.+?) +\d+\.\d ms$", printed))
    assert len(re.findall("its own CPU|after few more", printed)) == 3
    open_database(url, must_exist=True).dispose()
    with pytest.raises(CapacityError, match="expected an empty one"):
        main(["--db", url, "--series", "100", "--commits", "1", "--no-detection"])
