"""Runs migrations on the connection that `db.session` hands over; there is no other way in."""

from typing import Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext

from db.columns import UtcDateTime
from db.models import Commit


def render_item(kind: str, item: object, autogen_context: AutogenContext) -> str | Literal[False]:
    """Write our own column type as what it stores, so that no migration imports the models."""
    del autogen_context
    is_ours = kind == "type" and isinstance(item, UtcDateTime)
    return "sa.DateTime(timezone=True)" if is_ours else False


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Commit.metadata,
    # SQLite alters a table by copying it; the same migration then runs on both databases.
    render_as_batch=True,
    compare_type=True,
    render_item=render_item,
)
with context.begin_transaction():
    context.run_migrations()
