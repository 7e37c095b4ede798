"""What can go wrong with a run of asv; each message is one line for the user."""


class AsvRunError(Exception):
    """asv could not be run as asked; the message is one line for the user."""


class NotACheckoutError(AsvRunError):
    """The folder is not the root of a git checkout with an asv.conf.json."""


class RequestError(AsvRunError):
    """A profile, regular expression, machine label or time limit that cannot be used."""


class UnknownRangeError(AsvRunError):
    """The commits do not exist, or the range holds none."""


class AsvFailedError(AsvRunError):
    """asv ended without writing results."""
