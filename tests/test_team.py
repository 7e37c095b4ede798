"""The README's page for a team: its proxy, its provider and its service do what it says of them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import contextmanager

import pytest
import trustme
from playwright.sync_api import expect
from sqlalchemy.orm import Session

from dashboard.theme import PAGES
from db.alert_queries import alert
from db.session import open_database
from tests import pages_database as demo
from tests.browsing import CHROMIUM, ROOT, WIDE, Tab, browser, free_port, running
from tests.identity_provider import CLIENT, WELL_KNOWN, provided

# A name, which an address is not, that the browser takes for this machine.
HOST = "bench.localhost"
ANNA, BEN = demo.PEOPLE

CONFIGURATION = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {server}
}}
"""


def block(kind):
    """Give the README's only block of a kind."""
    (found,) = re.findall(rf"```{kind}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return found


@contextmanager
def proxied(folder, port, backend, below):
    """Run nginx as the README has it, with a certificate for the name."""
    certificate = trustme.CA().issue_cert(HOST)
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    told = block("nginx")
    for old, new in {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "bench.example.org;": f"{HOST};",
        "/etc/ssl/bench.example.org.pem": f"{folder}/both.pem",
        "/etc/ssl/bench.example.org.key": f"{folder}/both.pem",
        "127.0.0.1:8501": f"127.0.0.1:{backend}",
        "location /": f"location {below}",
    }.items():
        assert told.count(old) == 1, old
        told = told.replace(old, new)
    file = folder / "nginx.conf"
    file.write_text(CONFIGURATION.format(folder=folder, server=told))
    proxy = subprocess.Popen(["nginx", "-c", file, "-e", folder / "error.log"])
    try:
        yield
    finally:
        proxy.terminate()
        proxy.wait(timeout=30)


@contextmanager
def service(folder, url, backend, below):
    """Run the command of the README's unit, where the secrets are."""
    (told,) = re.findall(r"(?m)^ExecStart=\S+/ddtree-bench (.*)$", block("ini"))
    words = shlex.split(told.replace("8501", f"{backend}"))
    path = [] if below == "/" else ["--path", below]
    with running(
        [sys.executable, "-m", "dashboard.cli", *words, *path],
        f"http://127.0.0.1:{backend}{below}_stcore/health",
        folder / "server.log",
        cwd=folder,
        environment={**os.environ, "DDTREE_BENCH_DB": url, "PYTHONPATH": str(ROOT)},
    ):
        yield


def keep_secrets(folder, outside, issuer):
    """Write the README's secrets for this provider."""
    told = secrets_block()
    for old, new in {
        "https://bench.example.org/": outside,
        '"ddtree-bench"': f'"{CLIENT}"',
        "https://id.example.org/.well-known/openid-configuration": f"{issuer}{WELL_KNOWN}",
    }.items():
        assert told.count(old) == 1, old
        told = told.replace(old, new)
    (folder / ".streamlit").mkdir()
    (folder / ".streamlit" / "secrets.toml").write_text(told)


def secrets_block():
    text = (ROOT / "README.md").read_text()
    told = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    return next(one for one in told if "[auth]" in one)


def said_of(url, number):
    """Give who said what of an alert."""
    engine = open_database(url, must_exist=True)
    with Session(engine) as session:
        found = [(step.state, step.author, step.note) for step in alert(session, number).history]
    engine.dispose()
    return found


def sign_in(tab, address):
    """Open a page and press its button; the provider asks nobody anything and sends them back."""
    tab.open(address)
    tab.settle()
    tab.page.get_by_role("button", name="Sign in").click()
    tab.page.get_by_role("button", name="Sign out").wait_for()
    tab.settle()
    assert tab.page.url == address


@pytest.mark.browser
@pytest.mark.exhaustive
@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}")
@pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx")
@pytest.mark.parametrize("below", ["/", "/bench/"])
def test_a_team_reads_signs_in_and_judges_behind_the_proxy_of_the_readme(below, tmp_path):
    url = f"sqlite:///{tmp_path / 'demo.db'}"
    demo.build_with_alerts(url)
    port, backend = free_port(), free_port()
    outside = f"https://{HOST}:{port}{below}"
    with (
        provided() as provider,
        browser() as chromium,
        proxied(tmp_path, port, backend, below),
    ):
        keep_secrets(tmp_path, outside, provider.address)
        with service(tmp_path, url, backend, below):

            def reader():
                known = chromium.new_context(viewport=WIDE, ignore_https_errors=True)
                return Tab(known.new_page())

            tabs = [reader() for _ in range(4)]
            anybody_reads(tabs[0], outside)
            two_judge_at_once(tabs[1:3], provider, outside)
            an_unverified_address_is_nobodys(tabs[3], provider, outside)
            assert [tab.troubles for tab in tabs] == [[]] * 4
    assert {asked["redirect_uri"] for asked in provider.asked} == {f"{outside}oauth2callback"}
    assert said_of(url, 1) == [
        ("open", None, None),
        ("confirmed", ANNA, "seen on my machine"),
        ("expected", BEN, "larger pages, as wanted"),
    ]


def anybody_reads(tab, outside):
    for name in ("", *PAGES):
        tab.open(f"{outside}{name}")
        tab.settle()
        assert tab.page.url.startswith(f"{outside}{name}")
    expect(tab.page.get_by_role("button", name="Take it down")).to_have_count(0)
    # A use of a page goes through the proxy's WebSocket, and so does a link to another.
    tab.open(f"{outside}history")
    tab.act(tab.page.get_by_text("log", exact=True).first.click)
    assert "axis=log" in tab.page.url
    tab.page.get_by_test_id("stTopNavLink").filter(has_text="Alerts").first.click()
    expect(tab.page.locator("h1")).to_have_text("Alerts")
    assert tab.page.url == f"{outside}alerts"
    assert all(cookie["secure"] for cookie in tab.page.context.cookies())


def two_judge_at_once(tabs, provider, outside):
    """Both see the alert as it was; the second to send loses neither note."""
    said = [("confirmed", "seen on my machine"), ("expected", "larger pages, as wanted")]
    for tab, email, (state, note) in zip(tabs, (ANNA.title(), BEN), said, strict=True):
        provider.person = {"email": email, "email_verified": True}
        sign_in(tab, f"{outside}alerts?alert=1")
        expect(tab.page.get_by_text(f"{email.lower()}, triager")).to_be_visible()
        tab.page.get_by_text(state, exact=True).last.click()
        tab.page.get_by_label("Note").fill(note)
    for tab, (_, note) in zip(tabs, said, strict=True):
        tab.page.get_by_label("Note").press("Control+Enter")
        expect(tab.page.get_by_text("Taken down.")).to_be_visible()
        expect(tab.page.get_by_test_id("stText").get_by_text(note, exact=True)).to_be_visible()
        expect(tab.page.get_by_label("Note")).to_have_value("")
    first = tabs[0]
    names = {cookie["name"]: cookie for cookie in first.page.context.cookies()}
    assert "_streamlit_user" in names
    assert all(cookie["secure"] for cookie in names.values())
    first.page.get_by_role("button", name="Sign out").click()
    first.page.locator("h1", has_text="Overview").wait_for()
    first.open(f"{outside}alerts")
    expect(first.page.get_by_role("button", name="Sign in")).to_be_visible()
    assert "_streamlit_user" not in {one["name"] for one in first.page.context.cookies()}


def an_unverified_address_is_nobodys(tab, provider, outside):
    provider.person = {"email": ANNA, "email_verified": False}
    sign_in(tab, f"{outside}alerts")
    expect(tab.page.get_by_text("your provider vouches for no address of yours")).to_be_visible()
    expect(tab.page.get_by_role("button", name="Take it down")).to_have_count(0)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_takes_the_unit_of_the_readme(tmp_path):
    unit = tmp_path / "ddtree-bench.service"
    # The command is where the team installed it, and neither it nor its user is here.
    told = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", block("ini"))
    unit.write_text(told.replace("User=bench", "User=root"))

    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],
        check=False,
        capture_output=True,
        text=True,
    )

    assert (found.returncode, found.stderr) == (0, "")


def test_signing_in_comes_back_to_where_streamlit_waits():
    told = tomllib.loads(secrets_block())["auth"]

    assert told["redirect_uri"].endswith("/oauth2callback")
    assert set(told) == {
        *("redirect_uri", "cookie_secret", "client_id", "client_secret", "server_metadata_url")
    }
