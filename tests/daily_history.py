"""A tree of results that grows by days at given levels."""

from db.detection import detect_all
from db.ingest import ingest
from tests.asv_trees import BENCHMARK, START_S, AsvTree, row

DAY_S = 86_400


def sha(day):
    return f"{day:02x}" * 20


class History:
    """A tree that grows by days at given levels."""

    def __init__(self, root):
        self.tree = AsvTree(root).benchmark()
        self.days = 0

    def add(self, ratio, days):
        for _ in range(days):
            day, self.days = self.days, self.days + 1
            started_ms = (START_S + day * DAY_S) * 1000
            value = 0.010 * (1 + day % 3 / 1000) * ratio
            rows = {BENCHMARK: row(value, started_at=started_ms)}
            self.tree.results(rows, sha(day), date=started_ms)
        return self

    def detect(self, engine):
        ingest(engine, [self.tree.root])
        return detect_all(engine)
