"""Text from elsewhere made safe and short for a page."""

import re

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|<>~$:-])")


def escaped(text: str) -> str:
    """Give text that Markdown shows as it is; subjects and parameters are anybody's."""
    return _MARKDOWN.sub(r"\\\1", text)


def count_text(count: int, noun: str) -> str:
    """Count things: "1 commit", "1,396 commits"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def case_name(benchmark: str, params: str) -> str:
    """Name a case as asv does."""
    return f"{benchmark}({params})" if params else benchmark
