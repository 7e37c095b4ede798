"""A pass over what changed ends where a pass over everything would."""

import random
from contextlib import suppress

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.detection import detect_all
from db.exclusions import ExclusionError, Selection, exclude, include
from db.ingest import ingest
from db.ingest_settings import Renamed, Settings
from db.models import Alert, ChangePoint, Commit, Revision, Series
from tests.asv_trees import START_S, AsvTree, row

NAMES = ("step.Step.time_step", "tree.Build.time_build", "attention.Cold.time_cold", "moe.Moe.time")
DAYS, STEP = 18, 9
DAY_S = 86_400


def sha(day):
    return f"{round(10 * day):04x}" * 10


def level(day, ratio=1.1):
    return 0.010 * (1 + 7 * round(10 * day) % 5 / 2000) * (ratio if day >= STEP else 1.0)


class Store:
    """A tree of daily results, and what the detector found in it."""

    def __init__(self, engine, root):
        self.engine = engine
        self.tree = AsvTree(root)
        for name in NAMES:
            self.tree.benchmark(name)

    def measure(self, day, names=NAMES, *, ratio=1.1, later_s=0, **more):
        start_s = START_S + round(day * DAY_S) + later_s
        rows = {name: row(level(day, ratio), started_at=start_s * 1000) for name in names}
        date = (START_S + round(day * DAY_S)) * 1000
        self.tree.results(rows, sha(day), date=date, **more)

    def ingest(self, **more):
        return ingest(self.engine, [self.tree.root], **more)

    def judged(self):
        """Detect, and make sure that judging everything would have found the same."""
        report = detect_all(self.engine)
        found = self.found()
        everything = detect_all(self.engine, anew=True)
        assert everything.judged == everything.series
        assert (everything.new, everything.gone) == (0, 0)
        assert everything.causes == report.causes
        assert self.found() == found
        return report.judged

    def found(self):
        columns = [one for one in ChangePoint.__table__.columns if one.name != "id"]
        points = select(*columns).order_by(ChangePoint.series_id, ChangePoint.commit_id)
        alerts = select(Alert.change_point_id, Alert.state).order_by(Alert.id)
        with Session(self.engine) as session:
            revisions = session.scalar(select(func.count()).where(Revision.kind == "detect"))
            return session.execute(points).all(), session.execute(alerts).all(), revisions

    def causes(self):
        """Give the causes of what is found; what is not any more stays for its alert alone."""
        query = select(Series.id, ChangePoint.cause).join(ChangePoint)
        query = query.where(ChangePoint.own_cause.is_not(None))
        with Session(self.engine) as session:
            return dict(map(tuple, session.execute(query.order_by(Series.id))))


@pytest.fixture
def store(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Store(engine, tmp_path / "results")
    for day in range(DAYS):
        made.measure(day)
    made.ingest()
    assert made.judged() == len(NAMES)
    assert made.judged() == 0
    return made


def test_only_what_was_measured_since_is_judged(store):
    for day in range(DAYS, DAYS + 3):
        store.measure(day, NAMES[:1])
    store.ingest()

    assert store.judged() == 1


def test_results_that_come_late_out_of_order_and_again_are_judged(store):
    store.measure(STEP - 0.5, NAMES[:1])  # between commits that are there, which moves their places
    store.ingest()
    assert store.judged() == 1
    for day in (STEP - 1.5, STEP - 2.5, STEP - 0.7):
        store.measure(day, NAMES[1:3], ratio=1.0)
        store.ingest()
    assert store.judged() == 2
    store.measure(STEP, NAMES[2:3], ratio=1.3, later_s=600)
    store.ingest()
    assert store.judged() == 1


def test_a_case_too_short_to_tell_its_step_clears_the_machine_of_the_others(store):
    assert set(store.causes().values()) == {"hardware"}
    held = [
        exclude(store.engine, Selection(sha(day), benchmark=NAMES[0]), author="a", reason="b").id
        for day in range(DAYS)
        if not -3 <= day - STEP < 3
    ]

    assert store.judged() == 1
    assert set(store.causes().values()) == {"unknown"}  # of three cases that nobody judged

    for one in held:
        include(store.engine, one, author="a")
    assert store.judged() == 1
    assert set(store.causes().values()) == {"hardware"}


def test_what_windows_say_of_a_result_is_judged(store):
    clock = {"unit": "MHz", "n": 3, "min": 1400.0, "max": 1900.0}
    for day in range(DAYS):
        at = START_S + day * DAY_S
        store.tree.line(
            window_id=f"{day:032x}",
            commit=sha(day),
            benchmark=NAMES[1],
            started_at=at + 1.0,
            ended_at=at + 2.0,
            counters={"sm_clock_mhz": clock | {"median": 1900.0 if day < STEP else 1727.0}},
        )
    store.ingest()

    assert store.judged() == 1
    assert "clock" in store.causes().values()


def test_a_case_that_goes_on_with_other_dependencies_is_judged_as_a_whole(store):
    for day in range(DAYS, DAYS + 6):
        store.measure(day, NAMES[3:], ratio=1.4, requirements={"torch": "2.12"})
    store.ingest()

    assert store.judged() == 2  # its series before and after
    assert "dependency" in store.causes().values()


def test_commits_in_another_order_are_judged_all(store):
    with Session(store.engine) as session, session.begin():
        for commit in session.scalars(select(Commit)):
            commit.position = DAYS - commit.id
            commit.order_basis = "recorded"

    assert store.judged() == len(NAMES)


def test_a_case_under_another_name_is_judged(store):
    store.ingest(settings=Settings(renamed=(Renamed(NAMES[2], "attention.Warm.time_warm"),)))

    assert store.judged() == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
def test_after_any_changes_nothing_is_left_to_find(store, seed):
    chance = random.Random(seed)
    held = []
    for _ in range(30):
        act = chance.choice(["new", "new", "late", "again", "exclude", "include", "window"])
        names = chance.sample(NAMES, chance.randint(1, len(NAMES)))
        day = chance.randrange(DAYS)
        if act in {"new", "late", "again"}:
            at = {"new": day + DAYS, "late": day + chance.random(), "again": day}[act]
            ratio, later_s = chance.choice([1.0, 1.1, 1.4]), chance.randrange(1000)
            store.measure(at, names, ratio=ratio, later_s=later_s)
        elif act == "exclude":
            selection = Selection(sha(day), benchmark=names[0])
            with suppress(ExclusionError):  # all are out already
                held.append(exclude(store.engine, selection, author="a", reason="b").id)
        elif act == "include" and held:
            include(store.engine, held.pop(), author="a")
        store.ingest()
        if chance.random() < 0.5:
            store.judged()
    store.judged()
