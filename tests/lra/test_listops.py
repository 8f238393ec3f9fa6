"""ListOps: its notation, its values, LRA's files, and the distribution of generated expressions."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyformer.errors import DataError, InputError
from skyformer.lra import listops
from skyformer.lra.examples import Examples
from skyformer.lra.tasks import Split

Tree = int | tuple[str, list["Tree"]]
OPERATORS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
trees: st.SearchStrategy[Tree] = st.recursive(
    st.integers(0, 9),
    lambda inner: st.tuples(st.sampled_from(list(OPERATORS)), st.lists(inner, min_size=1, max_size=5)),
    max_leaves=40,
)


def value_of(tree: Tree) -> int:
    return tree if isinstance(tree, int) else OPERATORS[tree[0]]([value_of(part) for part in tree[1]])


def written(tree: Tree) -> str:
    """LRA's notation: `( ( ( [MAX 2 ) 9 ) ] )`."""
    if isinstance(tree, int):
        return str(tree)
    text = tree[0]
    for part in [*map(written, tree[1]), "]"]:
        text = f"( {text} {part} )"
    return text


@given(trees)
def test_value_of_any_expression(tree: Tree) -> None:
    assert listops.evaluate(written(tree)) == value_of(tree)


@given(trees)
def test_parentheses_carry_no_meaning(tree: Tree) -> None:
    bare = written(tree).replace("(", "").replace(")", "")
    assert listops.tokenize(bare) == listops.tokenize(written(tree))
    assert listops.to_source(listops.to_symbols(bare)).split() == bare.split()


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("7", 7),
        ("[MED 1 2 ]", 1),
        ("[MED 1 4 8 9 ]", 6),
        ("[SM 9 9 9 ]", 7),
        ("[MAX [MIN 3 4] 2]", 3),
        ("( ( ( [MAX 2 ) 9 ) ] )", 9),
    ],
)
def test_values(source: str, value: int) -> None:
    assert listops.evaluate(source) == value


def test_token_ids_keep_the_closing_bracket_and_leave_zero_for_padding() -> None:
    ids = listops.tokenize("[MIN 0 [MAX 9 ] [MED 1 ] [SM 2 ] ]")
    assert " ".join(map(str, ids)) == "11 1 12 10 15 13 2 15 14 3 15 15"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("[MAX 1 2", "1 unclosed"),
        ("1 ]", "not opened"),
        ("[MIN ]", "no arguments"),
        ("[AVG 1 ]", r"unknown ListOps word '\[AVG'"),
        ("12", "unknown ListOps word '12'"),
        ("1 2", "2 values outside"),
        ("", "0 values outside"),
    ],
)
def test_bad_expressions(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        listops.evaluate(source)


def test_reference_file(references: Path) -> None:
    """Every line of LRA's file has the value of its target, which the reader checks."""
    rows = list(listops.read_file(references / "data/listops/basic_test.tsv"))
    assert len(rows) == 100
    assert all(500 < len(row.tokens) < 2000 for row in rows)


@pytest.fixture(scope="module")
def generated() -> list[Examples]:
    return list(listops.generate_split(1500, (0, 0), set()))


def rows_of(count: int, seed: int, seen: set[bytes]) -> list[bytes]:
    return [row.tobytes() for part in listops.generate_split(count, (seed, 0), seen) for row in part.tokens.rows()]


def test_generated_values_are_right_and_lengths_within_bounds(generated: list[Examples]) -> None:
    for examples in generated:
        for row, label in zip(examples.tokens.rows(), examples.labels.tolist(), strict=True):
            assert listops.evaluate_symbols(row.tolist()) == label
    lengths = np.concatenate([examples.tokens.lengths for examples in generated])
    assert len(lengths) == 1500
    assert lengths.min() > 500
    assert lengths.max() < 2000


def test_generation_is_a_pure_function_without_repeats_and_a_limit_is_a_prefix(generated: list[Examples]) -> None:
    rows = [row.tobytes() for examples in generated for row in examples.tokens.rows()]
    seen: set[bytes] = set()
    again = rows_of(30, 0, seen)
    assert again == rows[:30]
    assert len(set(again + rows_of(30, 0, seen))) == 60, "no repeats, even across calls"
    assert rows_of(30, 1, set()) != again


@pytest.mark.parametrize("max_length", [16, 64, 256, 1999])
def test_short_expressions(max_length: int) -> None:
    options = listops.ListOpsOptions.up_to(max_length)
    tried = 400
    (examples,) = listops.generate_split(tried, (0, 0), set(), options)
    assert len(examples) == tried
    assert max_length // 4 < examples.tokens.lengths.min()
    assert examples.tokens.lengths.max() < max_length
    shares = np.bincount(examples.labels, minlength=10) / tried
    assert shares.min() > 0.02
    assert shares.max() < 0.27


def test_shorter_expressions_have_fewer_levels() -> None:
    depths = [listops.ListOpsOptions.up_to(length).max_depth for length in (16, 128, 256, 512, 1024, 2000)]
    assert depths == [3, 4, 5, 7, 9, 10]
    assert listops.ListOpsOptions.up_to(2000) == listops.ListOpsOptions()


def depth_of(symbols: list[int]) -> int:
    depth = deepest = 0
    for symbol in symbols:
        depth += (symbol >= listops.FIRST_OPERATOR) - 2 * (symbol == listops.CLOSE)
        deepest = max(deepest, depth)
    return deepest


def test_depth_and_arguments_stay_within_bounds(generated: list[Examples]) -> None:
    rows = [row.tolist() for examples in generated for row in examples.tokens.rows()]
    # Nodes at depth ten are digits, so operators nest nine deep at most.
    assert max(map(depth_of, rows)) == 9
    assert {len(arguments) for row in rows[:200] for arguments in arguments_of(row)} == set(range(2, 11))


def arguments_of(symbols: list[int]) -> list[list[int]]:
    """The arguments of every operator, nested ones as a 0."""
    closed, open_lists = [], [[]]
    for symbol in symbols:
        if symbol == listops.CLOSE:
            closed.append(open_lists.pop())
            open_lists[-1].append(0)
        elif symbol >= listops.FIRST_OPERATOR:
            open_lists.append([])
        else:
            open_lists[-1].append(symbol)
    return closed


def one_tree_at_a_time(rng: random.Random, depth: int = 1) -> tuple[int, int, int]:
    """LRA's distribution by plain recursion: length, number of operators, value."""
    if depth == 10 or rng.random() > 0.25:
        return 1, 0, rng.randrange(10)
    parts = [one_tree_at_a_time(rng, depth + 1) for _ in range(rng.randint(2, 10))]
    operation = list(OPERATORS.values())[rng.randrange(4)]
    return (
        2 + sum(length for length, _, _ in parts),
        1 + sum(operators for _, operators, _ in parts),
        operation([value for _, _, value in parts]),
    )


def test_distribution_is_that_of_plain_recursion(generated: list[Examples]) -> None:
    rng = random.Random(0)
    plain: list[tuple[int, int, int]] = []
    while len(plain) < 400:
        tree = one_tree_at_a_time(rng)
        if 500 < tree[0] < 2000:
            plain.append(tree)
    rows = [row for examples in generated for row in examples.tokens.rows()]
    labels = np.concatenate([examples.labels for examples in generated])
    compared = [
        ([length for length, _, _ in plain], [len(row) for row in rows]),
        (
            [operators / length for length, operators, _ in plain],
            [np.mean(row == listops.CLOSE) for row in rows],
        ),
        ([value == 0 for _, _, value in plain], labels == 0),
        ([value == 9 for _, _, value in plain], labels == 9),
    ]
    for expected, found in compared:
        error = np.hypot(np.std(expected) / len(expected) ** 0.5, np.std(found) / len(found) ** 0.5)
        assert abs(np.mean(expected) - np.mean(found)) < 4 * error


GOOD_FILE = "Source\tTarget\n( ( [MAX 2 ) 9 ) ] )\t9\r\n[MIN 3 4 ]\t3\n"


def write_files(folder: Path, text: str = GOOD_FILE) -> Path:
    for name in listops.FILES.values():
        (folder / name).write_text(text)
    return folder


def test_files(tmp_path: Path) -> None:
    parts = dict(listops.read(write_files(tmp_path)))
    assert list(parts) == list(Split)
    assert parts[Split.DEV].labels.tolist() == [9, 3]
    assert [listops.to_source(row) for row in parts[Split.TEST].tokens.rows()] == ["[MAX 2 9 ]", "[MIN 3 4 ]"]
    assert parts[Split.TRAIN].sources == ["basic_train.tsv:2", "basic_train.tsv:3"]
    (tmp_path / "basic_val.tsv").unlink()
    with pytest.raises(DataError, match=r"lacks basic_val\.tsv"):
        list(listops.read(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[MIN 3 4 ]\t4", "line 2: the value is 3, but the target is '4'"),
        ("[MIN 3 4 ]", "line 2: the value is 3, but the target is ''"),
        ("[MIN 3 4\t3", "line 2: .*unclosed"),
        ("[MIN x ]\t3", "line 2: unknown ListOps word 'x'"),
        ("[MIN " + "3 " * 2000 + "]\t3", "line 2: expected at most 2000 tokens; got 2002"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(listops.read(write_files(tmp_path, f"Source\tTarget\n{line}\n")))
