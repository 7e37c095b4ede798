"""A DDTree speculative-decoding engine. Read `engine/decoder.py` first."""
