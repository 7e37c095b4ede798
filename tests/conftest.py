"""The option `--exhaustive`, the pages' demo, and databases: each a fresh copy with all tables.

They are on SQLite and, where installed, PostgreSQL.
"""

import getpass
import os
import pwd
import shutil
import subprocess
import tempfile
from itertools import count
from pathlib import Path

import psycopg
import pytest

from db.models import Commit
from db.session import open_database, upgrade
from tests.interpreter import save_repeated_work

DEBIAN_PROGRAMS = Path("/usr/lib/postgresql")
NUMBERS = count()


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="every prompt under every combination, not only its share (an hour of a core)",
    )


def pytest_configure():
    if os.environ.get("TRITON_INTERPRET") == "1":
        save_repeated_work()


def pytest_collection_modifyitems(config, items):
    """Tests marked `exhaustive` are there with the option alone."""
    if config.getoption("--exhaustive"):
        return
    long = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


@pytest.fixture(scope="session")
def is_exhaustive(request):
    return request.config.getoption("--exhaustive")


@pytest.fixture(scope="session")
def demo_site(tmp_path_factory):
    """The address of the demo's pages, for all tests of a browser that write nothing."""
    from tests import browsing, pages_database  # noqa: PLC0415 - no other test needs a browser

    folder = tmp_path_factory.mktemp("site")
    url = f"sqlite:///{folder}/demo.db"
    pages_database.build(url)
    with browsing.served(url, folder / "server.log") as server:
        yield server.address


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory):
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres_server():
    """A private server on a Unix socket; gives the options every URL of it ends in."""
    programs = _postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server programs (initdb, pg_ctl) are not installed")
    # The path of a socket must be short, so pytest's own folders will not do.
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as folder:
        user = _hand_over(folder)
        data = f"{folder}/data"
        _as(user, programs / "initdb", "-D", data, "-U", user, "-A", "trust", "-N", "-E", "UTF8")
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        start = ("-D", data, "-w", "-l", f"{folder}/log", "-o", options, "start")
        _as(user, programs / "pg_ctl", *start)
        try:
            yield f"host={folder}&user={user}"
        finally:
            _as(user, programs / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")


@pytest.fixture(scope="session")
def postgres_url(postgres_server):
    """One database for all tests that leave its tables as they are."""
    _create_database(postgres_server, "results")
    url = f"postgresql:///results?{postgres_server}"
    upgrade(url)
    return url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def empty_url(request, tmp_path):
    """A database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    server = request.getfixturevalue("postgres_server")
    name = f"empty_{next(NUMBERS)}"
    _create_database(server, name)
    return f"postgresql:///{name}?{server}"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request, tmp_path):
    """A database with all tables and nothing in them."""
    if request.param == "sqlite":
        path = tmp_path / "results.db"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
        return f"sqlite:///{path}"
    url = request.getfixturevalue("postgres_url")
    _empty(request.getfixturevalue("postgres_server"))
    return url


@pytest.fixture
def engine(database_url):
    engine = open_database(database_url, must_exist=True)
    yield engine
    engine.dispose()


def _postgres_programs():
    """The folder of the newest server programs; None where there are none."""
    found = sorted(
        DEBIAN_PROGRAMS.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]), reverse=True
    )
    on_path = shutil.which("initdb")
    if found:
        return found[0].parent
    return None if on_path is None else Path(on_path).parent


def _hand_over(folder):
    """Give the folder to whom the server may run as, which root may not; give that user."""
    if os.geteuid() != 0:
        return getpass.getuser()
    users = {entry.pw_name for entry in pwd.getpwall()}
    user = "postgres" if "postgres" in users else "nobody"
    shutil.chown(folder, user)
    return user


def _as(user, program, *arguments):
    prefix = ["runuser", "-u", user, "--"] if os.geteuid() == 0 else []
    subprocess.run(
        [*prefix, str(program), *arguments], check=True, cwd="/", stdout=subprocess.DEVNULL
    )


def _create_database(server, name):
    with _connection(server, "postgres") as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0".encode())


def _empty(server):
    """Leave the tables and no rows, ids counting from 1 again."""
    tables = ", ".join(Commit.metadata.tables)
    with _connection(server, "results") as connection:
        connection.execute("SET lock_timeout = '20s'")  # a test that left a connection open
        connection.execute(f"TRUNCATE {tables} RESTART IDENTITY CASCADE".encode())


def _connection(server, database):
    return psycopg.connect(f"dbname={database} {server.replace('&', ' ')}", autocommit=True)
