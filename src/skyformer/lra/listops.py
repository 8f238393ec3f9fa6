"""ListOps: LRA's notation and files, the value of an expression, and a generator.

`tokenize` and `evaluate` read the notation of LRA's files, `( ( [MAX 2 ) 9 ) ] )`, whose parentheses have no meaning.
The generator follows LRA's distribution: a node above the greatest depth is an operator with probability 0.25 and has
two to ten arguments; an expression is accepted if its length (operators, digits and closing brackets) lies strictly
between 500 and 2,000. Instead of one tree at a time by recursion, it grows thousands level by level with NumPy.

Shorter expressions follow the same distribution with fewer levels, because every level makes an expression 1.5 times
as long: 0.25 operators per node times six arguments per operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from skyformer.errors import DataError, InputError
from skyformer.lra.archives import check_file, read_errors_name
from skyformer.lra.examples import Batches, Examples, Integers, Ragged, Row, Symbols, in_batches
from skyformer.lra.tasks import FIRST_SYMBOL_ID, TASKS, Split

WORDS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
CLOSE = WORDS.index("]")
FIRST_OPERATOR = WORDS.index("[MIN")
SHORTEST = 16
_SHALLOWEST = 3
_GROWTH_PER_LEVEL = 1.5
_TREES_PER_FOREST = 2_048
"""Trees are grown this many at a time: enough for NumPy to be efficient, few enough for some tens of megabytes."""
FILES = {Split.TRAIN: "basic_train.tsv", Split.DEV: "basic_val.tsv", Split.TEST: "basic_test.tsv"}
_FILE_HEADER = "Source\tTarget"
_LONGEST_LINE, _LARGEST_FILE = 2**20, 2**33
_SYMBOL_OF_WORD = {word: symbol for symbol, word in enumerate(WORDS)}
_SPACING = str.maketrans({"(": " ", ")": " ", "]": " ] "})


def _median(values: Sequence[int]) -> int:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-1 - middle]) // 2


_OPERATIONS: tuple[Callable[[Sequence[int]], int], ...] = (
    min,
    max,
    _median,
    lambda values: sum(values) % 10,
)


def to_symbols(source: str) -> list[int]:
    """The words of an expression as symbols 0 to 14 (`WORDS`), without parentheses."""
    words = source.translate(_SPACING).split()
    for word in words:
        if word not in _SYMBOL_OF_WORD:
            raise InputError(f"unknown ListOps word {word!r}; expected one of {' '.join(WORDS)}")
    return [_SYMBOL_OF_WORD[word] for word in words]


def tokenize(source: str) -> list[int]:
    """Token ids of an expression: digits 1 to 10, `[MIN [MAX [MED [SM` 11 to 14, the closing bracket 15."""
    return [symbol + FIRST_SYMBOL_ID for symbol in to_symbols(source)]


def to_source(symbols: Sequence[int] | Symbols) -> str:
    """Symbols as text, without parentheses."""
    return " ".join(WORDS[symbol] for symbol in symbols)


def evaluate(source: str) -> int:
    """The value of an expression in LRA's notation, 0 to 9.

    >>> evaluate("[MAX 2 [MIN 3 4 ] ]")
    3
    """
    return evaluate_symbols(to_symbols(source))


def evaluate_symbols(symbols: Sequence[int]) -> int:
    """The value of an expression given as symbols."""
    # Every open list starts with its operator; the outermost one has none and collects the result.
    open_lists: list[list[int]] = [[]]
    for symbol in symbols:
        if FIRST_OPERATOR <= symbol < CLOSE:
            open_lists.append([symbol])
        elif symbol != CLOSE:
            open_lists[-1].append(symbol)
        else:
            open_lists[-2:] = [_close(open_lists)]
    if len(open_lists) != 1 or len(open_lists[0]) != 1:
        raise InputError(
            f"expected one complete ListOps expression; got {len(open_lists) - 1} unclosed operators "
            f"and {len(open_lists[0])} values outside of them: {_excerpt(symbols)}"
        )
    return open_lists[0][0]


def _close(open_lists: list[list[int]]) -> list[int]:
    """The second to last open list, with the value of the last one appended."""
    if len(open_lists) < 2:
        raise InputError("a ListOps expression closes a bracket that was not opened")
    operator, *arguments = open_lists[-1]
    if not arguments:
        raise InputError(f"the ListOps operator {WORDS[operator]} has no arguments")
    return [*open_lists[-2], _OPERATIONS[operator - FIRST_OPERATOR](arguments)]


def _excerpt(symbols: Sequence[int]) -> str:
    text = to_source(symbols)
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


@dataclass(frozen=True)
class ListOpsOptions:
    """LRA's settings. Lengths count operators, digits and closing brackets; both bounds are exclusive."""

    max_depth: int = 10
    max_arguments: int = 10
    operator_probability: float = 0.25
    shorter_than: int = 2_000
    longer_than: int = 500

    @classmethod
    def up_to(cls, max_length: int) -> ListOpsOptions:
        """Lengths strictly between `max_length / 4` and `max_length`, with as many levels as they need."""
        default = cls()
        if not SHORTEST <= max_length <= default.shorter_than:
            raise InputError(
                f"max_length of listops must be from {SHORTEST} to {default.shorter_than}; got {max_length}"
            )
        fewer = math.floor(math.log(default.shorter_than / max_length, _GROWTH_PER_LEVEL))
        depth = max(_SHALLOWEST, default.max_depth - fewer)
        return cls(max_depth=depth, shorter_than=max_length, longer_than=max_length // 4)


@dataclass(frozen=True)
class _Level:
    """All nodes of one depth in many trees; the children of a node are neighbours in the next level."""

    tree: Integers
    arity: Integers
    symbol: Integers

    @property
    def operators(self) -> npt.NDArray[np.bool_]:
        return self.arity > 0

    @property
    def first_child(self) -> Integers:
        """For each operator, where its children start in the next level."""
        counts = self.arity[self.operators]
        return np.cumsum(counts) - counts

    def only(self, kept: npt.NDArray[np.bool_], new_number: Integers) -> _Level:
        """The nodes of the trees to keep, with the new numbers of the trees."""
        here = kept[self.tree]
        return _Level(new_number[self.tree[here]], self.arity[here], self.symbol[here])


def generate(sizes: Mapping[Split, int], seed: int, options: ListOpsOptions) -> Batches:
    """As many expressions for each split as `sizes` says, without repeats within or across splits."""
    seen: set[bytes] = set()
    for number, split in enumerate(Split):
        for examples in generate_split(sizes[split], (seed, number), seen, options):
            yield split, examples


def generate_split(
    count: int, stream: Sequence[int], seen: set[bytes], options: ListOpsOptions = ListOpsOptions()
) -> Iterator[Examples]:
    """`count` expressions whose fingerprints are not in `seen` yet; `stream` seeds the random numbers."""
    forest_number = 0
    while count > 0:
        rng = np.random.default_rng([*stream, forest_number])
        forest = _without_repeats(_grow_forest(rng, options), seen, count)
        if len(forest):
            yield forest
        count -= len(forest)
        forest_number += 1


def _without_repeats(forest: Iterable[tuple[Symbols, int]], seen: set[bytes], count: int) -> Examples:
    fresh: list[Row] = []
    for expression, value in forest:
        fingerprint = blake2b(expression.tobytes(), digest_size=16).digest()
        if fingerprint not in seen and len(fresh) < count:
            seen.add(fingerprint)
            fresh.append(Row(expression, value, "generated"))
    return Examples.from_rows(fresh)


def _grow_forest(rng: np.random.Generator, options: ListOpsOptions) -> Iterable[tuple[Symbols, int]]:
    """Expressions of the wanted length, with their values."""
    levels = _only_of_wanted_length(_grow_levels(rng, options), options)
    sizes, values = _sizes_and_values(levels)
    expressions = Ragged(_write_out(levels, sizes), sizes[0]).rows()
    return zip(expressions, values[0].tolist(), strict=True)


def _grow_levels(rng: np.random.Generator, options: ListOpsOptions) -> list[_Level]:
    # A tree whose root is a digit is too short to be accepted, so every root is an operator.
    level = _new_level(rng, np.arange(_TREES_PER_FOREST), 1.0, options)
    levels = [level]
    for depth in range(2, options.max_depth + 1):
        probability = options.operator_probability if depth < options.max_depth else 0.0
        level = _new_level(rng, np.repeat(level.tree, level.arity), probability, options)
        levels.append(level)
    return levels


def _new_level(
    rng: np.random.Generator, tree: Integers, operator_probability: float, options: ListOpsOptions
) -> _Level:
    count = len(tree)
    is_operator = rng.random(count) < operator_probability
    arity = np.where(is_operator, rng.integers(2, options.max_arguments + 1, count), 0)
    operator = rng.integers(FIRST_OPERATOR, CLOSE, count)
    return _Level(tree, arity, np.where(is_operator, operator, rng.integers(0, 10, count)))


def _only_of_wanted_length(levels: list[_Level], options: ListOpsOptions) -> list[_Level]:
    # A digit is one word; an operator is two, itself and its closing bracket.
    lengths = np.zeros(_TREES_PER_FOREST)
    for level in levels:
        lengths += np.bincount(level.tree, 1.0 + level.operators, _TREES_PER_FOREST)
    kept = (lengths > options.longer_than) & (lengths < options.shorter_than)
    new_number = np.cumsum(kept) - 1
    return [level.only(kept, new_number) for level in levels]


def _sizes_and_values(levels: list[_Level]) -> tuple[list[Integers], list[Integers]]:
    """Number of words and value of every node's expression, from the leaves up."""
    sizes = [np.ones_like(level.tree) for level in levels]
    values = [level.symbol.copy() for level in levels]
    for depth in range(len(levels) - 2, -1, -1):
        level, operators = levels[depth], levels[depth].operators
        if operators.any():
            sizes[depth][operators] = 2 + np.add.reduceat(sizes[depth + 1], level.first_child)
            values[depth][operators] = _apply(level, values[depth + 1])
    return sizes, values


def _apply(level: _Level, arguments: Integers) -> Integers:
    """The value of every operator of a level."""
    starts, counts = level.first_child, level.arity[level.operators]
    owner = np.repeat(np.arange(len(counts)), counts)
    ordered = arguments[np.lexsort((arguments, owner))]
    median = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) // 2
    total = np.add.reduceat(arguments, starts)
    by_operator = np.stack([ordered[starts], ordered[starts + counts - 1], median, total % 10])
    chosen: Integers = by_operator[level.symbol[level.operators] - FIRST_OPERATOR, np.arange(len(counts))]
    return chosen


def _write_out(levels: list[_Level], sizes: list[Integers]) -> Symbols:
    """All expressions, one after another: a node's place follows from its parent's place and its earlier siblings'
    sizes."""
    words = np.full(int(sizes[0].sum()), CLOSE, np.uint8)
    place = np.cumsum(sizes[0]) - sizes[0]
    for depth, level in enumerate(levels):
        words[place] = level.symbol
        if depth + 1 < len(levels):
            place = _places_of_children(level, place, sizes[depth + 1])
    return words


def _places_of_children(level: _Level, place: Integers, child_sizes: Integers) -> Integers:
    counts, starts = level.arity[level.operators], level.first_child
    before = np.cumsum(child_sizes) - child_sizes
    shift = place[level.operators] + 1 - before[starts]
    places: Integers = before + np.repeat(shift, counts)
    return places


def read(folder: Path) -> Batches:
    """The expressions of LRA's three files; each line has a source and a target, separated by a tab."""
    missing = [name for name in FILES.values() if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)}; expected LRA's {', '.join(FILES.values())}")
    for split, name in FILES.items():
        check_file(folder, folder / name, _LARGEST_FILE)
        yield from in_batches(split, read_file(folder / name))


def read_file(path: Path) -> Iterator[Row]:
    """The expressions of one file, each checked against its target."""
    with read_errors_name(path), path.open(encoding="ascii", errors="replace") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            if number > 1 or line.rstrip("\r\n") != _FILE_HEADER:
                yield _parse_line(line.rstrip("\r\n"), path, number)


def _parse_line(line: str, path: Path, number: int) -> Row:
    source, tab, target = line.partition("\t")
    try:
        symbols = to_symbols(source)
        value = evaluate_symbols(symbols)
    except InputError as error:
        raise DataError(f"{path} line {number}: {error}") from error
    if not tab or str(value) != target.strip():
        raise DataError(f"{path} line {number}: the value is {value}, but the target is {target[:20]!r}")
    longest = TASKS["listops"].max_length
    if len(symbols) > longest:
        raise DataError(f"{path} line {number}: expected at most {longest} tokens; got {len(symbols)}")
    return Row(np.array(symbols, np.uint8), value, f"{path.name}:{number}")
