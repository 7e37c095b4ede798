"""What can go wrong between a result file and a page.

    DbError
    ├── DatabaseUrlError      the URL cannot be read or names an unknown kind of database
    ├── MissingDatabaseError  no database answers there
    ├── SchemaError           it answers, but its tables are not this version's
    ├── DamagedDatabaseError  it answers, but its tables cannot be read
    ├── BusyError             others write all the time
    ├── IngestError           a file cannot be read; nothing of the call was written
    ├── AlertError            no alert has that number, or it cannot go there
    ├── UnknownCommitError    no stored commit, or more than one, goes by that name
    └── UnknownSeriesError    no stored series has that id

No message ever carries a password.
"""


class DbError(Exception):
    """Root of everything `db` raises on purpose."""


class DatabaseUrlError(DbError):
    """The database URL cannot be read or its kind is not supported."""


class MissingDatabaseError(DbError):
    """No database answers at the URL."""


class SchemaError(DbError):
    """The database answers, but its tables are not those of this version."""


class DamagedDatabaseError(DbError):
    """The database answers, but some of its tables are gone or cannot be read."""


class BusyError(DbError):
    """Others held the database's write lock for as long as a writer waits."""


class IngestError(DbError):
    """A file cannot be read as what it claims to be; nothing of the call was written."""


class AlertError(DbError):
    """No alert has the given number, or it cannot go to the given state."""


class UnknownCommitError(DbError):
    """No stored commit, or more than one, goes by the given name."""


class UnknownSeriesError(DbError):
    """No stored series has the given id."""
