"""The README's page for a team: its proxy and its service are what those programs take."""

import re
import shutil
import subprocess
import time
import tomllib
import urllib.request
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect

from dashboard.theme import PAGES
from tests import pages_database as demo
from tests.browsing import CHROMIUM, ROOT, WIDE, Tab, browser, free_port, served

CONFIGURATION = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{ listen 127.0.0.1:{port}; {location} }}
}}
"""


def block(kind):
    """Give the README's only block of a kind."""
    (found,) = re.findall(rf"```{kind}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return found


@contextmanager
def proxied(location, folder):
    port = free_port()
    file = folder / "nginx.conf"
    file.write_text(CONFIGURATION.format(folder=folder, port=port, location=location))
    proxy = subprocess.Popen(["nginx", "-c", file, "-e", folder / "error.log"])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        proxy.terminate()
        proxy.wait(timeout=30)


def answers(address):
    for _ in range(50):
        try:
            with urllib.request.urlopen(address, timeout=2) as answer:
                return answer.status == 200
        except OSError:
            time.sleep(0.1)
    return False


@pytest.mark.browser
@pytest.mark.exhaustive
@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}")
@pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx")
@pytest.mark.parametrize("below", ["/", "/bench/"])
def test_pages_work_behind_the_proxy_of_the_readme(below, tmp_path):
    url = f"sqlite:///{tmp_path / 'demo.db'}"
    demo.build(url)
    with served(url, tmp_path / "server.log") as site, browser() as chromium:
        told = block("nginx").replace("http://127.0.0.1:8501", site.address)
        assert site.address in told
        if below != "/":
            told = told.replace("location /", f"location {below}").replace(
                f"{site.address};", f"{site.address}/;"
            )
        with proxied(told, tmp_path) as outside:
            assert answers(f"{outside}{below}")
            tab = Tab(chromium.new_page(viewport=WIDE))
            for name in ("", *PAGES):
                tab.open(f"{outside}{below}{name}")
                tab.settle()
                assert tab.page.url.startswith(f"{outside}{below}{name}")
            # A use of a page goes through the proxy's WebSocket, and so does a link to another.
            tab.open(f"{outside}{below}history")
            tab.act(tab.page.get_by_text("log", exact=True).first.click)
            assert "axis=log" in tab.page.url
            tab.page.get_by_test_id("stTopNavLink").filter(has_text="Alerts").first.click()
            expect(tab.page.locator("h1")).to_have_text("Alerts")
            assert tab.page.url == f"{outside}{below}alerts"
    assert tab.troubles == []


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
    secrets = next(
        told
        for told in re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "[auth]" in told
    )

    told = tomllib.loads(secrets)["auth"]

    assert told["redirect_uri"].endswith("/oauth2callback")
    assert set(told) == {
        *("redirect_uri", "cookie_secret", "client_id", "client_secret", "server_metadata_url")
    }
