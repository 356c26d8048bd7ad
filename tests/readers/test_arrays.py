"""Files of one scan: text is read as `float()` reads each cell, .npy and .mat give their numbers, and the rest is refused.

Whatever people write into .1D, .csv, .tsv and .txt files is drawn here at random: number formats, separators, line ends.
"""

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import breakage
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from scipy.io import savemat

from m2lgdg import Cohort, InputError
from m2lgdg.data.readers.arrays import Said, load_array, load_mat, read_table
from m2lgdg.scans import as_float32

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
        return as_float32(np.array(numbers, dtype=np.float64))  # a high level is centred


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
    names, numbers = read_table(file(suffix, content))
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
    names, numbers = read_table(file(".txt", " ".join(cells) + "\n"))
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
        read_table(file(suffix, "\n".join(lines) + "\n"))
    assert f"line {row + (2 if header else 1)}, column {column + 1}: {word!r} is not a number." in str(error.value)


@pytest.mark.parametrize("header", [b"", b"a,b\n"])
def test_a_ragged_line_is_named(file, header):
    line = 3 if header else 2
    with pytest.raises(InputError, match=rf"table.csv, line {line}: 3 columns, but earlier lines have 2\."):
        read_table(file(".csv", header + b"1,2\n3,4,5\n"))
    with pytest.raises(InputError, match=rf"table.csv, line {line}: 1 columns, but earlier lines have 2\."):
        read_table(file(".csv", header + b"1,2\n3\n"))


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
    assert_same_bits(read_table(file(suffix, content))[1], np.array(expected, dtype=np.float32))


def test_numpys_own_header_names_the_columns(file, tmp_path):
    path = tmp_path / "saved.txt"
    np.savetxt(path, [[1.5, 2.0], [3.0, 4.0]], header="insula cuneus")
    names, numbers = read_table(path)
    assert names == ["insula", "cuneus"]
    assert numbers.tolist() == [[1.5, 2.0], [3.0, 4.0]]
    assert read_table(file(".csv", "# a,b\n1,2\n"))[0] == ["a", "b"]


def test_a_column_without_a_name_is_an_index(file):
    with pytest.raises(InputError, match=r"table.csv, column 1 has no name in the header; remove it if it is a row index\."):
        read_table(file(".csv", ",a,b\n0,1.5,2\n1,3,4\n"))


@pytest.mark.parametrize("content", ["1 2\n# 3 4\n5 6\n", "1 2\n3 4 # 5\n"])
def test_comments_inside_are_refused(file, content):
    with pytest.raises(InputError, match="is not a number"):
        read_table(file(".txt", content))


def test_a_word_among_decimals_makes_no_header(file):
    """ROI names may be numbers, as in "x 1 2", but never decimals."""
    with pytest.raises(InputError, match=r"table\.csv, line 2, column 2: 'oops' is not a number\."):
        read_table(file(".csv", "\n1.5,oops,3\n4,5,6\n"))
    assert read_table(file(".csv", "x,1,2\n4,5,6\n"))[0] == ["x", "1", "2"]


@pytest.mark.parametrize("content", ["", "\n", " \r\n\n", "#1 #2\n", "a b\n\n"])
def test_a_file_without_numbers(file, content):
    with pytest.raises(InputError, match=r"table.txt contains no numbers\."):
        read_table(file(".txt", content))


def numbers(rows=30, columns=6, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


@pytest.mark.parametrize("columns", [2, 6, 116])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".txt"])
def test_column_numbers_are_a_header(tmp_path, columns, first, suffix):
    array = numbers(columns=columns)
    separator = {".csv": ",", ".tsv": "\t", ".txt": " "}[suffix]
    frame = pd.DataFrame(array, columns=range(first, first + columns))
    frame.to_csv(tmp_path / f"a{suffix}", index=False, sep=separator)
    names, table = read_table(tmp_path / f"a{suffix}")
    assert names is None  # numbers in order name nothing
    np.testing.assert_array_equal(table, array)


def test_column_numbers_over_whole_numbers(tmp_path):
    array = np.random.default_rng(0).integers(500, 900, size=(30, 20))
    pd.DataFrame(array).to_csv(tmp_path / "a.csv", index=False)
    assert read_table(tmp_path / "a.csv")[1].shape == (30, 20)
    few = np.array([[1, 2, 3], [2, 4, 9], [3, 1, 1]])  # a small table of whole numbers has no header
    np.savetxt(tmp_path / "few.csv", few, fmt="%d", delimiter=",")
    np.testing.assert_array_equal(read_table(tmp_path / "few.csv")[1], few)


def test_codes_of_an_atlas_are_a_header(tmp_path):
    array = numbers(columns=12)
    codes = [2001 + 7 * i for i in range(12)]
    pd.DataFrame(array, columns=codes).to_csv(tmp_path / "a.csv", index=False)
    names, table = read_table(tmp_path / "a.csv")
    assert names == [str(code) for code in codes]
    np.testing.assert_array_equal(table, array)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("title", ["Unnamed: 0", "index", "time", "x"])
def test_a_row_index_is_refused(tmp_path, start, title):
    frame = pd.DataFrame(numbers(), columns=list("abcdef"))
    frame.insert(0, title, np.arange(start, start + 30))
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(InputError, match=rf"a\.csv, column 1 \({title}\) is a row index, not an ROI; remove it .*index=False"):
        read_table(tmp_path / "a.csv")


def test_a_row_index_without_a_header(tmp_path):
    array = np.hstack([np.arange(30)[:, None], numbers()])
    np.savetxt(tmp_path / "a.txt", array)
    np.save(tmp_path / "a.npy", array)
    savemat(tmp_path / "a.mat", {"ts": array})
    with pytest.raises(InputError, match=r"a\.txt, column 1 is a row index"):
        read_table(tmp_path / "a.txt")
    for suffix in (".npy", ".mat"):
        with pytest.raises(InputError, match=rf"a\{suffix}, column 1 is a row index"):
            load_array(tmp_path / f"a{suffix}")
    pd.DataFrame(numbers()).to_csv(tmp_path / "both.csv")  # numbers over the columns and before the rows
    with pytest.raises(InputError, match=r"both\.csv, column 1 has no name in the header; remove it if it is a row index"):
        read_table(tmp_path / "both.csv")


def test_headers_of_npy_files_are_read_in_threads(tmp_path):
    """Python 3.11 may fail to parse code, as numpy does for each header, while another thread does the same."""
    for i in range(300):
        np.save(tmp_path / f"{i}.npy", np.full((3, 4), i, dtype=np.float32))
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    gc.callbacks.append(give_way := lambda phase, info: time.sleep(0))
    try:
        with ThreadPoolExecutor(4) as pool:
            arrays = list(pool.map(lambda i: load_array(tmp_path / f"{i}.npy")[1], range(300)))
    finally:
        gc.callbacks.remove(give_way)
        gc.set_threshold(*thresholds)
    assert [one.tolist() for one in arrays] == [[[i] * 4] * 3 for i in range(300)]


@given(
    shape=st.sampled_from([(5, 3), (1, 4), (2, 2)]), order=st.sampled_from("CF"), dtype=st.sampled_from(["<f4", ">f8", "<i2"])
)
@settings(max_examples=18, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_npy_files_of_any_order_and_type_of_numbers(tmp_path, shape, order, dtype):
    values = np.arange(shape[0] * shape[1]).reshape(shape)[:, ::-1]
    np.save(tmp_path / "one.npy", np.array(values, dtype=dtype, order=order))
    assert load_array(tmp_path / "one.npy")[1].tolist() == values.tolist()


def test_matlab_files(tmp_path):
    array = numbers(3, 4)
    for form in ("5", "4"):
        savemat(tmp_path / "a.mat", {"x": array}, format=form)
        np.testing.assert_array_equal(load_mat(tmp_path / "a.mat", None), array)
    savemat(tmp_path / "b.mat", {"x": array, "y": [[1, 2]], "z": {"a": 1}, "w": np.array([[1j]])}, do_compression=True)
    np.testing.assert_array_equal(load_mat(tmp_path / "b.mat", "y"), [[1, 2]])
    for variable, words in ((None, "4 variables"), ("v", "no variable v"), ("w", "complex"), ("z", "struct values")):
        with pytest.raises(InputError, match=words):
            load_mat(tmp_path / "b.mat", variable)


@pytest.mark.parametrize("suffix", [".npy", ".csv", ".mat", "-z.mat"])
def test_random_damage_to_an_array_file(suffix, tmp_path):
    file, array = tmp_path / f"a{suffix}", numbers(10)
    if suffix.endswith(".mat"):
        savemat(file, {"ROISignals": array}, do_compression="z" in suffix)
    elif suffix == ".npy":
        np.save(file, array)
    else:
        np.savetxt(file, array, delimiter=",", fmt="%.6f", header="a,b,c,d,e,f", comments="")
    spare = range(184, 200) if suffix == ".mat" else range(0)  # scipy ends the process at an unknown type of numbers there
    breakage.only_sentences(load_array, file, file.read_bytes(), 300, spare)


# Headers and index columns that look like numbers of a scan


def scan(rows=60, columns=12, seed=0):
    """Slow signals on a level, as scanners give them."""
    return 9000 + 40 * np.cumsum(np.random.default_rng(seed).normal(size=(rows, columns)), axis=0)


CODES = [2001 + 7 * i + i * i for i in range(12)]
HEADERS = {  # a first line, and what the columns are called
    "counted by floats": ([f"{i:.1f}" for i in range(12)], None),
    "codes as floats": ([f"{code}.0" for code in CODES], [str(code) for code in CODES]),
    "negative codes": ([str(-code) for code in CODES], [str(-code) for code in CODES]),
}


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("columns", [12, 6])
def test_a_header_of_floats_is_no_volume(file, header, columns):
    line, names = (None if one is None else one[:columns] for one in HEADERS[header])
    body = [",".join(f"{value:.3f}" for value in row) for row in scan()[:, :columns]]
    path = file(".csv", "\n".join([",".join(line), *body]))
    if columns == 12 or header == "counted by floats":
        found, table = load_array(path)
        assert (found, table.shape) == (names, (60, columns))
        return
    with pytest.raises(InputError, match=r"table\.csv, row 1 \(.*looks like numbers or codes .*--header yes or no"):
        load_array(path)
    assert load_array(path, said=Said(header=True))[0] == names
    assert load_array(path, said=Said(header=False))[1].shape == (61, columns)


@pytest.mark.parametrize("first", [CODES, CODES[::-1], [5, 3, 900, 12, 77, 2, 31, 44, 6, 81, 9, 1]])
def test_codes_over_whole_numbers_and_in_arrays(file, tmp_path, first):
    table = np.vstack([first, np.round(scan())])
    text = file(".csv", "\n".join(",".join(f"{value:.0f}" for value in row) for row in table))
    np.save(tmp_path / "a.npy", np.vstack([first, scan()]))
    savemat(tmp_path / "a.mat", {"ts": np.vstack([first, scan()])})
    for path in (text, tmp_path / "a.npy", tmp_path / "a.mat"):
        with pytest.raises(InputError, match=rf"{path.name}, row 1 \({first[0]}, .*--header yes or no"):
            load_array(path)
        names, series = load_array(path, said=Said(header=True))
        assert (names, series.shape) == ([str(one) for one in first], (60, 12))


INDICES = {
    "from 5": np.arange(5, 65),
    "time in seconds": np.arange(60) * 2.0,
    "time that is rounded": np.round(np.arange(60) * 0.813, 2),
    "time with jitter": np.arange(60) * 2 + np.random.default_rng(1).uniform(0, 0.9, 60),
    "backwards": np.arange(60)[::-1],
    "of joined runs": np.tile(np.arange(30), 2),
}


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("at", [0, 5, 12])
def test_a_column_that_counts_volumes_is_refused_wherever_it_is(file, tmp_path, index, at):
    table = np.insert(scan(), at, INDICES[index], axis=1)
    path = file(".csv", "\n".join(",".join(f"{value:.2f}" for value in row) for row in table))
    np.save(tmp_path / "a.npy", table)
    for each in (path, tmp_path / "a.npy"):
        with pytest.raises(InputError, match=rf"column {at + 1} is a row index, .*--index-column drop or keep"):
            load_array(each)
        np.testing.assert_allclose(load_array(each, said=Said(index_column="drop"))[1], scan(), rtol=1e-5)
        assert load_array(each, said=Said(index_column="keep"))[1].shape == (60, 13)


@pytest.mark.parametrize("title", ["time_s", "Time [s]", "TR", "t", "volume", "frame_number", "Unnamed: 0"])
def test_a_name_of_time_is_enough_in_a_short_scan(file, title):
    names = [*"abcdef", title]
    table = np.column_stack([numbers(5), [0.0, 2.1, 3.9, 6.4, 8.0]])
    path = file(".csv", "\n".join([",".join(names), *(",".join(map(str, row)) for row in table)]))
    with pytest.raises(InputError, match=r"column 7 \(.*\) is a row index"):
        load_array(path)
    assert load_array(path, said=Said(index_column="drop"))[0] == list("abcdef")


def test_signals_are_no_index_and_no_header(file):
    smooth = np.sin(np.arange(60)[:, None] / 8 + np.arange(12))  # slow, and flat, and rising for half of the time
    for table in (smooth, scan(), np.round(scan(), 1), np.hstack([scan(), np.zeros((60, 1))]), np.sort(scan(), axis=1)):
        path = file(".csv", "\n".join(",".join(f"{value:.4f}" for value in row) for row in table))
        assert load_array(path)[1].shape == table.shape


@pytest.mark.parametrize("text", ['"97,790.6","1,234.5"\n"98,001.2","1,230.0"\n', '"97,790.6","1,234.5"\n98001.2,1230.0\n'])
def test_quoted_numbers_with_separators_are_named(file, text):
    with pytest.raises(InputError, match=r"table\.csv, line 1, column 1: '97,790\.6' is not a number\."):
        load_array(file(".csv", text))
    names, table = load_array(file(".csv", '"left, upper","b"\n"1.5","2"\n'))
    assert (names, table.tolist()) == (["left, upper", "b"], [[1.5, 2.0]])


def test_a_high_level_does_not_take_the_signal(file, tmp_path):
    signal = np.random.default_rng(0).normal(size=(80, 4))
    table = signal + np.array([1e9, 2e10, 100.0, 0.0])
    np.save(tmp_path / "a.npy", np.column_stack([table, np.full(80, 1e9 / 3)]))
    np.savetxt(tmp_path / "a.txt", table, fmt="%.17g")
    cohort = Cohort.from_arrays([table] * 2, [0, 1], "Oslo")
    for series in (load_array(tmp_path / "a.npy")[1], load_array(tmp_path / "a.txt")[1], cohort.series[0]):
        for column in range(4):
            assert np.corrcoef(series[:, column], signal[:, column])[0, 1] > 0.999
        np.testing.assert_array_equal(series[:, 2:4], table[:, 2:].astype(np.float32))  # as they were
    assert np.ptp(load_array(tmp_path / "a.npy")[1][:, 4]) == 0  # a flat column stays flat


def test_no_text_of_a_linked_file_is_shown(tmp_path):
    (tmp_path / "secret").write_text("user 4711\nhunter2 12\n")
    (tmp_path / "P1.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match=r"P1\.txt, line 2, column 1: the text \(not shown") as error:
        load_array(tmp_path / "P1.txt")
    assert "hunter2" not in str(error.value)
