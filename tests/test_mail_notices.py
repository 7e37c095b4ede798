"""Mail about alerts, handed in to a real server: encrypted, logged in, and nothing lost on the way."""

import email
import email.policy
import shutil
import socket
import ssl

import pytest
import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from click.testing import CliRunner

from dashboard.cli import main
from tests.daily_history import History, sha

ME, YOU = "me@example.org", "you@example.org"
SECRET = "correct horse"


class Post:
    """Keeps what is handed in; refuses some addresses for a while."""

    def __init__(self):
        self.taken, self.refused, self.seen = [], set(), []

    async def handle_RCPT(self, _server, session, envelope, to, _options):  # noqa: N802 - its name
        if to in self.refused:
            return "550 no such box"
        envelope.rcpt_tos.append(to)
        self.seen.append(session)
        return "250 OK"

    async def handle_DATA(self, _server, _session, envelope):  # noqa: N802 - its name
        mail = email.message_from_bytes(envelope.content, policy=email.policy.default)
        self.taken.append((tuple(envelope.rcpt_tos), mail))
        return "250 OK"


def unused_port():
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]


@pytest.fixture
def authority(monkeypatch, tmp_path):
    made = trustme.CA()
    made.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return made


@pytest.fixture
def serve(authority):
    """Start servers; STARTTLS is offered where there is a certificate."""
    begun = []

    def start(post, *, certificate_for="localhost", needs_login=False):
        context = None
        if certificate_for is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert(certificate_for).configure_cert(context)

        def check(_server, _session, _envelope, _mechanism, data):
            known = (data.login, data.password) == (b"bench", SECRET.encode())
            return AuthResult(success=known, handled=False)

        server = Controller(
            post,
            hostname="127.0.0.1",
            port=unused_port(),
            tls_context=context,
            authenticator=check,
            auth_required=needs_login,
        )
        server.start()
        begun.append(server)
        return server.port

    yield start
    for server in begun:
        server.stop()


def on(path):
    """The command on a database."""
    return lambda *arguments: CliRunner().invoke(main, ["--db", f"sqlite:///{path}", *arguments])


@pytest.fixture(scope="module")
def confirmed(tmp_path_factory):
    """A database with one confirmed alert."""
    folder = tmp_path_factory.mktemp("confirmed")
    told, run = History(folder / "results").add(1.0, 12).add(1.2, 8), on(folder / "found.db")
    for asked in (("ingest", str(told.tree.root)), ("detect",)):
        assert run(*asked).exit_code == 0
    assert run("alerts", "set", "1", "confirmed", "--author", ME).exit_code == 0
    return folder / "found.db"


@pytest.fixture
def call(confirmed, tmp_path):
    return on(shutil.copy(confirmed, tmp_path / "found.db"))


def words(port, *to, scheme="smtp"):
    asked = [word for one in to for word in ("--mail", one)]
    server = ("--smtp", f"{scheme}://localhost:{port}", "--sender", "bench@example.org")
    return ("alerts", "notify", *asked, *server)


def test_a_confirmed_alert_is_mailed_encrypted_once_to_each(call, serve):
    post = Post()
    asked = words(serve(post), ME, YOU)

    first, second = call(*asked), call(*asked)

    assert first.exit_code == 0, first.output
    assert first.output == f"mail {ME}: 1 alert told\nmail {YOU}: 1 alert told\n"
    assert second.output.count("nothing new") == 2
    assert [to for to, _ in post.taken] == [(ME,), (YOU,)]
    assert all(session.ssl is not None for session in post.seen)
    _, mail = post.taken[0]
    assert mail["Subject"].startswith(f"ddtree-bench: 1 case slower on laptop since {sha(12)[:12]}")
    assert (mail["From"], mail["To"]) == ("bench@example.org", ME)
    assert "step.Step.time_step +20.0 %" in mail.get_content()


def test_the_log_in_comes_from_the_environment_and_is_never_shown(call, serve, monkeypatch):
    post = Post()
    asked = words(serve(post, needs_login=True), ME)
    monkeypatch.setenv("DDTREE_BENCH_SMTP_USER", "bench")
    monkeypatch.setenv("DDTREE_BENCH_SMTP_PASSWORD", "wrong horse")
    refused = call(*asked)
    monkeypatch.setenv("DDTREE_BENCH_SMTP_PASSWORD", SECRET)

    taken = call(*asked)

    assert (refused.exit_code, taken.exit_code) == (1, 0)
    assert "expected it to be taken, got status 535" in refused.output
    assert "horse" not in refused.output + taken.output
    assert len(post.taken) == 1


def test_who_is_refused_is_told_later_and_the_others_now(call, serve, httpserver):
    post = Post()
    post.refused = {ME}
    httpserver.expect_request("/").respond_with_data("ok")
    asked = (*words(serve(post), ME, YOU), "--webhook", httpserver.url_for("/"))

    first = call(*asked)
    post.refused = set()
    second = call(*asked)

    assert (first.exit_code, second.exit_code) == (1, 0)
    assert f"mail to {ME} by localhost: expected it to be taken" in first.output
    assert f"mail {YOU}: 1 alert told" in first.output
    assert f"mail {ME}: 1 alert told" in second.output
    assert [to for to, _ in post.taken] == [(YOU,), (ME,)]
    assert len(httpserver.log) == 1


@pytest.mark.parametrize("certificate_for", [None, "elsewhere.example.org"])
def test_mail_is_not_handed_to_a_server_that_is_not_the_one_it_claims_to_be(
    call, serve, certificate_for, monkeypatch
):
    """One offers no STARTTLS, one has another's certificate; the password is sent to neither."""
    post = Post()
    monkeypatch.setenv("DDTREE_BENCH_SMTP_USER", "bench")
    monkeypatch.setenv("DDTREE_BENCH_SMTP_PASSWORD", SECRET)
    refused = call(*words(serve(post, certificate_for=certificate_for), ME))

    assert refused.exit_code == 1
    assert "expected it to be taken, got SMTPNotSupportedError" in refused.output or (
        "got SSLCertVerificationError" in refused.output
    )
    assert (post.seen, post.taken) == ([], [])
    monkeypatch.delenv("DDTREE_BENCH_SMTP_USER")
    assert "1 alert told" in call(*words(serve(post), ME)).output


def test_nobody_at_home_is_one_line_and_the_alert_waits(call, serve):
    nobody = call(*words(1, ME))

    assert nobody.exit_code == 1
    assert "by localhost: expected it to be taken, got ConnectionRefusedError" in nobody.output
    assert "1 alert told" in call(*words(serve(Post()), ME)).output


def test_a_relay_in_the_same_house_takes_plain_mail(call, serve):
    post = Post()

    told = call(*words(serve(post, certificate_for=None), ME, scheme="smtp+plain"))

    assert (told.exit_code, len(post.taken)) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected --webhook or --mail, got neither"),
        (("--mail", ME), "expected --smtp and --sender beside it"),
        (words(25, "nobody")[2:], "expected an address such as me@example.org, got 'nobody'"),
        (words(25, "a@b\nBcc: c@d")[2:], "expected an address"),
        (words(99_999, ME)[2:], "expected a port from 1 to 65535"),
        (words(25, ME, scheme="http")[2:], "expected one of smtp, smtps, smtp+plain"),
        (
            ("--mail", ME, "--smtp", f"smtp://u:{SECRET}@h", "--sender", ME),
            "expected the log-in in DDTREE_BENCH_SMTP_USER",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anybody_is_told(call, arguments, message):
    refused = call("alerts", "notify", *arguments)

    assert refused.exit_code == 2
    assert message in refused.output
    assert SECRET not in refused.output


def test_a_log_in_is_not_sent_in_the_clear(call, serve, monkeypatch):
    monkeypatch.setenv("DDTREE_BENCH_SMTP_USER", "bench")

    refused = call(*words(serve(Post(), certificate_for=None), ME, scheme="smtp+plain"))

    assert refused.exit_code == 2
    assert "sends it in the clear" in refused.output


def test_a_dry_run_tells_nobody(call, serve):
    post = Post()
    asked = words(serve(post), ME)

    shown = call(*asked, "--dry-run")

    assert shown.output.startswith("1 case slower on laptop")
    assert post.taken == []
    assert "1 alert told" in call(*asked).output
