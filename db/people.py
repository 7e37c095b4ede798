"""Who may judge findings, and remarks that change no state."""

import datetime as dt
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.alerts import judge, step
from db.columns import AlertState, Role
from db.errors import AlertError
from db.models import Alert, Revision, User

MAY_JUDGE: Final = frozenset({Role.TRIAGER, Role.ADMIN})


def role_of(session: Session, email: str) -> Role:
    """Give somebody's role; whoever is not stored may look and no more."""
    return session.scalar(select(User.role).where(User.email == email)) or Role.VIEWER


def is_known(session: Session, email: str) -> bool:
    """Whether somebody has a role that was written down."""
    return session.scalar(select(User.id).where(User.email == email)) is not None


def set_role(session: Session, email: str, role: Role) -> None:
    """Store somebody with a role, or give them another; the caller commits."""
    found = session.scalar(select(User).where(User.email == email))
    if found is None:
        session.add(User(email=email, name=email.partition("@")[0], role=role))
    else:
        found.role = role


def triage(
    session: Session, alert_id: int, state: AlertState, *, author: str, note: str | None
) -> None:
    """Write down what somebody says of an alert; the state it has already is a mere remark.

    So of two people who say the same at once, both are on record. The caller holds the write lock
    and commits.

    Raises
    ------
    AlertError
        No alert has that number, or the author may not judge.
    """
    role = role_of(session, author)
    if role not in MAY_JUDGE:
        raise AlertError(f"author: expected somebody who may judge, got the {role} {author}")
    alert = session.get(Alert, alert_id)
    if alert is None or alert.state is not state:
        judge(session, alert_id, state, author=author, note=note)
        return
    now = dt.datetime.now(dt.UTC)
    user = session.scalar(select(User).where(User.email == author))
    step(session, alert, state, now, user=user, note=note)
    session.add(Revision(kind="triage", created_at=now, summary={"alert": alert_id}))
