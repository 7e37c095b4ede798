"""Prepare the training text: two files of documents, each behind a zero byte.

    python -m engine.checkpoints.tiny.corpus --code DIR... --prose DIR... --out DIR --hold-out ...

Folders are searched for `.py` (code) and `.txt`, `.html` and `.rst` (prose; of HTML the text is
kept). Which folders is the caller's choice, see README.md for those of the shipped pair. Equal
documents are kept once; the order is that of their hashes, so that a limit takes a fair sample.
Files whose path ends in a held-out name are left out.
"""

import argparse
import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path

from engine.checkpoints.tiny.batches import SEPARATOR

CODE_SUFFIXES = (".py",)
PROSE_SUFFIXES = (".txt", ".html", ".rst")
LEAST_BYTES = 400  # shorter files are mostly notices and empty modules
_UNSHOWN = ("script", "style", "head", "nav")
_BLOCKS = ("p", "div", "li", "tr", "dt", "dd", "pre", "h1", "h2", "h3", "h4", "table")


class _Text(HTMLParser):
    """Collects the text a page shows."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.hidden += tag in _UNSHOWN
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in _UNSHOWN and self.hidden > 0

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def html_text(page: str) -> str:
    """Return the text of an HTML page, blocks on lines of their own."""
    parser = _Text()
    parser.feed(page)
    text = re.sub(r"[ \t\u00a0]+", " ", "".join(parser.parts))
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", text).strip() + "\n"


def read_documents(
    folders: Sequence[Path], suffixes: Collection[str], held_out: Collection[str]
) -> Iterator[bytes]:
    """Give the documents under `folders`, as UTF-8 without zero bytes."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            is_held_out = path.as_posix().endswith(tuple(held_out))
            if path.suffix not in suffixes or is_held_out or not path.is_file():
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few sources declare another encoding
            if path.suffix == ".html":
                text = html_text(text)
            yield text.replace("\r\n", "\n").encode().replace(SEPARATOR, b"")


def pack(documents: Iterator[bytes], limit_bytes: int) -> bytes:
    """Join different documents, each behind a separator, in the order of their hashes."""
    by_hash = {hashlib.sha256(text).digest(): text for text in documents}
    parts, size = [], 0
    for _, text in sorted(by_hash.items()):
        if LEAST_BYTES <= len(text) <= limit_bytes - size - len(SEPARATOR):
            parts.append(SEPARATOR + text)
            size += len(parts[-1])
    return b"".join(parts)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--code", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--prose", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--hold-out", nargs="*", default=[], metavar="PATH_END")
    parser.add_argument("--limit-mb", type=float, nargs=2, default=(25, 15), metavar=("C", "P"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, suffixes, limit in zip(
        ("code", "prose"), (CODE_SUFFIXES, PROSE_SUFFIXES), options.limit_mb, strict=True
    ):
        documents = read_documents(getattr(options, name), suffixes, options.hold_out)
        packed = pack(documents, round(limit * 1e6))
        (options.out / f"{name}.bin").write_bytes(packed)
        print(f"{name}.bin: {len(packed) / 1e6:.1f} MB, {packed.count(SEPARATOR)} documents")


if __name__ == "__main__":
    main()
