"""Seeded damage to files and JSON values, and what must come of reading them: a result, or one screen."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hf_ctxmodels.core.errors import CtxError

QUICK, MANY = 200, 4000
COUNTS = [QUICK, pytest.param(MANY, marks=pytest.mark.slow)]
_LINES, _WIDTH = 16, 4000  # of one screen; messages that list what is known are long

DEEP: Any = []
for _ in range(3000):
    DEEP = [DEEP]
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 2**31, 10**20, -(10**20), 10**400),
    *(0.0, 0.5, -0.5, 1e308, float("nan"), float("inf")),
    *("", "0", "x", "\ud800", "é", "\0", "x" * 2000, "1e9"),
    *([], [[]], [None], [1, "x"], {}, {"a": []}, {"0": 1}),
)


@contextmanager
def one_screen(what: object) -> Iterator[None]:
    """Within, something strange is read: it may be refused by a `CtxError` of one screen, and by nothing else."""
    refused = ""
    try:
        yield
    except CtxError as error:
        refused = str(error)
    except Exception as error:
        raise AssertionError(f"{what!r:.500} ends in {type(error).__name__}: {str(error)[:300]}") from error
    refused.encode()  # it can be printed
    assert len(refused) <= _WIDTH, refused
    assert len(refused.splitlines()) <= _LINES, refused


def each_seed(count: int, check: Callable[[random.Random], None]) -> None:
    """Check so many seeds; name those that fail by the kinds of their failures."""
    failures: dict[str, list[int]] = {}
    for seed in range(count):
        try:
            check(random.Random(seed))
        except AssertionError as error:
            cause = error.__cause__
            kind = f"{type(cause).__name__}: {cause}" if cause else str(error)
            failures.setdefault(kind[:200], []).append(seed)
    shown = "\n".join(f"seeds {seeds[:5]} ({len(seeds)}): {kind}" for kind, seeds in failures.items())
    assert not failures, shown


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """One to three damages: bits, bytes left out, put in, repeated or cut off, numbers made huge, other encodings."""
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(damaged) + 1)
        length = rng.choice((1, 2, 5, 40))
        match rng.randrange(9):
            case 0 if damaged:
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            case 1:
                del damaged[place : place + length]
            case 2:
                damaged[place:place] = bytes(rng.randrange(256) for _ in range(length))
            case 3:
                damaged[place:place] = damaged[place : place + length] * rng.randint(2, 50)
            case 4:
                del damaged[place:]
            case 5:
                digits = [number for number, byte in enumerate(damaged) if chr(byte).isdigit()]
                if digits:
                    number = rng.choice(digits)
                    damaged[number : number + 1] = b"9" * rng.choice((2, 12, 30, 5000))
            case 6:
                damaged[place:place] = rng.choice((b"\xff", b"\xe9", b"\0", b'"\\ud800"', b"\r", b"\n\n", b"\t"))
            case 7:
                damaged[place:place] = rng.choice((b"[" * 3000, b'{"a":' * 3000, b"NaN", b"null", b"-", b"1e999"))
            case _:
                damaged[:0] = rng.choice((b"\xef\xbb\xbf", b"\x1f\x8b\x08", b"\n", b"PAR1"))
    return bytes(damaged)


def damaged_json(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one to three of its parts replaced, left out or put in."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        holders = [each for each in _parts(value) if each]
        if not holders:
            return _strange(rng)
        holder = rng.choice(holders)
        key = rng.choice(list(holder) if isinstance(holder, dict) else list(range(len(holder))))
        match rng.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(("strange", "", "\ud800", "0"))] = _strange(rng)
            case 2:
                holder[key] = [holder[key]]
            case 3 if rng.random() < 0.1:
                holder[key] = DEEP
            case _:
                holder[key] = _strange(rng)
    return value if rng.random() < 0.98 else _strange(rng)


def _strange(rng: random.Random) -> Any:
    """One of the strange values; a copy, since a later damage may be to it."""
    return copy.deepcopy(rng.choice(STRANGE))


def as_json(value: Any) -> str:
    """JSON of it, whatever it holds: very large numbers and deep lists too."""
    huge = {str(10**400): "1" + "0" * 400}
    depth = 3000
    try:
        text = json.dumps(value)
    except RecursionError:
        marked = json.dumps(_shallow(value))
        text = marked.replace('"deep"', "[" * depth + "]" * depth)
    for short, long in huge.items():
        text = text.replace(short, long)
    return text


def _shallow(value: Any) -> Any:
    if value is DEEP or (isinstance(value, list) and _depth(value) > 100):
        return "deep"
    if isinstance(value, dict):
        return {name: _shallow(each) for name, each in value.items()}
    return [_shallow(each) for each in value] if isinstance(value, list) else value


def _depth(value: Any) -> int:
    depth = 0
    while isinstance(value, list) and value:
        value, depth = value[0], depth + 1
    return depth


def _parts(value: Any) -> Iterator[Any]:
    """The lists and mappings in it, itself first."""
    if isinstance(value, dict | list) and _depth(value) < 100:
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _parts(each)
