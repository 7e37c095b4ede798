"""states of alerts, and where they were sent.

Rules for this file: the code of the release before must still run on the result; additive
changes first, removals a release later; no import from db.models (they move on, this does not);
tables are never renamed; downgrade undoes upgrade and is tested on SQLite and PostgreSQL.

SQLite copies the two tables, as only a table's own text can change its CHECK. The release before
never set a state that is gone here: nothing but `open` was ever written.

Revision 0003, after 0002.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TABLES = ("alerts", "alert_events")
OLD = ("open", "acknowledged", "resolved", "withdrawn")
NEW = (
    "open",
    "acknowledged",
    "confirmed",
    "expected",
    "false positive",
    "fixed",
    "withdrawn",
)
RENAMED = {"resolved": "fixed"}
BACK = {
    "confirmed": "acknowledged",
    "expected": "resolved",
    "false positive": "resolved",
    "fixed": "resolved",
}


def upgrade() -> None:
    for table in TABLES:
        allow(table, (*OLD, *NEW))
        rewrite(table, RENAMED)
        allow(table, NEW)
    op.create_table(
        "alert_notices",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("alert_id", sa.Integer(), nullable=False),
        sa.Column(
            "channel", sa.String(length=500), nullable=False, comment="where to, without any secret"
        ),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["alert_id"],
            ["alerts.id"],
            name=op.f("fk_alert_notices_alert_id_alerts"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_notices")),
    )
    op.create_index(op.f("ix_alert_notices_alert_id"), "alert_notices", ["alert_id"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_alert_notices_alert_id"), table_name="alert_notices")
    op.drop_table("alert_notices")
    for table in TABLES:
        allow(table, (*OLD, *NEW))
        rewrite(table, BACK)
        allow(table, OLD)


def allow(table: str, states: tuple[str, ...]) -> None:
    """Let a table's CHECK take these states."""
    name = op.f(f"ck_{table}_state")
    listed = ", ".join(f"'{state}'" for state in dict.fromkeys(states))
    condition = f"state IN ({listed})"
    if op.get_bind().dialect.name == "postgresql":
        op.drop_constraint(name, table, type_="check")
        op.create_check_constraint(name, table, condition)
        return
    # The copy takes over no CHECK of the original, so that only the new one is left.
    with op.batch_alter_table(table, recreate="always") as batch_op:
        batch_op.create_check_constraint(name, condition)


def rewrite(table: str, states: dict[str, str]) -> None:
    rows = sa.table(table, sa.column("state", sa.String))
    for old, new in states.items():
        op.execute(rows.update().where(rows.c.state == old).values(state=new))
