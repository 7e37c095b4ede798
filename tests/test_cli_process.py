"""The command as a process of its own."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from dashboard.cli_exit import ExitCode
from db.session import upgrade
from tests.command_on_tree import BASE, SLOWER, small_tree, strict

ROOT = Path(__file__).parent.parent
LONGEST_S = 180  # of a process that begins, on a busy machine


def process(*arguments, cwd, **environment):
    known = {name: value for name, value in os.environ.items() if name != "DDTREE_BENCH_DB"}
    return subprocess.run(
        [sys.executable, "-m", "dashboard.cli", *arguments],
        cwd=cwd,
        env={**known, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )


def test_process_takes_the_database_from_the_environment(tmp_path):
    url = f"sqlite:///{tmp_path / 'env.db'}"
    tree = small_tree(tmp_path / "results").root

    stored = process("ingest", str(tree), cwd=tmp_path, DDTREE_BENCH_DB=url)
    compared = process("compare", BASE, SLOWER, "--json", cwd=tmp_path, DDTREE_BENCH_DB=url)

    assert stored.returncode == ExitCode.OK, stored.stderr
    assert compared.returncode == ExitCode.REGRESSION
    assert strict(compared.stdout)["verdict"] == "regression"
    assert compared.stderr == ""


def test_process_without_a_database_ends_in_one_line(tmp_path):
    done = process("compare", BASE, SLOWER, cwd=tmp_path)

    assert done.returncode == ExitCode.BAD_INPUT
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_reading_results_needs_neither_torch_nor_streamlit(tmp_path):
    code = (
        "import sys, dashboard.cli; heavy = {'torch', 'triton', 'streamlit', 'altair', 'pynvml'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )

    assert done.returncode == 0, done.stderr


def test_dashboard_answers_on_its_port_below_its_path_and_stops_when_told(tmp_path):
    url = f"sqlite:///{tmp_path / 'bench.db'}"
    upgrade(url)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dashboard.cli", "--db", url]
    command += ["dashboard", "--headless", "--port", str(port), "--path", "/bench/"]
    server = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    try:
        outside = f"http://127.0.0.1:{port}"
        assert answers(f"{outside}/bench/_stcore/health", server)
        with httpx.Client(base_url=outside, timeout=LONGEST_S) as client:
            page = client.get("/bench/history").text
            (file,) = re.findall(r'src="\./(static/[^"]+\.js)"', page)
            kept = client.get(f"/bench/{file}").headers["cache-control"]
            assert kept == "public, immutable, max-age=31536000"
            assert client.get("/bench/overview").headers["location"] == "./"
            assert client.get(f"/{file}").status_code == 404
    finally:
        server.terminate()
        server.wait(timeout=LONGEST_S)


def answers(address, server):
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            return httpx.get(address).text == "ok"
        except httpx.TransportError:
            time.sleep(0.2)
    return False
