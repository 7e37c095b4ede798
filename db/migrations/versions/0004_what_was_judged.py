"""what the detector has judged, so that only what changed is judged again.

Rules for this file: the code of the release before must still run on the result; additive
changes first, removals a release later; no import from db.models (they move on, this does not);
tables are never renamed; downgrade undoes upgrade and is tested on SQLite and PostgreSQL.

Everything is NULL at first, so the first detection judges every series.

Revision 0004, after 0003.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "series",
        sa.Column(
            "judged",
            sa.BigInteger(),
            nullable=True,
            comment="digest of what the detector saw last; NULL = judge it",
        ),
    )
    op.add_column(
        "change_points",
        sa.Column(
            "own_cause",
            sa.String(length=32),
            nullable=True,
            comment="cause told by its series alone; NULL = not found any more",
        ),
    )
    op.create_table(
        "detector_states",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column(
            "code",
            sa.BigInteger(),
            nullable=False,
            comment="of the detector; another one judges anew",
        ),
        sa.Column(
            "newest_commit_id",
            sa.Integer(),
            nullable=False,
            comment="last commit that was known",
        ),
        sa.Column(
            "commit_order",
            sa.BigInteger(),
            nullable=False,
            comment="of the commits up to that one",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_detector_states")),
    )


def downgrade() -> None:
    op.drop_table("detector_states")
    op.drop_column("change_points", "own_cause")
    op.drop_column("series", "judged")
