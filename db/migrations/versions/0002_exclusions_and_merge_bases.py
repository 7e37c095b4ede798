"""exclusions and merge bases.

Rules for this file: the code of the release before must still run on the result; additive
changes first, removals a release later; no import from db.models (they move on, this does not);
tables are never renamed; downgrade undoes upgrade and is tested on SQLite and PostgreSQL.

SQLite copies `results`, as only a table's own text can name a foreign key there.

Revision 0002, after 0001.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

LISTING, LISTING_BEFORE = (
    "ix_results_series_id_commit_id_dirty_exclusion_id",
    "ix_results_series_id_commit_id_dirty",
)
FOREIGN_KEY = "fk_results_exclusion_id_exclusions"
KIND = "ingest, detect, triage, exclude, prune or rename"
KIND_BEFORE = "ingest, detect or triage"


def upgrade() -> None:
    op.create_table(
        "exclusions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("author", sa.String(length=200), nullable=False, comment="who left them out"),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("what", sa.Text(), nullable=False, comment="what was named, for people"),
        sa.Column("results", sa.Integer(), nullable=False, comment="how many were left out"),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("lifted_by", sa.String(length=200), nullable=True, comment="NULL = it holds"),
        sa.Column(
            "lifted_at", sa.DateTime(timezone=True), nullable=True, comment="NULL = it holds"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_exclusions")),
        sa.CheckConstraint(
            "(lifted_by IS NULL) = (lifted_at IS NULL)",
            name=op.f("ck_exclusions_lifted_by_someone"),
        ),
    )
    op.add_column(
        "commits",
        sa.Column(
            "merge_base",
            sa.String(length=64),
            nullable=True,
            comment="newest commit of the main branch that it holds; NULL = not known",
        ),
    )
    op.add_column(
        "commits",
        sa.Column("merge_base_position", sa.Integer(), nullable=True, comment="rank of merge_base"),
    )
    op.add_column(
        "commits",
        sa.Column(
            "side_branch",
            sa.String(length=200),
            nullable=True,
            comment="branch that has it where the main one has not; NULL = none, or not known",
        ),
    )
    with op.batch_alter_table("results") as batch_op:
        batch_op.add_column(
            sa.Column("exclusion_id", sa.Integer(), nullable=True, comment="NULL = it counts")
        )
        batch_op.create_foreign_key(FOREIGN_KEY, "exclusions", ["exclusion_id"], ["id"])
        batch_op.drop_index(LISTING_BEFORE)
        batch_op.create_index(
            LISTING, ["series_id", "commit_id", "dirty", "exclusion_id"], unique=False
        )
    comment_kind(KIND, KIND_BEFORE)


def downgrade() -> None:
    comment_kind(KIND_BEFORE, KIND)
    with op.batch_alter_table("results") as batch_op:
        batch_op.drop_index(LISTING)
        batch_op.create_index(LISTING_BEFORE, ["series_id", "commit_id", "dirty"], unique=False)
        batch_op.drop_constraint(FOREIGN_KEY, type_="foreignkey")
        batch_op.drop_column("exclusion_id")
    for name in ("side_branch", "merge_base_position", "merge_base"):
        op.drop_column("commits", name)
    op.drop_table("exclusions")


def comment_kind(new: str, old: str) -> None:
    if op.get_bind().dialect.name == "postgresql":  # SQLite has no comments
        op.alter_column(
            "revisions", "kind", existing_type=sa.String(16), comment=new, existing_comment=old
        )
