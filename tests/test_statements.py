"""Long lists of ids are cut into statements that both databases take."""

from itertools import chain

from sqlalchemy import func, select

from db.models import Result
from db.session import MOST_BOUND, chunks


def test_pieces_are_the_values_in_order_and_none_is_too_long():
    values = range(2 * MOST_BOUND + 1)

    pieces = chunks(values)

    assert list(chain.from_iterable(pieces)) == list(values)
    assert [len(piece) for piece in pieces] == [MOST_BOUND, MOST_BOUND, 1]
    assert chunks([]) == []


def test_a_statement_of_one_piece_is_taken(engine):
    query = select(func.count(Result.id)).where(Result.id.in_(range(MOST_BOUND)))

    with engine.connect() as connection:
        assert connection.scalar(query) == 0
