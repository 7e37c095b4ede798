"""Processes that ingest: forked from one that has imported everything, so that each costs little.

A job is one line of JSON on standard input, its answer one on standard output. Several `trees` are
ingested one after the other; `kill_after_s` sends SIGKILL that long after the start.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _ingest(url, trees):
    """Ingest the trees as a process of its own does; give how many results were new."""
    engine = open_database(url, must_exist=True)
    return sum(ingest(engine, [Path(tree)]).new_results for tree in trees)


def _fork(job):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writing, str(_ingest(job["url"], job["trees"])).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return pid, reading


def _serve():
    for line in sys.stdin:
        jobs = json.loads(line)
        forked = [_fork(job) for job in jobs]
        answers = []
        for job, (pid, reading) in zip(jobs, forked, strict=True):
            if "kill_after_s" in job:
                time.sleep(job["kill_after_s"])
                os.kill(pid, signal.SIGKILL)
            with os.fdopen(reading) as pipe:
                text = pipe.read()
            _, status = os.waitpid(pid, 0)
            answers.append({"status": status, "new": int(text) if text else None})
        sys.stdout.write(json.dumps(answers) + "\n")
        sys.stdout.flush()


@contextmanager
def workers(folder):
    """Give a function from jobs to answers; all jobs of a call run at once."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )

    def run(*jobs):
        process.stdin.write(json.dumps(jobs) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    try:
        yield run
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    from db.ingest import ingest
    from db.session import open_database

    _serve()
