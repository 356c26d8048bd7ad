"""Text tables: the parser and plain `float()` of each cell must agree bit for bit.

Whatever people write into .1D, .csv, .tsv and .txt files is drawn here at random: number formats, separators, line ends.
"""

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from m2lgdg import InputError
from m2lgdg.data.readers import arrays as text

FORMATS = ("%f", "%.3f", "%g", "%.17g", "%e", "%.9E", "%r", "%+.6f", "%d")
SEPARATORS = {".csv": (",", ";", ", ", " ;"), ".tsv": ("\t", " \t"), ".txt": (" ", "  ", "\t", " \t "), ".1D": ("\t", "   ")}
PADDING = {".csv": ("", " ", "\t", " \t"), ".tsv": ("", " ", "   "), ".txt": ("", " ", "\t"), ".1D": ("", "\t", " ")}
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=64) | st.floats(-1e4, 1e4)
WORDS = ("oops", "1.2.3", "1e", "--1", "1_0", "0x10", "n/b")


def decimal(sign, digits, point, exponent):
    """A number as text: 5. and .5 and 007 are numbers too."""
    body = digits if point > len(digits) else f"{digits[:point]}.{digits[point:]}"
    return sign + body + exponent


DECIMALS = st.builds(
    decimal,
    st.sampled_from(["", "-", "+"]),
    st.integers(0, 10**25).map(str) | st.integers(0, 10**7).map(str) | st.sampled_from(["00", "007", "0000000000000000000001"]),
    st.integers(0, 28),
    st.just("") | st.integers(-330, 310).map("e{}".format) | st.integers(0, 40).map("E+{:03}".format),
)
FORMATTED = st.builds(lambda form, value: form % value, st.sampled_from(FORMATS), FLOATS)


@st.composite
def tables(draw, missing=True):
    """Suffix, separator, cells as text, header or None, and the bytes of the file."""
    suffix = draw(st.sampled_from(sorted(SEPARATORS)))
    separator = draw(st.sampled_from(SEPARATORS[suffix]))
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    kinds = [FORMATTED, DECIMALS]
    if missing:
        empty = [""] if suffix in (".csv", ".tsv") and columns > 1 else []
        kinds.append(st.sampled_from(["n/a", "nan", "NaN", "NA", *empty]))
    row = st.lists(st.one_of(kinds), min_size=columns, max_size=columns).filter(any)  # a line without a cell is a blank line
    cells = draw(st.lists(row, min_size=rows, max_size=rows))
    header = draw(st.sampled_from([None, [f"r{i}" for i in range(columns)], [f"#{2001 + i}" for i in range(columns)]]))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    lines = [
        separator.join(each) + draw(st.sampled_from(PADDING[suffix])) for each in ([] if header is None else [header]) + cells
    ]
    for _ in range(draw(st.integers(0, 2))):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(["", " "])))
    content = end.join(lines) + draw(st.sampled_from(["", end, end + end]))
    return suffix, cells, header, content.encode()


def by_hand(cells):
    with np.errstate(over="ignore"):
        numbers = [[float("nan" if cell.lower() in ("", "n/a", "na") else cell) for cell in row] for row in cells]
        return np.array(numbers, dtype=np.float64).astype(np.float32)


def assert_same_bits(ours, theirs):
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    known = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), ~known)
    assert np.array_equal(ours[known].view(np.uint32), theirs[known].view(np.uint32))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Writes bytes under a suffix and gives the path."""
    folder = tmp_path_factory.mktemp("text")

    def write(suffix, content):
        path = folder / f"table{suffix}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@settings(max_examples=80, deadline=None)
@given(table=tables())
def test_any_table_reads_as_float_does(file, table):
    suffix, cells, header, content = table
    assume(header or sorted(cells[0]) not in [[str(first + i) for i in range(len(cells[0]))] for first in (0, 1)])
    names, numbers = text.read_table(file(suffix, content))
    assert names == (None if header is None else [name.lstrip("#") for name in header])
    assert_same_bits(numbers, by_hand(cells))


@settings(max_examples=80, deadline=None)
@given(st.lists(DECIMALS, min_size=1, max_size=30))
@example(
    ["9007199254740993", "9007199254740992.5", "16777217", "16777219", "0.1e-7", "5e-324", "1e400", "-1e-400", "-0", "5.", ".5"]
)
@example(
    [
        "3.4028235677973366e38",
        "3.4028235677973362e38",
        "1e22",
        "1e23",
        "123456789012345678901234567890",
        "1e-22",
        "7.038531e-26",
    ]
)
def test_any_decimal_reads_as_float_does(file, cells):
    names, numbers = text.read_table(file(".txt", " ".join(cells) + "\n"))
    assert names is None
    assert_same_bits(numbers, by_hand([cells]))


@settings(max_examples=40, deadline=None)
@given(table=tables(missing=False), word=st.sampled_from(WORDS), data=st.data())
def test_a_word_is_named_with_its_place(file, table, word, data):
    suffix, cells, header, _ = table
    if header is None:
        cells = [cells[0], *cells]  # a word in the first line would make it a header
    row = data.draw(st.integers(0 if header else 1, len(cells) - 1))
    column = data.draw(st.integers(0, len(cells[0]) - 1))
    cells = [list(each) for each in cells]
    cells[row][column] = word
    separator = {".csv": ",", ".tsv": "\t"}.get(suffix, " ")
    lines = [separator.join(each) for each in ([header] if header else []) + cells]
    with pytest.raises(InputError) as error:
        text.read_table(file(suffix, "\n".join(lines) + "\n"))
    assert f"line {row + (2 if header else 1)}, column {column + 1}: {word!r} is not a number." in str(error.value)


@pytest.mark.parametrize("header", [b"", b"a,b\n"])
def test_a_ragged_line_is_named(file, header):
    line = 3 if header else 2
    with pytest.raises(InputError, match=rf"table.csv, line {line}: 3 columns, but earlier lines have 2\."):
        text.read_table(file(".csv", header + b"1,2\n3,4,5\n"))
    with pytest.raises(InputError, match=rf"table.csv, line {line}: 1 columns, but earlier lines have 2\."):
        text.read_table(file(".csv", header + b"1,2\n3\n"))


@pytest.mark.parametrize(
    ("suffix", "content", "expected"),
    [
        (".tsv", "a\tb\tc\n1\t\t2\n3\t\t4\n", [[1, np.nan, 2], [3, np.nan, 4]]),
        (".tsv", "a\tb\n\t1\n\t2\n", [[np.nan, 1], [np.nan, 2]]),
        (".tsv", "a\tb\n1\t \n3\t\n", [[1, np.nan], [3, np.nan]]),
        (".tsv", "a\tb\n1\t2\n\t\n3\t4\n", [[1, 2], [np.nan, np.nan], [3, 4]]),  # a volume without any value is no blank line
        (".csv", "1, \n3, \n", [[1, np.nan], [3, np.nan]]),
        (".csv", "1,,2\n,3,4\n", [[1, np.nan, 2], [np.nan, 3, 4]]),
        (".csv", '"a","b"\n"1","2.5"\n', [[1, 2.5]]),
        (".csv", "\ufeff1,2\n3,4\n", [[1, 2], [3, 4]]),
        (".csv", "\ufeffa,b\n3,4\n", [[3, 4]]),
        (".txt", "inf -Infinity\n1 2\n", [[np.inf, -np.inf], [1, 2]]),
    ],
)
def test_odd_cells(file, suffix, content, expected):
    assert_same_bits(text.read_table(file(suffix, content))[1], np.array(expected, dtype=np.float32))


def test_numpys_own_header_names_the_columns(file, tmp_path):
    path = tmp_path / "saved.txt"
    np.savetxt(path, [[1.5, 2.0], [3.0, 4.0]], header="insula cuneus")
    names, numbers = text.read_table(path)
    assert names == ["insula", "cuneus"]
    assert numbers.tolist() == [[1.5, 2.0], [3.0, 4.0]]
    assert text.read_table(file(".csv", "# a,b\n1,2\n"))[0] == ["a", "b"]


def test_a_column_without_a_name_is_an_index(file):
    with pytest.raises(InputError, match=r"table.csv, column 1 has no name in the header; remove it if it is a row index\."):
        text.read_table(file(".csv", ",a,b\n0,1.5,2\n1,3,4\n"))


@pytest.mark.parametrize("content", ["1 2\n# 3 4\n5 6\n", "1 2\n3 4 # 5\n"])
def test_comments_inside_are_refused(file, content):
    with pytest.raises(InputError, match="is not a number"):
        text.read_table(file(".txt", content))


def test_a_word_among_decimals_makes_no_header(file):
    """ROI names may be numbers, as in "x 1 2", but never decimals."""
    with pytest.raises(InputError, match=r"table\.csv, line 2, column 2: 'oops' is not a number\."):
        text.read_table(file(".csv", "\n1.5,oops,3\n4,5,6\n"))
    assert text.read_table(file(".csv", "x,1,2\n4,5,6\n"))[0] == ["x", "1", "2"]


@pytest.mark.parametrize("content", ["", "\n", " \r\n\n", "#1 #2\n", "a b\n\n"])
def test_a_file_without_numbers(file, content):
    with pytest.raises(InputError, match=r"table.txt contains no numbers\."):
        text.read_table(file(".txt", content))
