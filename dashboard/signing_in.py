"""Who looks at a page: somebody an identity provider vouches for, one person on a laptop, nobody.

Streamlit does OpenID Connect; what somebody may do is said by the database, never by a token.
"""

import os
from dataclasses import dataclass

import streamlit as st

from dashboard.data import Source
from dashboard.theme import LOCAL_USER
from dashboard.words import escaped
from db.columns import Role
from db.people import MAY_JUDGE


@dataclass(frozen=True, slots=True)
class Reader:
    """Somebody who is signed in."""

    email: str
    role: Role

    @property
    def may_judge(self) -> bool:
        """Whether what they say of alerts is taken down."""
        return self.role in MAY_JUDGE


def reader(source: Source) -> Reader | None:
    """Give who looks at the page, with the role that the database has now; None for anybody."""
    email = _email()
    return None if email is None else Reader(email, source.role(email))


def greet(who: Reader | None) -> None:
    """Say who is signed in and what they may do, with a way to sign in or out."""
    if who is not None:
        may = "" if who.may_judge else "; the role viewer reads and no more"
        st.caption(f":material/person: {escaped(who.email)}, {who.role.value}{may}")
    elif _is_signed_in():
        st.caption(
            ":material/lock: Read-only: you are signed in, but your provider vouches for no "
            "address of yours"
        )
    elif is_configured():
        st.caption(":material/lock: Read-only until you sign in")
    else:
        st.caption(
            ":material/lock: Read-only: nobody can sign in here. `ddtree-bench dashboard --user "
            "EMAIL` serves one person on their own machine; the README says how to serve a team."
        )
    if is_configured() and LOCAL_USER not in os.environ:
        if _is_signed_in():
            st.button("Sign out", icon=":material/logout:", on_click=st.logout)
        else:
            st.button("Sign in", icon=":material/login:", on_click=st.login)


def is_configured() -> bool:
    """Whether an identity provider is named: without one Streamlit's user has no such field."""
    return "is_logged_in" in st.user


def _is_signed_in() -> bool:
    return is_configured() and bool(st.user.is_logged_in)


def _email() -> str | None:
    """Give the address that the provider has verified; an unverified one is anybody's."""
    local = os.environ.get(LOCAL_USER)
    if local:
        return local
    if not _is_signed_in():
        return None
    email = st.user.get("email")
    is_verified = st.user.get("email_verified", True) is True
    return str(email).lower() if email and is_verified else None
