"""The kinds of bundled tasks: what is asked, what is there before, right and wrong commands, the right result."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["KINDS", "NEVER_TRAINED", "TRAINED", "Instance", "Kind"]


@dataclass(frozen=True, slots=True)
class Instance:
    """One problem of a kind.

    Attributes:
        instruction: what is asked.
        steps: the right commands, each with what it prints.
        wrong: a command that looks right and is not.
        seeds: files that are there before: content by path.
        result: exactly what must be there after: content by path, ``None`` for a folder.
    """

    instruction: str
    steps: tuple[tuple[str, str], ...]
    wrong: str
    seeds: Mapping[str, str] = field(default_factory=dict)
    result: Mapping[str, str | None] = field(default_factory=dict)


class Words:
    """Draws distinct words of one pool."""

    def __init__(self, rng: random.Random, pool: Sequence[str]) -> None:
        """``pool`` needs as many words as the hungriest kind draws (8)."""
        self.rng = rng
        self._left = rng.sample(list(pool), len(pool))

    def draw(self) -> str:
        """A word that was not drawn before."""
        return self._left.pop()

    def file(self) -> str:
        """A file name that was not drawn before."""
        return f"{self.draw()}.txt"

    def lines(self, low: int, high: int) -> list[str]:
        """Between ``low`` and ``high`` distinct words, in no order."""
        return [self.draw() for _ in range(self.rng.randint(low, high))]


def _text(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def _one(command: str) -> tuple[tuple[str, str], ...]:
    return ((command, ""),)


def _write(words: Words) -> Instance:
    name, word, other = words.file(), words.draw(), words.draw()
    return Instance(
        f"Write {word} to {name}",
        _one(f"echo {word} > {name}"),
        f"echo {other} > {name}",
        result={name: word},
    )


def _append(words: Words) -> Instance:
    name, old, word = words.file(), words.draw(), words.draw()
    return Instance(
        f"Append {word} to {name}",
        _one(f"echo {word} >> {name}"),
        f"echo {word} > {name}",
        seeds={name: _text(old)},
        result={name: _text(old, word)},
    )


def _copy(words: Words) -> Instance:
    old, new, word = words.file(), words.file(), words.draw()
    return Instance(
        f"Copy {old} to {new}",
        _one(f"cp {old} {new}"),
        f"mv {old} {new}",
        seeds={old: _text(word)},
        result={old: word, new: word},
    )


def _rename(words: Words) -> Instance:
    old, new, word = words.file(), words.file(), words.draw()
    return Instance(
        f"Rename {old} to {new}",
        _one(f"mv {old} {new}"),
        f"cp {old} {new}",
        seeds={old: _text(word)},
        result={new: word},
    )


def _delete(words: Words) -> Instance:
    name, other, word = words.file(), words.file(), words.draw()
    return Instance(
        f"Delete {name}",
        _one(f"rm {name}"),
        f"rm {name} {other}",
        seeds={name: _text(word), other: _text(word)},
        result={other: word},
    )


def _count(words: Words) -> Instance:
    name, out, lines = words.file(), words.file(), words.lines(2, 6)
    return Instance(
        f"Count the lines of {name} into {out}",
        _one(f"wc -l < {name} > {out}"),
        f"wc -c < {name} > {out}",
        seeds={name: _text(*lines)},
        result={name: _text(*lines), out: str(len(lines))},
    )


def _mkdir(words: Words) -> Instance:
    name = words.draw()
    return Instance(f"Create a folder {name}", _one(f"mkdir {name}"), f"touch {name}", result={name: None})


def _touch(words: Words) -> Instance:
    name = words.file()
    return Instance(f"Create an empty file {name}", _one(f"touch {name}"), f"mkdir {name}", result={name: ""})


def _move(words: Words) -> Instance:
    name, folder, inside, word = words.file(), words.draw(), words.file(), words.draw()
    return Instance(
        f"Move {name} into {folder}",
        _one(f"mv {name} {folder}/"),
        f"cp {name} {folder}/",
        seeds={name: _text(word), f"{folder}/{inside}": _text(word)},
        result={folder: None, f"{folder}/{inside}": word, f"{folder}/{name}": word},
    )


def _join(words: Words) -> Instance:
    first, second, out, one, two = words.file(), words.file(), words.file(), words.draw(), words.draw()
    return Instance(
        f"Join {first} and {second} into {out}",
        _one(f"cat {first} {second} > {out}"),
        f"cat {second} {first} > {out}",
        seeds={first: _text(one), second: _text(two)},
        result={first: one, second: two, out: _text(one, two)},
    )


def _upper(words: Words) -> Instance:
    name, out, word = words.file(), words.file(), words.draw()
    return Instance(
        f"Copy {name} to {out} in capitals",
        _one(f"tr a-z A-Z < {name} > {out}"),
        f"cp {name} {out}",
        seeds={name: _text(word)},
        result={name: word, out: word.upper()},
    )


def _grep(words: Words) -> Instance:
    name, out, lines = words.file(), words.file(), words.lines(3, 4)
    word = words.rng.choice(lines)
    return Instance(
        f"Find {word} in {name} and save the line to {out}",
        _one(f"grep {word} {name} > {out}"),
        f"cp {name} {out}",
        seeds={name: _text(*lines)},
        result={name: _text(*lines), out: word},
    )


def _read_mkdir(words: Words) -> Instance:
    name, word = words.file(), words.draw()
    return Instance(
        f"Create the folder named in {name}",
        ((f"cat {name}", word), (f"mkdir {word}", "")),
        f"mkdir {name.removesuffix('.txt')}",
        seeds={name: _text(word)},
        result={name: word, word: None},
    )


def _read_write(words: Words) -> Instance:
    name, out, word = words.file(), words.file(), words.draw()
    return Instance(
        f"Read {name} and write its word to {out}",
        ((f"cat {name}", word), (f"echo {word} > {out}", "")),
        f"echo {name} > {out}",
        seeds={name: _text(word)},
        result={name: word, out: word},
    )


def _read_touch(words: Words) -> Instance:
    name, target = words.file(), words.file()
    return Instance(
        f"Create the empty file named in {name}",
        ((f"cat {name}", target), (f"touch {target}", "")),
        f"cp {name} {target}",
        seeds={name: _text(target)},
        result={name: target, target: ""},
    )


def _sort(words: Words) -> Instance:
    name, out, lines = words.file(), words.file(), words.lines(3, 5)
    if lines == sorted(lines):
        lines.reverse()
    return Instance(
        f"Sort {name} into {out}",
        _one(f"sort {name} > {out}"),
        f"cp {name} {out}",
        seeds={name: _text(*lines)},
        result={name: _text(*lines), out: _text(*sorted(lines))},
    )


def _head(words: Words) -> Instance:
    name, out, lines = words.file(), words.file(), words.lines(3, 5)
    return Instance(
        f"Save the first line of {name} to {out}",
        _one(f"head -n 1 {name} > {out}"),
        f"tail -n 1 {name} > {out}",
        seeds={name: _text(*lines)},
        result={name: _text(*lines), out: lines[0]},
    )


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of task; ``trained``: part of training sets by default."""

    name: str
    make: Callable[[Words], Instance]
    trained: bool = True
    difficulty: str = "easy"


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("write", _write),
        Kind("append", _append),
        Kind("copy", _copy),
        Kind("rename", _rename),
        Kind("delete", _delete),
        Kind("count", _count),
        Kind("mkdir", _mkdir),
        Kind("touch", _touch),
        Kind("move", _move),
        Kind("join", _join),
        Kind("upper", _upper),
        Kind("grep", _grep),
        Kind("read_mkdir", _read_mkdir, difficulty="medium"),
        Kind("read_write", _read_write, difficulty="medium"),
        Kind("sort", _sort, trained=False),
        Kind("head", _head, trained=False),
        Kind("read_touch", _read_touch, trained=False, difficulty="medium"),
    )
}
"""Every kind by name."""

TRAINED: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if kind.trained)
NEVER_TRAINED: tuple[str, ...] = tuple(name for name, kind in KINDS.items() if not kind.trained)
