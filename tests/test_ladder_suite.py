"""The ladder's variants do the same work, wherever its rows lie, and wrong ones are not timed."""

import pytest
import torch

from benchmarks._interleaved import Absent, Contestant
from benchmarks._ladder_rungs import OP, Problem, _fault, _in_order, rungs
from benchmarks._ladder_table import main, readings, table
from benchmarks._sidecar import CaseFacts
from benchmarks.ladder import FACTORS, Ladder, visited

LAYOUTS = [(1, False), (1, True), (64, False), (64, True)]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr("benchmarks._ladder_rungs.DEVICE", "cpu")  # also where there is a GPU
    monkeypatch.setattr("benchmarks._ladder_rungs.DTYPE", torch.float32)


def rows_of(arguments):
    """The rows of the one sequence in the order of their positions."""
    pages = arguments["kv_pages"]
    count = int(arguments["context_lens"][0] + arguments["tree_sizes"][0])
    ids = arguments["page_table"][0, : -(-count // pages.shape[1])].long()
    return pages[ids].flatten(0, 1)[:count], ids


def test_the_ladder_has_each_factor_in_its_order_alone_and_removed():
    order = ["none", "read_once", "read_once+split", "read_once+split+packed"]
    order += ["read_once+split+packed+page_64", "+".join(FACTORS)]

    assert visited()[:6] == order
    assert set(FACTORS) <= set(visited())
    for factor in FACTORS:
        assert "+".join(other for other in FACTORS if other != factor) in visited()
    assert len(visited()) == len(set(visited())) == 14


def test_rounds_are_enough_for_everybody_to_follow_everybody():
    assert Ladder.num_rounds % (2 * len(visited())) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_holds_the_same_rows(layout):
    problem = Problem(130, value_dim=16, rope_dim=16)
    first, other = problem.arguments(*LAYOUTS[0]), problem.arguments(*layout)

    assert torch.equal(rows_of(other)[0], rows_of(first)[0])
    assert torch.equal(other["q"], first["q"])
    assert other["kv_pages"].shape[1] == layout[0]


@pytest.mark.parametrize("page_size", [1, 64])
def test_pages_in_order_follow_each_other_and_others_do_not(page_size):
    shuffled = Problem(300, value_dim=16, rope_dim=16).arguments(page_size, in_order=False)
    straight = _in_order(shuffled)

    ids = rows_of(straight)[1].tolist()
    assert ids == list(range(len(ids)))
    assert rows_of(shuffled)[1].tolist() != ids
    assert all(map(torch.equal, OP.reference(**straight), OP.reference(**shuffled)))


def test_a_wrong_result_is_told_from_a_right_one():
    expected = OP.reference(**Problem(40, value_dim=16, rope_dim=16).arguments(1, in_order=False))
    out, lse = (one.clone() for one in expected)

    assert _fault((out, lse), expected) is None
    assert "got 0 and 0.01" in _fault((out, lse + 0.01), expected)
    out[0, 3, 1] *= 1.001
    assert "got 0.001" in _fault((out, lse), expected)
    out[0, 3, 1] = torch.nan
    assert "got nan" in _fault((out, lse), expected)


def test_without_a_gpu_the_ladder_is_skipped(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "0")

    with pytest.raises(NotImplementedError, match="expected a CUDA device or TRITON_INTERPRET=1"):
        rungs(Problem(40, 16, 16), ["none"])
    with pytest.raises(SystemExit, match="2"):
        main(["--contexts", "40"])
    assert "expected a CUDA device" in capsys.readouterr().err


def test_a_factor_is_read_between_variants_that_differ_in_nothing_else():
    for factor in FACTORS:
        for without, with_it in readings(factor):
            assert set(with_it.split("+")) - {factor} == set(without.split("+")) - {"none"}
            assert {without, with_it} <= set(visited())


def test_the_table_says_what_a_factor_is_worth_round_by_round():
    samples_s = {name: [1e-3, 2e-3, 3e-3] for name in visited()}
    samples_s["split"] = [0.25e-3, 0.5e-3, 0.75e-3]
    facts = CaseFacts(kv_bytes=2_000_000, programs=8)
    racing = [Contestant(name, lambda: None, facts) for name in visited()]

    text = table([*racing, Absent("in_order+late", "no such thing")], samples_s)

    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert lines["none"] == ["2000.0", "1000.00", "1.0", "8"]
    assert lines["in_order+late"] == ["no", "such", "thing"]
    factors = text.split("removed")[1].split()
    assert factors[:8] == ["read_once", *["1.000x"] * 3, "split", "1.000x", "4.000x", "1.000x"]


def test_a_factor_whose_variants_were_not_timed_has_no_worth():
    samples_s = {"none": [1.0], "split": [0.5]}

    text = table([], samples_s)

    assert text.split("removed")[1].split()[:8] == [
        "read_once",
        *"---",
        "split",
        "-",
        "2.000x",
        "-",
    ]
