"""Write the held-out texts: an unseen novel's beginning, unseen code and predictable documents.

    python -m engine.checkpoints.tiny.held_out --code FILE --prose FILE

The predictable text is made, from a seed that training never uses.
"""

import argparse
from itertools import islice
from pathlib import Path

from engine.checkpoints.tiny.synthetic import documents

TEXTS = Path(__file__).parent / "texts"
NUM_BYTES = 48 * 1024  # of each text at most
SEED = 20_000
DOCUMENT_BYTES = 4096  # of each predictable document at least


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--code", type=Path, required=True, metavar="FILE")
    parser.add_argument("--prose", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    TEXTS.mkdir(exist_ok=True)
    for name in ("code", "prose"):
        text = getattr(options, name).read_bytes()[:NUM_BYTES]
        (TEXTS / f"{name}.txt").write_bytes(text[: text.rindex(b"\n") + 1])
    long = (text for text in documents(SEED) if len(text) >= DOCUMENT_BYTES)
    predictable = "\n".join(islice(long, NUM_BYTES // DOCUMENT_BYTES))
    predictable = predictable[:NUM_BYTES]
    (TEXTS / "predictable.txt").write_text(predictable[: predictable.rindex("\n") + 1])


if __name__ == "__main__":
    main()
