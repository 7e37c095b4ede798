"""The pages as their command serves them, and a browser that reads them and says what it met."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Page, expect, sync_playwright
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

from dashboard.theme import SERVER_FLAGS

ROOT = Path(__file__).parent.parent
# A distribution's browser; none is ever downloaded.
CHROMIUM = Path("/usr/bin/chromium")
WIDE = {"width": 1400, "height": 1000}
NARROW = {"width": 390, "height": 844}
STICKS_OUT = "(m => m.scrollWidth - m.clientWidth)(document.querySelector('[data-testid=stMain]'))"
FINISHED = "[data-testid=stApp][data-test-script-state=notRunning]"
# The run has ended, and nothing stands for what is still to be drawn: a browser fetches the code of
# a widget or a chart after the run that sent it, and what stands for it is of another height.
WHOLE = """() => {
  const app = document.querySelector("[data-testid=stApp]")?.dataset;
  return app?.testConnectionState === "CONNECTED" && app.testScriptState === "notRunning"
    && !document.querySelector("[data-testid=stSkeleton], [data-stale=true]")
    && [...document.querySelectorAll("[data-testid=stVegaLiteChart]")]
      .every(chart => chart.querySelector("svg.marks"))
    && document.fonts.status === "loaded";
}"""
NEXT_FRAME = "() => new Promise(drawn => requestAnimationFrame(() => drawn()))"
LONGEST_START_S = 180  # of a server, on a busy machine
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# A busy machine draws a chart long after it has all that is in it.
expect.set_options(timeout=60_000)


@dataclass(frozen=True)
class Site:
    """A server of the pages."""

    address: str
    pid: int

    def cpu_s(self):
        """Say how much of a processor's time it has taken."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def memory_mib(self):
        """Say how much memory it holds."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@dataclass
class Tab:
    """A page of the browser with the errors that it met and the runs that it saw end."""

    page: Page
    troubles: list[str] = field(default_factory=list)
    runs: int = 0

    def __post_init__(self):
        self.page.set_default_timeout(60_000)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("console", self._said)
        self.page.on("request", self._asked)
        self.page.on("websocket", lambda socket: socket.on("framereceived", self._received))

    def open(self, address, until=FINISHED):
        """Go to an address; give the seconds until something is seen."""
        began = time.perf_counter()
        self.page.goto(address)
        self.page.locator(until).first.wait_for()
        return time.perf_counter() - began

    def settle(self):
        """Wait until the page is whole and nothing of it is an exception."""
        settle(self.page)

    def act(self, action):
        """Do something that runs the page again; give the seconds until it has been drawn."""
        before, began = self.runs, time.perf_counter()
        action()
        while self.runs == before:
            assert time.perf_counter() - began < 60, "nothing ran"
            self.page.wait_for_timeout(5)
        # The page may not have taken in yet what was received: it could still say that of the run before.
        self.page.evaluate(NEXT_FRAME)
        self.page.wait_for_selector(FINISHED)
        self.page.evaluate(NEXT_FRAME)
        return time.perf_counter() - began

    def _said(self, message):
        if message.type == "error":
            self.troubles.append(message.text)

    def _asked(self, request):
        if not _is_here(urlsplit(request.url).hostname):
            self.troubles.append(request.url)

    def _received(self, payload):
        self.runs += has_ended(payload)


def settle(page):
    """Wait until a page is whole and nothing of it is an exception."""
    expect(page.locator("h1")).to_be_visible()
    page.wait_for_function(WHOLE)
    page.evaluate(NEXT_FRAME)
    expect(page.locator("[data-testid=stException]")).to_have_count(0)


def _is_here(host):
    return host is None or host == "127.0.0.1" or host.endswith(".localhost")


def has_ended(payload):
    """Whether a message of the server says that a run of the page is over."""
    if isinstance(payload, str):
        return False
    return ForwardMsg.FromString(payload).WhichOneof("type") == "script_finished"


@contextmanager
def served(database, log, *flags):
    """Serve the pages as the command does, on a port of their own."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "streamlit", "run", str(ROOT / "dashboard" / "serving.py")),
        *(f"--server.port={port}", "--server.headless=true", "--server.fileWatcherType=none"),
        *("--server.address=127.0.0.1", *SERVER_FLAGS, *flags),
    ]
    address = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "DDTREE_BENCH_DB": database}
    with running(command, f"{address}/_stcore/health", log, ROOT, environment) as pid:
        yield Site(address, pid)


@contextmanager
def running(command, health, log, cwd, environment):
    """Run a server until it is needed no more, from when it says that it is well."""
    with log.open("wb") as output:
        server = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=output)
    try:
        _wait_until_healthy(server, health, log)
        yield server.pid
    finally:
        server.terminate()
        server.wait(timeout=30)


@contextmanager
def browser():
    """Start the browser."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=str(CHROMIUM),
            args=["--no-sandbox", "--disable-dev-shm-usage", "--js-flags=--expose-gc"],
        )
        yield started
        started.close()


def free_port():
    """Give a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_healthy(server, health, log):
    deadline = time.monotonic() + LONGEST_START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(health, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server did not answer in {LONGEST_START_S} s: {log.read_text()}")
