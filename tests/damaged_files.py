"""Files as no tool writes them: bytes flipped, lines cut, values of wrong kinds, huge and hostile."""

import copy
import json

HOSTILE = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -0.0, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), 1.5, "", "x" * 600, "x" * 20_000, "a\x00b"),
    *("\ud800", "\U0001f600", "é" * 300, "../../etc/passwd", "'; DROP TABLE results; --", "nan"),
    *([], {}, [[]], [None], [[None]], [float("nan")], [1, "a"], [[1.0], [2.0]], {"a": 1}),
    *([["1", "2"]] * 40, [[str(n) for n in range(400)]] * 4, [0.5] * 5, {"result": 1}, "12"),
)
DAMAGES = ("value", "value", "value", "key", "swap", "bytes", "cut", "repeat", "bits")


def damaged(content, rng):
    """Give a damaged copy of a JSON object as bytes."""
    how = rng.choice(DAMAGES)
    if how in {"value", "key", "swap"}:
        found = copy.deepcopy(content)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            _damage(found, how, rng)
        return json.dumps(found, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    raw = bytearray(json.dumps(content).encode())
    if how == "cut":
        return bytes(raw[: rng.randrange(len(raw))])
    if how == "repeat":
        start = rng.randrange(len(raw))
        piece = raw[start : start + rng.randrange(1, 40)]
        return bytes(raw[:start] + piece * rng.choice((2, 50, 3000)) + raw[start:])
    for _ in range(rng.choice((1, 3, 10))):
        place = rng.randrange(len(raw))
        raw[place] = rng.randrange(256) if how == "bytes" else raw[place] ^ (1 << rng.randrange(8))
    return bytes(raw)


def _damage(content, how, rng):
    places = list(_places(content))
    if not places:  # an earlier damage took everything
        return
    holder, key = rng.choice(places)
    if how == "key" and isinstance(holder, dict):
        value = holder.pop(key)
        if rng.random() < 0.5:
            holder[rng.choice(("", "x" * 700, "a\x00", "results", "version"))] = value
    elif how == "swap":
        other, place = rng.choice(places)
        holder[key] = copy.deepcopy(other[place])
    else:
        holder[key] = copy.deepcopy(rng.choice(HOSTILE))


def _places(content):
    """Every value's holder and key, those at the top as often as those in depth."""
    waiting = [content]
    while waiting:
        one = waiting.pop()
        keys = one if isinstance(one, dict) else range(len(one))
        for key in list(keys)[:60]:
            yield one, key
            if isinstance(one[key], (dict, list)):
                waiting.append(one[key])
