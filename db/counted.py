"""Which results count: those of clean code that nobody left out."""

from sqlalchemy import ColumnElement, and_

from db.models import Result


def counts(*, include_dirty: bool = False) -> ColumnElement[bool]:
    """Give the condition under which a result is part of a history or a comparison."""
    held = Result.exclusion_id.is_(None)
    return held if include_dirty else and_(Result.dirty.is_(False), held)
