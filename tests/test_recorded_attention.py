"""The recorded ladder and peers: files that belong together, and documents that say what they say."""

import itertools
import json
import re
import statistics
from pathlib import Path

import pytest
from asv.results import iter_results

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "benchmarks" / "recorded" / "h200-attention"
TREE_PEERS = ("fa3_cascade", "flashinfer_fa3_cascade", "sglang_triton")
TIMES = "\N{MULTIPLICATION SIGN}"
OURS = ("cuda", "cuda_mma", "triton_split", "triton_serial")
CONTEXTS = {"1k": "1024", "4k": "4096", "16k": "16384", "64k": "65536", "185k": "189440"}
COLUMNS = {
    "`cuda`": "cuda",
    "`cuda_mma`": "cuda_mma",
    "`triton_split`": "triton_split",
    "FA3 cascade": "fa3_cascade",
    "FlashInfer cascade": "flashinfer_fa3_cascade",
    "SGLang Triton": "sglang_triton",
    "FlashMLA": "flashmla",
    "FA3": "fa3",
    "FlashInfer fa3": "flashinfer_fa3",
    "fa2": "flashinfer_fa2",
}


LADDER, PEERS, NEWEST = "d6ee51ce", "0c067907", "79f757f7"  # commits
TABLES = {PEERS: "peers.md", NEWEST: f"peers-{NEWEST}.md"}


def recorded(commit):
    """The result file of a commit, and the lines of the sidecar that belong to it."""
    results = [one for one in iter_results(str(RECORDED)) if one.commit_hash.startswith(commit)]
    files = (RECORDED / "telemetry").glob("*.jsonl")
    texts = [text for path in files for text in path.read_text(encoding="utf-8").splitlines()]
    (result,) = results
    lines = [line for line in map(json.loads, texts) if line["commit"] == result.commit_hash]
    return result, lines


def values_of(result):
    """Values of a result file by benchmark and parameters, those that there are."""
    return {
        (name, case): value
        for name in result.get_all_result_keys()
        for params in [result.get_result_params(name)]
        for case, value in zip(
            itertools.product(*params), result.get_result_value(name, params), strict=True
        )
        if value == value  # noqa: PLR0124 - NaN: skipped
    }


@pytest.fixture(scope="module")
def cells():
    """Medians in µs by cell, then by implementation."""
    return cells_in("peers.md")


def cells_in(name):
    found = {}
    for row in table_rows(RECORDED / name):
        if len(row) == 12 and row[0][0].isdigit():
            found.setdefault(tuple(row[:5]), {})[row[5]] = float(row[7])
    return found


def table_rows(path):
    text = path.read_text(encoding="utf-8")
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def documented(path):
    """Rows of a document's table of peers: heads x tokens, context, and a figure by column."""
    rows, header = [], []
    for row in table_rows(path):
        if row[0] == f"heads {TIMES} tokens, context":
            header = row
        elif header and re.match(rf"\d+ {TIMES} \d+, ", row[0]):
            rows.append((row[0], dict(zip(header[1:], row[1:], strict=True))))
    return rows


def cell_of(title):
    """The cell in pages of 64 rows that a row of a document is about."""
    heads, tokens, where = re.match(rf"(\d+) {TIMES} (\d+), (.*)", title).groups()
    batch = "1"
    if where.startswith("2k to 30k"):
        where, batch = "16k", "32 uneven"
    elif f" {TIMES} " in where:
        where, batch = where.split(f" {TIMES} ")
    return (f"{heads} x {tokens}", CONTEXTS[where], batch.split(" seq")[0], "64", "shuffled")


@pytest.mark.parametrize(
    ("commit", "num_cases", "rounds"),
    [(LADDER, 42, 56), (PEERS, 231, 30), (NEWEST, 147, 30)],
    ids=["ladder", "peers", "newest"],
)
def test_the_samples_are_the_sidecars(commit, num_cases, rounds):
    result, lines = recorded(commit)
    by_case = {(line["benchmark"], tuple(line["params"])): line for line in lines}
    values = values_of(result)

    assert len(lines) == len(values) == num_cases
    for case, value in values.items():
        line = by_case[case]
        assert value == statistics.median(line["samples_s"]) == line["median_s"]
        assert line["n"] == rounds


@pytest.mark.parametrize("commit", TABLES)
def test_the_table_of_peers_is_of_the_same_run(commit):
    cells = cells_in(TABLES[commit])
    _, lines = recorded(commit)
    for line in lines:
        heads, tokens, context, batch, page, order, name = (
            text.strip("'") for text in line["params"]
        )
        uneven = " uneven" if line["benchmark"].startswith("peers.UnevenBatch") else ""
        cell = (f"{heads} x {tokens}", context, f"{batch}{uneven}", page, order.replace("_", " "))
        assert cells[cell][name] == pytest.approx(line["median_s"] * 1e6, abs=0.051)


@pytest.mark.parametrize("commit", [LADDER, PEERS, NEWEST])
def test_every_line_is_of_one_clean_engine_on_one_gpu(commit):
    _, lines = recorded(commit)

    assert len({line["provenance"]["engine_tree"] for line in lines}) == 1
    assert {line["provenance"]["dirty"] for line in lines} == {False}
    assert len({line["device"]["gpu_uuid"] for line in lines}) == 1


def test_lines_that_may_hold_a_wait_are_counted():
    _, lines = recorded(LADDER)
    exposed = [line for line in lines if "exposed_enqueue" in line["validity"]]
    assert len(exposed) == 6
    assert "Six of the 42 lines" in (RECORDED / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "table", "num_rows"),
    [(RECORDED / "README.md", "peers.md", 15), (ROOT / "README.md", TABLES[NEWEST], 6)],
    ids=["recorded", "top"],
)
def test_documents_quote_the_table_of_peers(path, table, num_rows):
    rows, cells = documented(path), cells_in(table)

    assert len(rows) == num_rows
    for title, figures in rows:
        measured = cells[cell_of(title)]
        for column, name in COLUMNS.items():
            if column in figures:
                said = float(figures[column].replace(" ", ""))
                assert said == pytest.approx(measured[name], rel=5e-3, abs=0.06), (title, column)


def test_documents_count_the_cells_that_are_won(cells):
    stock = {
        cell: [us for name, us in found.items() if name not in OURS]
        for cell, found in cells.items()
    }
    trees = {
        cell: [found[name] for name in TREE_PEERS if name in found] for cell, found in cells.items()
    }
    won_trees = sum(found["cuda"] < min(trees[cell]) for cell, found in cells.items())
    won_all = sum(found["cuda"] < min(stock[cell]) for cell, found in cells.items())
    recorded = " ".join((RECORDED / "README.md").read_text(encoding="utf-8").split())

    assert (
        f"in {won_trees} of {len(cells)} cells, and of every peer, chains included, in {won_all}"
        in recorded
    )


def test_the_newest_race_is_won_in_every_cell_by_what_the_documents_say():
    cells = cells_in(TABLES[NEWEST])
    won = sum(
        found["cuda"] < min(us for name, us in found.items() if name not in OURS)
        for found in cells.values()
    )
    told = f"every peer, chains included, in {won} of {len(cells)} cells"

    assert won == len(cells) == 42
    assert told in (RECORDED / "README.md").read_text(encoding="utf-8").partition("`79f757f`")[2]
    top = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert told.replace("chains", "the chains") in top
