"""What the tiny pair commits: measured by a command, kept with every sample, told as it was."""

import json
import random
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest

from engine.checkpoints.tiny.commit_lengths import (
    HEAD,
    HERE,
    LONGEST,
    TEXTS,
    Cell,
    change_table,
    main,
    prompts,
    read_cells,
)
from engine.checkpoints.tiny.train import LENGTHS, MINUTES

ROOT = Path(__file__).parent.parent
CPU, H200 = (
    read_cells(HERE / "measured" / name) for name in ("cpu_float32.json", "h200_bfloat16.json")
)
PAGES = [HERE / "README.md", ROOT / "README.md"]


def lengths(cells, text, temperature, node_budget, context):
    (found,) = (
        cell.commit_lengths
        for cell in cells
        if (cell.text, cell.temperature, cell.node_budget, cell.context)
        == (text, temperature, node_budget, context)
    )
    return found


def quick(*flags):
    small = ("--windows", "2", "--budgets", "8", "--temperatures", "1", "--dtype", "float32")
    main([*small, "--new-tokens", "16", *flags])


def test_a_run_prints_a_row_for_each_combination_and_keeps_every_sample(tmp_path, capsys):
    file = tmp_path / "samples.json"

    quick("--contexts", "2", "20", "--json", str(file))
    printed = capsys.readouterr().out.splitlines()

    cells = read_cells(file)
    assert [(cell.text, cell.context) for cell in cells] == [
        (text, context) for context in (2, 20) for text in TEXTS
    ]
    assert all(len(cell.commit_lengths) == 2 for cell in cells)
    assert all(1.0 <= value <= 8.0 for cell in cells for value in cell.commit_lengths)
    assert printed == [*HEAD, *(cell.row for cell in cells), "", *change_table(cells)]


def test_a_kept_run_is_printed_again_as_it_was(tmp_path, capsys):
    file = tmp_path / "samples.json"
    quick("--contexts", "2", "--json", str(file))
    first = capsys.readouterr().out

    main(["--read", str(file)])

    assert capsys.readouterr().out == first


def test_a_row_has_mean_and_spread_of_the_windows():
    cell = Cell("code", 1.0, 16, 256, (2.0, 3.0, 7.0))

    assert cell.row == "| code | 1 | 16 | 256 | 4.00 | 2.65 | 3 |"


def test_windows_of_all_lengths_end_at_the_same_places():
    text = random.Random(0).randbytes(LONGEST + 1000)

    short, long = (prompts(text, context, 5) for context in (3, LONGEST))

    assert [window[-3:] for window in long] == short
    assert [len(window) for window in long] == [LONGEST] * 5
    assert short[-1] == list(text[-3:])
    assert len({tuple(window) for window in long}) == 5


def test_what_a_context_changes_is_paired_window_by_window():
    cells = [
        Cell("code", 1.0, 8, 256, (2.0, 3.0, 4.0)),
        Cell("code", 1.0, 16, 256, (3.0, 3.0, 3.0)),
        Cell("code", 1.0, 8, 8192, (3.0, 4.0, 5.0)),  # one more in every window
        Cell("code", 1.0, 16, 8192, (3.0, 1.0, 5.0)),
    ]

    assert change_table(cells) == [
        "| 8192 less 256 | T | budget 8 | budget 16 | all budgets |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| code | 1 | +1.00 ± 0.00 | +0.00 ± 1.15 | +0.50 ± 0.58 |",
    ]


def test_other_windows_are_not_paired():
    short, long = Cell("code", 0.0, 8, 256, (2.0,) * 32), Cell("code", 0.0, 8, 8192, (2.0,) * 8)

    assert change_table([short, long]) == []
    assert change_table([short]) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--windows", "1"), "windows: expected at least 2, got 1 (one sample has no spread)"),
        (("--windows", "0"), "windows: expected at least 2, got 0 (one sample has no spread)"),
        (("--new-tokens", "0"), "max_new_tokens: expected an integer >= 1, got 0"),
        (("--contexts", "8193"), "contexts: expected 1..8192, got 8193 "),
        (("--contexts", "0"), "contexts: expected 1..8192, got 0 "),
        (("--models", "nowhere"), "model directory: expected a config.json in nowhere/target"),
        (("--contexts", "20", "--budgets", "513"), "node_budget: expected an integer in 1..512"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_line(flags, message):
    with pytest.raises(SystemExit) as stop:
        main(flags)

    assert str(stop.value).startswith(message)
    assert "\n" not in str(stop.value)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_table_of_a_page_is_what_was_measured(path):
    row = r"^\| (predictable|code|prose) \| ([01]) ((?:\| \d\S* ± \S+ ){6})\|$"
    shown = re.findall(row, path.read_text(encoding="utf-8"), re.MULTILINE)

    assert shown == [
        (
            text,
            f"{temperature:g}",
            "".join(
                f"| {fmean(values):.2f} ± {stdev(values):.2f} "
                for cells, context in ((CPU, 256), (H200, 8192))
                for budget in (8, 16, 64)
                for values in [lengths(cells, text, temperature, budget, context)]
            ),
        )
        for text in TEXTS
        for temperature in (0.0, 1.0)
    ]


def test_the_page_of_the_pair_tells_what_context_changes_and_how_sure_that_is():
    page = (HERE / "README.md").read_text(encoding="utf-8")

    assert "\n".join(change_table([*CPU, *H200])) in page
    for text in TEXTS:
        cells = [(t, b) for t in (0.0, 1.0) for b in (8, 16, 64)]
        before, after = (
            [fmean(w) for w in zip(*(lengths(kept, text, *c, context) for c in cells), strict=True)]
            for kept, context in ((CPU, 256), (H200, 8192))
        )
        changes = [b - a for a, b in zip(before, after, strict=True)]
        error = stdev(changes) / len(changes) ** 0.5
        assert fmean(changes) > -error
        assert f"{fmean(changes):+.2f} ± {error:.2f}" in page


def test_the_page_of_the_pair_compares_predictable_text_with_prose():
    page = (HERE / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    ratios = [
        fmean(lengths(CPU, "predictable", 1.0, budget, 256))
        / fmean(lengths(CPU, "prose", 1.0, budget, 256))
        for budget in (8, 16, 64)
    ]

    assert min(ratios) >= 2.0
    assert "{:.1f}, {:.1f} and {:.1f} times".format(*ratios) in page


def test_samples_are_as_many_as_the_page_says():
    assert {len(cell.commit_lengths) for cell in (*CPU, *H200)} == {32}
    assert ({cell.context for cell in CPU}, {cell.context for cell in H200}) == ({256}, {8192})
    for name in ("cpu_float32.json", "h200_bfloat16.json"):
        assert json.loads((HERE / "measured" / name).read_text(encoding="utf-8"))[0].keys() == {
            *("text", "temperature", "node_budget", "context", "commit_lengths")
        }


@pytest.mark.parametrize("model", MINUTES)
def test_the_page_of_the_pair_tells_the_recipes_defaults(model):
    page = (HERE / "README.md").read_text(encoding="utf-8")
    words = [" ".join(map(str, values)) for values in (LENGTHS, MINUTES[model])]

    assert f"| {model} | {words[0]} | {words[1]} |" in page
