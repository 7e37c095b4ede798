"""Sends findings by mail; who logs in is read from the environment and never shown."""

from __future__ import annotations

import os
import smtplib
import ssl
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.errors import HeaderParseError
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import localtime, make_msgid
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from dashboard.cli_exit import RefusedError
from dashboard.cli_notices import TIMEOUT_S, NoticeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PORTS: Final = {"smtp": 587, "smtps": 465, "smtp+plain": 25}  # by the scheme of the address
USER: Final = "DDTREE_BENCH_SMTP_USER"
PASSWORD: Final = "DDTREE_BENCH_SMTP_PASSWORD"  # noqa: S105 - the name of a variable


@dataclass(frozen=True, slots=True)
class MailServer:
    """Where mail is handed in, and how."""

    scheme: str  # smtp: STARTTLS or nothing; smtps: TLS from the start; smtp+plain: neither
    host: str
    port: int
    user: str | None
    password: str = field(repr=False)


def server_of(url: str, environ: Mapping[str, str] = os.environ) -> MailServer:
    """Read an address such as `smtp://mail.example.org:587`, and the log-in beside it.

    Raises
    ------
    RefusedError
        It is no such address, carries a log-in itself, or would send one in the clear.
    """
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname or parts.path.strip("/"):
        raise RefusedError(f"smtp: expected one of {', '.join(PORTS)}, as in smtp://HOST:PORT")
    if parts.username is not None or parts.password is not None:
        raise RefusedError(f"smtp: expected the log-in in {USER} and {PASSWORD}, got it in the URL")
    try:
        port = parts.port or PORTS[parts.scheme]
    except ValueError:
        raise RefusedError("smtp: expected a port from 1 to 65535, got another one") from None
    user = environ.get(USER) or None
    if user is not None and parts.scheme == "smtp+plain":
        raise RefusedError(f"smtp: expected no {USER}, as {parts.scheme} sends it in the clear")
    return MailServer(parts.scheme, parts.hostname, port, user, environ.get(PASSWORD, ""))


def address(text: str) -> str:
    """Check one address.

    Raises
    ------
    RefusedError
        It is none.
    """
    try:
        found = Address(addr_spec=text)
    except (HeaderParseError, ValueError, IndexError):
        found = Address()
    if not found.username or not found.domain:
        raise RefusedError(f"mail: expected an address such as me@example.org, got {text!r}")
    return text


def message(text: str, *, sender: str, to: str) -> EmailMessage:
    """Make a mail of a notice; its first line is the subject as well."""
    mail = EmailMessage()
    mail["Subject"] = f"ddtree-bench: {' '.join(text.splitlines()[0].partition(':')[0].split())}"
    mail["From"], mail["To"] = sender, to
    mail["Date"] = localtime()
    mail["Message-ID"] = make_msgid(domain=sender.rpartition("@")[2])
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(text)
    return mail


def send(server: MailServer, mail: EmailMessage) -> None:
    """Hand a mail in.

    Raises
    ------
    NoticeError
        The server is not there, is not the one it claims to be, or does not take it.
    """
    try:
        with _connection(server) as connection:
            connection.send_message(mail)
    except (smtplib.SMTPException, OSError) as error:
        status = getattr(error, "smtp_code", None)
        got = type(error).__name__ if status is None else f"status {status}"
        raise NoticeError(
            f"mail to {mail['To']} by {server.host}: expected it to be taken, got {got}"
        ) from None


@contextmanager
def _connection(server: MailServer) -> Iterator[smtplib.SMTP]:
    """Connect as the address says, encrypted before anybody logs in."""
    trusted = ssl.create_default_context()
    made = (
        smtplib.SMTP_SSL(server.host, server.port, timeout=TIMEOUT_S, context=trusted)
        if server.scheme == "smtps"
        else smtplib.SMTP(server.host, server.port, timeout=TIMEOUT_S)
    )
    with made as connection:
        if server.scheme == "smtp":
            connection.starttls(context=trusted)
        if server.user is not None:
            connection.login(server.user, server.password)
        yield connection
