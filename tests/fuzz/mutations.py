"""Seeded mutations of files and JSON values; readers must return a result or raise a readable `CtxError`."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hf_ctxmodels.core.errors import CtxError

QUICK_SEEDS, MANY_SEEDS = 80, 4000
SEED_COUNTS = [QUICK_SEEDS, pytest.param(MANY_SEEDS, marks=pytest.mark.slow)]
_MAX_LINES, _MAX_CHARACTERS = 16, 4000  # of an error message; lists of valid names are long

DEEP = "<deeply nested lists>"  # replaced by `dump_json`
UNUSUAL_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 2**31, 10**20, -(10**20), 10**400),
    *(0.0, 0.5, -0.5, 1e308, float("nan"), float("inf")),
    *("", "0", "x", "\ud800", "é", "\0", "x" * 2000, "1e9"),
    *([], [[]], [None], [1, "x"], {}, {"a": []}, {"0": 1}),
)


@contextmanager
def assert_readable_errors(value: object) -> Iterator[None]:
    """Context in which a mutated value is read: only a short `CtxError` may be raised."""
    message = ""
    try:
        yield
    except CtxError as error:
        message = str(error)
    except Exception as error:
        raise AssertionError(f"{value!r:.500} ends in {type(error).__name__}: {str(error)[:300]}") from error
    message.encode()  # must be printable
    assert len(message) <= _MAX_CHARACTERS, message
    assert len(message.splitlines()) <= _MAX_LINES, message


def check_seeds(count: int, check: Callable[[random.Random], None]) -> None:
    """Run a check with `count` seeds; report the failing seeds grouped by failure."""
    failures: dict[str, list[int]] = {}
    for seed in range(count):
        try:
            check(random.Random(seed))
        except AssertionError as error:
            cause = error.__cause__
            failure = f"{type(cause).__name__}: {cause}" if cause else str(error)
            failures.setdefault(failure[:200], []).append(seed)
    report = "\n".join(f"seeds {seeds[:5]} ({len(seeds)}): {failure}" for failure, seeds in failures.items())
    assert not failures, report


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Apply one to three mutations: flipped bits; deleted, inserted, repeated or truncated bytes; huge numbers."""
    mutated = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        position = rng.randrange(len(mutated) + 1)
        length = rng.choice((1, 2, 5, 40))
        match rng.randrange(9):
            case 0 if mutated:
                mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
            case 1:
                del mutated[position : position + length]
            case 2:
                mutated[position:position] = bytes(rng.randrange(256) for _ in range(length))
            case 3:
                mutated[position:position] = mutated[position : position + length] * rng.randint(2, 50)
            case 4:
                del mutated[position:]
            case 5:
                digits = [number for number, byte in enumerate(mutated) if chr(byte).isdigit()]
                if digits:
                    number = rng.choice(digits)
                    mutated[number : number + 1] = b"9" * rng.choice((2, 12, 30, 5000))
            case 6:
                mutated[position:position] = rng.choice((b"\xff", b"\xe9", b"\0", b'"\\ud800"', b"\r", b"\n\n", b"\t"))
            case 7:
                mutated[position:position] = rng.choice((b"[" * 3000, b'{"a":' * 3000, b"NaN", b"null", b"-", b"1e999"))
            case _:
                mutated[:0] = rng.choice((b"\xef\xbb\xbf", b"\x1f\x8b\x08", b"\n", b"PAR1"))
    return bytes(mutated)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """Copy a JSON value and replace, delete or insert one to three of its elements."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        containers = [container for container in _containers(value) if container]
        if not containers:
            return _unusual_value(rng)
        container = rng.choice(containers)
        key = rng.choice(list(container) if isinstance(container, dict) else list(range(len(container))))
        match rng.randrange(8):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice(("strange", "", "\ud800", "0"))] = _unusual_value(rng)
            case 2:
                container[key] = [container[key]]
            case 3 if rng.random() < 0.1:
                container[key] = DEEP
            case _:
                container[key] = _unusual_value(rng)
    return value if rng.random() < 0.98 else _unusual_value(rng)


def _unusual_value(rng: random.Random) -> Any:
    """Copy of an unusual value; later mutations may change it."""
    return copy.deepcopy(rng.choice(UNUSUAL_VALUES))


def dump_json(value: Any) -> str:
    """Serialize a value with very large numbers and, for `DEEP`, 3000 nested lists."""
    return json.dumps(value).replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000)


def _containers(value: Any) -> Iterator[Any]:
    """Yield the value, if it is a list or mapping, and all lists and mappings in it."""
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)
