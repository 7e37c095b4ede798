"""A team's database: on PostgreSQL the pages say and draw what they do on SQLite."""

import gc
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy.orm import Session

from dashboard.data import opened as opened_database
from dashboard.open_databases import close
from dashboard.theme import FIRST_PAGE, PAGES
from db.alert_queries import alert
from db.columns import AlertState
from db.session import open_database
from tests import pages_database as demo
from tests.test_pages import charts, opened, words

pytestmark = [pytest.mark.postgres, pytest.mark.exhaustive]

PAGES_AND_QUERIES = [
    *((name, {}) for name in (FIRST_PAGE, *PAGES)),
    ("history", {"benchmark": "generation.Generation.track_rate", "layout": "one chart"}),
    ("compare", {"base": demo.sha(3), "head": demo.sha(50)}),
    ("machines", {"machine": demo.REPRODUCTION}),
    ("diagnose", {"machine": demo.REPRODUCTION}),
]


@pytest.fixture(scope="module")
def urls(postgres_server, tmp_path_factory):
    """One database of each kind with the same rows."""
    with psycopg.connect(
        postgres_server.replace("&", " "), dbname="postgres", autocommit=True
    ) as server:
        server.execute("CREATE DATABASE pages")
    lite = f"sqlite:///{tmp_path_factory.mktemp('lite')}/demo.db"
    both = f"postgresql:///pages?{postgres_server}", lite
    for url in both:
        demo.build_with_alerts(url)
    yield both
    close()


@pytest.mark.parametrize(("name", "query"), PAGES_AND_QUERIES)
def test_a_page_says_and_draws_the_same_on_both(urls, name, query):
    ours, lite = (opened(name, url, **query) for url in urls)

    assert not ours.exception
    assert words(ours) == words(lite)
    assert len(charts(ours)) == len(charts(lite))
    tables = [[table.value for table in app.dataframe] for app in (ours, lite)]
    for one, other in zip(*tables, strict=True):
        assert one.astype(str).equals(other.astype(str))


def test_many_may_speak_of_one_alert_at_once(urls):
    def write(number):
        with opened_database(urls[0]) as source:
            state = (AlertState.ACKNOWLEDGED, AlertState.CONFIRMED)[number % 2]
            source.triage(1, state, author=demo.PEOPLE[number % 2], note=f"note {number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(24)))
    close()
    gc.collect()

    engine = open_database(urls[0], must_exist=True)
    with Session(engine) as session:
        notes = [step.note for step in alert(session, 1).history if step.note]
    engine.dispose()
    assert sorted(notes) == sorted(f"note {number}" for number in range(24))
