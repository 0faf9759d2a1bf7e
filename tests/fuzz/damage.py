"""Damage to bytes and to JSON trees: what a fuzzer does to a good file before it is read."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

TOKENS = [
    b"NaN", b"-1", b"1e999", b"Infinity", b"-Infinity", b"null", b"true", b'""', b"[]", b"{}", b"[", b"}", b",", b"\n",
    b"\r\n", b"\0", b"\xff", b"\xef\xbb\xbf", b'"', b"9" * 30, b"0", b"1.5", b"2024-02-30", b"\x1b[2J", b";", b"\t",
    b": ", b"- ", b"&a ", b"*a", b"!!python/object:os.system ", b"<<: *a", b"? ", b"| ", b"..", b"=", b"<=", b":log",
    b"\xe2\x80\xae", b"\xed\xa0\x80", b"1_0", b"0x10", b"9" * 5000, b"[" * 3000, b"{\"a\":" * 1500,
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 0.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"),
    2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63), "", "x", "1", "nan", "a100", "\x1b[31m",
    "<script>alert(1)</script>", "\u202e", "\ud800", "a" * 3000, [], {}, [0], [None], [[]], {"x": 1}, {"": None},
]  # fmt: skip


def damaged_bytes(rng: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """`data` with a few bytes or tokens changed, cut, repeated or spliced with `other`."""
    out = bytearray(data)
    if other and rng.random() < 0.1:
        out[rng.randrange(len(out) + 1) :] = other[rng.randrange(len(other)) :]
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(out) + 1)
        kind = rng.random()
        if kind < 0.4:
            out[at : at + rng.choice((0, 1, 4, 10))] = rng.choice(TOKENS)
        elif kind < 0.7 and out:
            out[at % len(out)] = rng.randrange(256)
        elif kind < 0.85:
            del out[at : at + rng.randrange(40)]
        else:
            out[at:at] = out[at : at + rng.randrange(200)]
    if rng.random() < 0.1:
        del out[rng.randrange(len(out) + 1) :]
    return bytes(out)


def damaged_tree(rng: random.Random, text: bytes) -> bytes:
    """A JSON document with some values replaced, keys dropped, renamed or nested; bytes if it is no JSON."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return damaged_bytes(rng, text)
    holder = [tree]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        _damage(rng, holder)
    return json.dumps(holder[0]).encode("utf-8", "surrogatepass")


def _damage(rng: random.Random, holder: list[Any]) -> None:
    """Walk down from `holder` at random and change what is found there."""
    parent: Any = holder
    key: Any = 0
    while True:
        here = parent[key]
        if not isinstance(here, dict | list) or not here or rng.random() < 0.12:
            break
        parent, key = here, rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
    kind = rng.random()
    if kind < 0.6 or parent is holder:
        parent[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind < 0.7 and isinstance(parent[key], int | float):
        parent[key] *= -1 if rng.random() < 0.5 else rng.choice((0, 10**6))
    elif kind < 0.8:
        del parent[key]
    elif kind < 0.9:
        parent[key] = [parent[key]] if rng.random() < 0.5 else {"a": parent[key]}
    elif isinstance(parent, dict):
        parent[rng.choice(("x", "", "schema", str(key) + " "))] = parent.pop(key)
    else:
        parent.append(copy.deepcopy(parent[key]))
