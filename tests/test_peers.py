"""Implementations side by side: who gets which cell, with which arguments, and is it right.

The libraries need a GPU; stand-ins of their calls do not. What a stand-in is told must give the
op's own result, so a page table, a length or a mask that is off by one shows here. Cascades end in
a Triton kernel: one test of the ordinary run repeats this file in Triton's interpreter for them.
What is installed is checked on a GPU, against the same results (marker gpu).
"""

import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import peers
from benchmarks._device import DEVICE
from benchmarks._identity import SuiteError
from benchmarks._interleaved import Absent
from benchmarks._peer_cells import (
    CHAIN_PEERS,
    IMPLEMENTATIONS,
    OURS,
    PEERS_VARIABLE,
    TREE_PEERS,
    PeerCell,
    implementations,
    mask_of,
)
from benchmarks._peer_fa3 import ancestor_pages
from benchmarks._peer_inputs import OP, ancestor_mask, build_inputs
from benchmarks._peer_table import Row, table
from benchmarks._peer_trial import Job, Verdict, entries, rehearse
from benchmarks._peers import PEERS, PeerMissingError, PeerRefusedError, check, enter, obstacle
from tests.interpreter import assert_passes_in_the_interpreter
from tests.stock_calls import FlashInferMla, FlashMla, fa3_op

ROOT = Path(__file__).parent.parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CASCADES = ("fa3_cascade", "flashinfer_fa3_cascade")
CHAINS = ("flashmla", "fa3", "flashinfer_fa3", "flashinfer_fa2")
SMALL = PeerCell(2, 5, 70, 2, 64, "shuffled")
CELLS = [
    SMALL,
    replace(SMALL, page_size=1),
    replace(SMALL, page_order="in_order"),
    replace(SMALL, num_seqs=5, uneven=True),
    replace(SMALL, num_seqs=3, uneven=True, page_size=1, page_order="in_order"),
    replace(SMALL, tree_tokens=1),
    replace(SMALL, tree_tokens=33, num_heads=1, context_tokens=64),  # a second mask word
]
ON_GPU = [
    PeerCell(8, 9, 4096, 2, 64, "shuffled"),
    PeerCell(8, 9, 4096, 2, 1, "in_order"),
    PeerCell(8, 65, 1000, 3, 64, "shuffled", uneven=True),
    PeerCell(128, 1, 777, 1, 1, "shuffled"),
]
CALLS = [
    pytest.param(name, cell, id=f"{name}-{cell.label}")
    for name, cell in itertools.product(CASCADES if INTERPRETED else CHAINS, CELLS)
    if obstacle(name, cell) is None
]
MEASURED = [  # the cells of the table of one H200 that all of this began with
    *((8, tokens, 65536, 1) for tokens in (1, 9, 17, 33, 65)),
    *((64, tokens, 65536, 1) for tokens in (1, 9, 17)),
    *((8, tokens, 189440, 1) for tokens in (9, 33)),
    (8, 9, 4096, 8),
]
FA3_LIBRARY, FA3 = fa3_op()
STAND_INS = {"fa3": FA3, "flashmla": FlashMla, "flashinfer": FlashInferMla}
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ordinary = pytest.mark.skipif(INTERPRETED, reason="nothing of it runs in the interpreter")
every_cell = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.label)


@pytest.fixture
def stand_ins(monkeypatch):
    for name, peer in PEERS.items():
        library = STAND_INS.get(name.partition("_")[0])
        if library is not None:
            stood_in = replace(peer, load=lambda library=library: library)
            monkeypatch.setitem(PEERS, name, stood_in)


@pytest.fixture(autouse=True)
def nobodys_folder(monkeypatch):
    monkeypatch.delenv(PEERS_VARIABLE, raising=False)
    monkeypatch.delenv(peers.TABLE_VARIABLE, raising=False)


def small(cell):
    """The cell's operands on the CPU, narrower than Kimi's."""
    return build_inputs(cell, device="cpu", dtype=torch.float32, value_dim=32, rope_dim=16)


@pytest.mark.parametrize(("name", "cell"), CALLS)
@pytest.mark.usefixtures("stand_ins")
def test_what_a_stock_call_is_told_gives_the_ops_own_result(name, cell):
    inputs = small(cell)

    entrant = enter(name, inputs, inputs.expected(mask_of(name)))

    assert entrant.error_rel < 1e-5
    assert entrant.facts.bytes > entrant.facts.kv_bytes > 0


@ordinary
def test_everything_here_passes_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


@ordinary
def test_every_backend_of_the_op_is_compared():
    assert set(OURS) == set(OP.implementations) - {"reference"}
    assert set(PEERS) == {*TREE_PEERS, *CHAIN_PEERS}


@ordinary
def test_all_cells_of_the_first_table_are_measured_at_both_page_sizes():
    cells = {
        (cell.num_heads, cell.tree_tokens, cell.context_tokens, cell.num_seqs, cell.page_size)
        for cell in peers.all_cells()
        if cell.page_order == "shuffled" and not cell.uneven
    }

    assert {(*shape, page_size) for shape in MEASURED for page_size in (1, 64)} <= cells


@ordinary
def test_no_two_suites_have_a_case_in_common():
    groups = [group for suite in peers.SUITES for group in itertools.product(*suite().axes()[:-1])]

    assert len(set(groups)) == len(groups)


@ordinary
def test_nobody_is_compared_unless_asked_for():
    everybody, named = list(IMPLEMENTATIONS), {PEERS_VARIABLE: "folder"}

    assert implementations("quick", {}, has_driver=True) == []
    assert implementations("full", {}, has_driver=False) == []
    assert implementations("full", {}, has_driver=True) == everybody
    assert implementations("quick", named, has_driver=False) == everybody


@ordinary
def test_all_suites_are_measured_by_one_process():
    assert {suite.setup_cache for suite in peers.SUITES} == {peers._Peers.setup_cache}


@ordinary
def test_the_process_of_a_case_imports_no_torch():
    code = "import sys, benchmarks.peers; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@ordinary
@pytest.mark.parametrize("num_seqs", [1, 2, 5, 32])
def test_uneven_contexts_spread_around_their_mean(num_seqs):
    lengths = PeerCell(8, 9, 16384, num_seqs, 1, "shuffled", uneven=True).context_lens

    assert len(set(lengths)) == num_seqs
    assert all(16384 // 8 <= length <= 15 * 16384 // 8 for length in lengths)
    if num_seqs > 1:
        assert sum(lengths) / num_seqs == pytest.approx(16384, rel=1e-3)
        assert sorted(lengths) != list(lengths) or num_seqs == 2


@ordinary
@every_cell
def test_operands_are_such_as_a_stock_kernel_survives(cell):
    inputs = small(cell)

    assert inputs.kv_pages.isfinite().all()
    assert inputs.q.isfinite().all()
    assert ((inputs.page_table >= 0) & (inputs.page_table < len(inputs.kv_pages))).all()
    assert inputs.context_lens.tolist() == list(cell.context_lens)


@ordinary
def test_pages_in_order_hold_what_shuffled_ones_held():
    cell = replace(SMALL, page_size=1, num_seqs=3, uneven=True)
    shuffled, in_order = small(cell), small(replace(cell, page_order="in_order"))

    assert torch.equal(shuffled.expected("tree"), in_order.expected("tree"))
    lengths = in_order.lengths.tolist()
    slots = torch.cat([row[:n] for row, n in zip(in_order.slots, lengths, strict=True)])
    assert slots.tolist() == list(range(sum(lengths)))
    assert not torch.equal(shuffled.page_table, in_order.page_table)


@ordinary
@every_cell
def test_the_expected_result_is_the_ops_for_the_same_masks(cell):
    inputs = small(cell)
    out, _ = OP.reference(**inputs.arguments)

    torch.testing.assert_close(inputs.expected("tree"), out)


@ordinary
def test_a_token_of_the_tree_gets_a_page_for_each_of_its_ancestors():
    visible = torch.stack([ancestor_mask((-1, 0, 0, 1)), ancestor_mask((-1, 0, 1, 2))])
    slots = torch.tensor([[8, 9, 10, 11], [20, 30, 40, 50]], dtype=torch.int32)

    table, lengths = ancestor_pages(visible, slots)

    seen = [row[:n].tolist() for row, n in zip(table, lengths, strict=True)]
    assert seen[:4] == [[8], [8, 9], [8, 10], [8, 9, 11]]
    assert seen[4:] == [[20], [20, 30], [20, 30, 40], [20, 30, 40, 50]]
    assert table.dtype == lengths.dtype == torch.int32


@ordinary
def test_a_mask_that_was_not_asked_for_shows_at_a_long_context():
    inputs = build_inputs(
        PeerCell(8, 9, 32768, 1, 64, "shuffled"), device="cpu", dtype=torch.float32
    )
    expected, chain = inputs.expected("tree"), inputs.expected("chain")
    no_mask = inputs.expected("tree")
    no_mask[:, 3] = no_mask[:, 5]  # one token sees what another does

    assert check("exact", expected.bfloat16(), expected) < 4e-3
    for wrong in (chain.bfloat16(), no_mask.bfloat16()):
        with pytest.raises(PeerRefusedError, match=r"wrong result: expected rows within 0\.02"):
            check("other", wrong, expected)


@ordinary
def test_a_result_is_right_within_the_ops_tolerance():
    expected = torch.ones(1, 2, 3, 4)
    near, far = (expected.clone() for _ in range(2))
    near[0, 1, 2] *= 1.0156  # bfloat16 has it exactly
    far[0, 1, 2] *= 1.0234

    assert check("near", near.bfloat16(), expected) == pytest.approx(0.0156, abs=1e-3)
    with pytest.raises(PeerRefusedError, match=r"within 0\.02 of the definition, got 0\.0234"):
        check("far", far.bfloat16(), expected)


@ordinary
def test_a_result_of_another_shape_or_of_no_number_is_wrong():
    expected = torch.ones(1, 2, 3, 4)
    hollow = expected.clone()
    hollow[0, 1, 2, 3] = torch.nan

    with pytest.raises(PeerRefusedError, match=r"expected shape \[1, 2, 3, 4\], got \[2, 3, 4\]"):
        check("flat", expected[0], expected)
    with pytest.raises(PeerRefusedError, match="got inf"):
        check("hollow", hollow, expected)


@ordinary
def test_who_is_not_installed_or_takes_other_pages_is_refused_with_the_reason(monkeypatch):
    inputs = small(replace(SMALL, page_size=1))
    expected = inputs.expected("chain")

    with pytest.raises(PeerRefusedError, match="flashmla: takes pages of 64 rows, not of 1"):
        enter("flashmla", inputs, expected)
    with pytest.raises(PeerRefusedError, match="vllm_triton: takes pages of a multiple of 16"):
        enter("vllm_triton", inputs, expected)
    monkeypatch.setenv(PEERS_VARIABLE, str(ROOT / "tests"))
    with pytest.raises(PeerRefusedError, match=r"fa3: not installed \(fa3: expected .*_vllm_fa3"):
        enter("fa3", inputs, expected)


@ordinary
@pytest.mark.parametrize("name", ["sglang_triton", "flashinfer_fa2", "flashmla", "vllm_triton"])
def test_a_folder_that_lacks_a_peer_is_no_error_of_ours(monkeypatch, name, tmp_path):
    monkeypatch.setenv(PEERS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))

    with pytest.raises(PeerMissingError, match="expected it importable, found none"):
        PEERS[name].load()


@ordinary
def test_a_folder_that_is_none_is_named(monkeypatch):
    monkeypatch.setenv(PEERS_VARIABLE, "no/such/folder")

    with pytest.raises(PeerMissingError, match="expected a folder, got 'no/such/folder'"):
        PEERS["fa3"].load()


@ordinary
def test_what_a_stock_call_raises_becomes_one_line(monkeypatch):
    def load():
        raise RuntimeError("\nno kernel image\nsecond line")

    inputs = small(SMALL)
    monkeypatch.setitem(PEERS, "fa3", replace(PEERS["fa3"], load=load))

    with pytest.raises(PeerRefusedError, match=r"^fa3: RuntimeError: no kernel image$"):
        enter("fa3", inputs, inputs.expected("chain"))


@ordinary
def test_a_backend_of_ours_that_cannot_run_here_is_refused_in_one_line():
    inputs = small(SMALL)

    with pytest.raises(PeerRefusedError, match=r"^triton_split: BackendError: "):
        enter("triton_split", inputs, inputs.expected("tree"))


@ordinary
def test_a_job_that_ends_its_process_is_blamed_and_the_next_one_gets_another():
    jobs = [Job(SMALL, "nobody"), Job(replace(SMALL, tree_tokens=1), "nobody")]

    verdicts = rehearse(jobs)

    ended = "nobody: its process ended with status 1 (KeyError: 'nobody')"
    assert verdicts == dict.fromkeys(jobs, Verdict(reason=ended))


@ordinary
def test_a_rehearsal_that_begins_nothing_is_an_error_and_no_verdict():
    with pytest.raises(SuiteError, match=r"begin a job, got its process said nothing for 0.05 s"):
        rehearse([Job(SMALL, "fa3")], stall_s=0.05)


@pytest.mark.usefixtures("stand_ins")
def test_only_those_that_came_through_the_rehearsal_are_built(monkeypatch):
    monkeypatch.setattr("benchmarks._peer_trial.DEVICE", "cpu")
    monkeypatch.setattr("benchmarks._peer_trial.DTYPE", torch.float32)
    monkeypatch.setattr("benchmarks._peer_trial.build_inputs", lambda cell, **_: small(cell))
    verdicts = {
        Job(SMALL, "fa3"): Verdict(error_rel=0.0),
        Job(SMALL, "flashmla"): Verdict(reason="flashmla: ended its process"),
    }

    built, absent = entries(SMALL, ["fa3", "flashmla"], verdicts)

    assert built.body().shape == (2, 5, 2, 32)
    assert absent == Absent("flashmla", "flashmla: ended its process")


@ordinary
def test_without_a_gpu_every_case_is_skipped(monkeypatch):
    monkeypatch.setattr("benchmarks._device.DEVICE", "cpu")
    monkeypatch.setattr(peers.Tokens, "params", ([8], [9], [64], [1], [1], ["shuffled"], ["fa3"]))
    suite = peers.Tokens()

    stored = peers.measured_together([suite])

    with pytest.raises(NotImplementedError, match="compared on a GPU, and there is none"):
        suite.setup(stored, 8, 9, 64, 1, 1, "shuffled", "fa3")


def test_suites_are_rehearsed_measured_and_printed(monkeypatch, tmp_path):
    ours = ["triton_split"] if INTERPRETED else []
    names = [*ours, "fa3"]
    monkeypatch.setattr("benchmarks._device.DEVICE", "cpu")
    monkeypatch.setattr("benchmarks._ceilings.DEVICE", "cpu")
    monkeypatch.setattr(peers.Tokens, "params", ([1], [2], [5], [1], [1], ["shuffled"], names))
    monkeypatch.setattr(peers.Tokens, "num_rounds", 3)
    monkeypatch.setenv(peers.TABLE_VARIABLE, str(tmp_path / "table.md"))

    stored = peers.rehearsed_and_measured([peers.Tokens()])

    cell = (1, 2, 5, 1, 1, "shuffled")
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert [case[-1] for case in stored] == names
    assert "not installed" in stored[*cell, "fa3"].absent.reason
    assert "- 1x2-c5-b1-p1-shuffled: fa3: not installed" in text
    for name in ours:
        line = stored[*cell, name].line
        assert (line["n"], line["params"][-1]) == (3, repr(name))
        assert f"| 1 x 2 | 5 | 1 | 1 | shuffled | {name} | tree |" in text


@ordinary
def test_a_row_says_what_was_measured_in_the_units_of_its_column():
    row = Row(SMALL, "fa3", [9e-6, 10e-6, 10e-6, 12e-6, 11e-6], 20_000, 30_000_000, 1.5e-3)

    last = table([row]).splitlines()[-1]

    assert last.endswith("| fa3 | chain | 10.0 | 1.0 | 2 | 3.0 | 1.5e-03 |")


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("cell", ON_GPU, ids=lambda cell: cell.label)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_what_is_installed_agrees_with_the_op(name, cell, monkeypatch):
    if (folder := os.environ.get("DDTREE_TEST_PEERS")) is not None:
        monkeypatch.setenv(PEERS_VARIABLE, folder)
    inputs = build_inputs(cell, device=DEVICE, dtype=torch.bfloat16)
    try:
        entrant = enter(name, inputs, inputs.expected(mask_of(name)))
    except PeerRefusedError as refused:
        if "not installed" in str(refused) or obstacle(name, cell):
            pytest.skip(str(refused))
        raise

    assert math.isfinite(entrant.error_rel)
