"""The table of what was told to whom; part of `db.models`, where it is imported from."""

import datetime as dt

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from db.columns import Base, Key


class AlertNotice(Base):
    """An alert that was sent somewhere, so that it is sent there once."""

    __tablename__ = "alert_notices"

    id: Mapped[Key]
    alert_id: Mapped[int] = mapped_column(ForeignKey("alerts.id", ondelete="CASCADE"), index=True)
    channel: Mapped[str] = mapped_column(String(500), comment="where to, without any secret")
    sent_at: Mapped[dt.datetime]
