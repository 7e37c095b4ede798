"""What is measured first, and that a second call goes on."""

import math

from db.backfill import next_commit

NUM = 33


def order(level, num_commits=NUM, most=NUM, closed=()):
    """Measure commits one by one as told, and give their order."""
    known, taken = {}, []
    while len(taken) < most and (place := next_commit(num_commits, known, closed)) is not None:
        known[place] = {"case": level(place)}
        taken.append(place)
    return taken


def test_the_ends_come_first_and_everything_comes_once():
    taken = order(lambda _: 1.0)

    assert taken[:3] == [32, 0, 16]
    assert sorted(taken) == list(range(NUM))


def test_a_step_is_closed_in_on_before_the_rest_is_filled():
    for step in range(1, NUM):
        taken = order(lambda place, step=step: 1.1 if place >= step else 1.0)

        needed = 1 + max(taken.index(step), taken.index(step - 1))
        assert needed <= 2 + math.ceil(math.log2(NUM)) + 1


def test_what_is_known_is_not_measured_again():
    known = {0: {}, 4: {}, 2: {}}

    assert next_commit(5, known) == 3
    assert next_commit(5, {**known, 3: {}, 1: {}}) is None


def test_a_commit_that_cannot_be_measured_is_left_out():
    assert order(lambda _: 1.0, 5, closed=(2,)) == [4, 0, 3, 1]


def test_ranges_of_one_and_of_none():
    assert (order(lambda _: 1.0, 1), order(lambda _: 1.0, 0)) == ([0], [])
