"""${message}.

Rules for this file: the code of the release before must still run on the result; additive
changes first, removals a release later; no import from db.models (they move on, this does not);
tables are never renamed; downgrade undoes upgrade and is tested on SQLite and PostgreSQL.

Revision ${up_revision}, after ${down_revision or "nothing"}.
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
