"""Numbers are printed with a unit of their size, a sign, and a dash where they are missing."""

# ruff: noqa: RUF001 - signs of change and factors are asserted as they are printed

import math

import pytest

from dashboard.units import DisplayUnit, change_text, commit_text, display_unit, p_value_text
from db.numbers import count_text, digits

MS = DisplayUnit(1e-3, "ms")


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("seconds", 0.327, "327 ms"),
        ("seconds", 1.43, "1.43 s"),
        ("s", 20e-6, "20 µs"),
        ("seconds", 0.0, "0 s"),
        ("seconds", 1e-12, "0.001 ns"),
        ("bytes", 4.605e9, "4.289 GiB"),
        ("bytes", 280, "280 B"),
        ("tokens", 7.5, "7.5 tokens"),
        ("tokens/s", 12345.6, "12,346 tokens/s"),
        ("", 3.0, "3"),
        (None, 3.0, "3"),
    ],
)
def test_a_value_is_printed_in_a_unit_of_its_size(unit, value, text):
    assert display_unit(unit, value).text(value) == text


def test_what_is_missing_is_a_dash():
    assert [MS.text(None), MS.text(math.nan), change_text(None), p_value_text(math.nan)] == [
        "–"
    ] * 4
    assert commit_text(None) == "–"


@pytest.mark.parametrize(
    ("change", "text"),
    [(0.031, "+3.1 %"), (-0.5, "−50.0 %"), (21.0, "22×"), (1233.0, "1,234×"), (0.0, "+0.0 %")],
)
def test_a_change_is_printed_with_its_sign_and_a_large_one_as_a_factor(change, text):
    assert change_text(change) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4022.4, "4,022"),
        (999.6, "1,000"),
        (-4022.4, "−4,022"),
        (-2e-7, "−2e-07"),
        (14.07, "14.1"),
        (2e-7, "2e-07"),
    ],
)
def test_a_large_number_is_written_without_an_exponent(value, text):
    assert digits(value, 3) == text


@pytest.mark.parametrize(
    ("count", "words", "text"),
    [
        (1, ["case"], "1 case"),
        (0, ["case"], "0 cases"),
        (2000, ["case"], "2,000 cases"),
        (1, ["process", "processes"], "1 process"),
        (2, ["process", "processes"], "2 processes"),
    ],
)
def test_things_are_counted_by_their_noun(count, words, text):
    assert count_text(count, *words) == text


def test_a_p_value_is_never_printed_as_zero():
    assert p_value_text(0.0) == "< 1e-12"
    assert p_value_text(0.00031) == "0.00031"
