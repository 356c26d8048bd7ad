"""`m2lgdg fetch abide` from a local server: what it leaves, continued and damaged downloads, and no network at all."""

import contextlib
import hashlib
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import miniature
import numpy as np
import pytest

from m2lgdg.data.fetch import fetch_abide
from m2lgdg.data.readers import read
from m2lgdg.storage import InputError

PEOPLE = [str(row[2]) for row in miniature.ABIDE_PEOPLE if row[2] not in ("no_filename", "Leuven_1_0050700")]


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        self.server.requested.append(self.path)
        if self.server.refuse and self.server.refuse in self.path:
            self.send_error(503)
        elif self.server.endless and self.server.endless in self.path:
            self.send_response(200)
            if self.server.declared:
                self.send_header("Content-Length", str(self.server.declared))
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"0 " * 4096)
                    self.server.sent += 8192
        else:
            super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A copy of the release on this machine, laid out like the public one."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    source = tmp_path / "source"
    release = miniature.abide(source, atlases=("aal", "ho"))
    lines = (source / miniature.ABIDE_TABLE).read_text().splitlines()
    (source / miniature.ABIDE_TABLE).write_text("\n".join(line for line in lines if "Leuven_1" not in line) + "\n")
    for atlas in ("aal", "ho"):
        place = source / "Outputs" / "cpac" / "filt_global" / f"rois_{atlas}"
        place.mkdir(parents=True)
        for file in (source / "cpac" / "filt_global").glob(f"*_{atlas}.1D"):
            file.rename(place / file.name)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(source))) as one:
        one.requested, one.refuse, one.source, one.release = [], "", source, release
        one.endless, one.declared, one.sent = "", 0, 0
        one.url = f"http://127.0.0.1:{one.server_address[1]}"
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_folder_is_read_at_once(server, tmp_path):
    result = fetch_abide(tmp_path / "own", ("aal", "ho"), url=server.url)
    assert (result.folder, result.subjects, result.new, result.present, result.damaged) == (
        tmp_path / "own" / "ABIDE_pcp",
        len(PEOPLE),
        2 * len(PEOPLE),
        0,
        0,
    )
    cohort = read(result.folder, atlas=("aal", "ho"))
    assert cohort.subjects.tolist() == sorted(PEOPLE)
    for subject, series in zip(cohort.subjects, cohort.series, strict=True):
        assert series.shape == server.release.series[subject].shape
    np.testing.assert_allclose(cohort.series[2], server.release.series[str(cohort.subjects[2])], rtol=1e-6)
    sums = dict(reversed(line.split("  ")) for line in (result.folder / "SHA256SUMS").read_text().splitlines())
    files = contents(result.folder)
    assert files.pop("SHA256SUMS")
    assert sums == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert sorted(tmp_path.joinpath("own").iterdir()) == [result.folder]


def test_a_second_call_fetches_only_what_is_damaged(server, tmp_path):
    fetch_abide(tmp_path, ("aal",), url=server.url)
    before = contents(tmp_path / "ABIDE_pcp")
    server.requested.clear()
    result = fetch_abide(tmp_path, ("aal",), url=server.url)
    assert (result.new, result.present, server.requested) == (0, len(PEOPLE), [])
    assert contents(tmp_path / "ABIDE_pcp") == before
    for name in (f"cpac/filt_global/{PEOPLE[1]}_rois_aal.1D", miniature.ABIDE_TABLE):
        file = tmp_path / "ABIDE_pcp" / name
        file.write_bytes(file.read_bytes().replace(b"1", b"2"))
    result = fetch_abide(tmp_path, ("aal",), url=server.url)
    assert (result.new, result.damaged) == (1, 2)
    assert contents(tmp_path / "ABIDE_pcp") == before


def test_an_interrupted_download_continues(server, tmp_path):
    server.refuse = PEOPLE[2]
    with pytest.raises(InputError, match=rf"{PEOPLE[2]}_rois_aal\.1D \(subject 3 of 5\) of ABIDE cannot be fetched \(the"):
        fetch_abide(tmp_path / "own", ("aal",), url=server.url)
    folder = tmp_path / "own" / "ABIDE_pcp"
    series = sorted(file.name for file in folder.rglob("*.1D"))
    assert series == sorted(f"{name}_rois_aal.1D" for name in PEOPLE[:2])
    assert {file.name for file in folder.iterdir()} == {miniature.ABIDE_TABLE, "SHA256SUMS", "cpac"}
    assert not [each for each in folder.rglob("*") if len(each.name) == 32 or each.suffix == ".part"]
    server.refuse = ""
    server.requested.clear()
    result = fetch_abide(tmp_path / "own", ("aal",), url=server.url)
    assert (result.new, result.present, len(server.requested)) == (3, 2, 3)
    assert len(read(folder)) == len(PEOPLE)


def test_without_a_network_nothing_is_written(tmp_path, server, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server.refuse = "Phenotypic"
    for url in (server.url, "http://127.0.0.1:9/none"):
        code, _, error = typed("fetch", "abide", "--atlas", "aal", "--out", "deep/own", "--url", url)
        assert (code, error.count("\n")) == (2, 1)
        assert "The phenotype table of ABIDE cannot be fetched" in error
        assert not (tmp_path / "deep").exists()
    assert "no connection to the server" in error


def test_answers_that_are_not_the_data(server, tmp_path):
    (server.source / miniature.ABIDE_TABLE).write_text("<html>Please sign in</html>\n")
    with pytest.raises(InputError, match=r"The phenotype table of ABIDE cannot be fetched"):
        fetch_abide(tmp_path / "own", ("aal",), url=server.url)
    assert not (tmp_path / "own").exists()


def test_a_series_that_is_no_series(server, tmp_path):
    file = server.source / "Outputs" / "cpac" / "filt_global" / "rois_aal" / f"{PEOPLE[0]}_rois_aal.1D"
    file.write_text("<html>Please sign in</html>\n")
    with pytest.raises(InputError, match=rf"{PEOPLE[0]}_rois_aal\.1D"):
        fetch_abide(tmp_path, ("aal",), url=server.url)
    assert not list((tmp_path / "ABIDE_pcp").rglob("*.1D"))


def test_sites_and_number_of_subjects(server, tmp_path):
    result = fetch_abide(tmp_path, ("ho",), sites=("CMU", "MAX_MUN"), subjects=2, url=server.url)
    assert [file.name for file in sorted(result.folder.rglob("*.1D"))] == [
        "CMU_a_0050649_rois_ho.1D",
        "CMU_b_0050669_rois_ho.1D",
    ]
    with pytest.raises(InputError, match=r"has no site cmu; did you mean CMU\?"):
        fetch_abide(tmp_path, ("ho",), sites=("cmu",), url=server.url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("adhd",), "release adhd cannot be fetched; the only one is abide"),
        (("abide", "--atlas", "schaefer"), "ABIDE has no atlas schaefer; choose from aal, cc200"),
        (("abide", "--strategy", "cpac/sharp"), "ABIDE has no strategy cpac/sharp; choose from cpac"),
        (("abide", "--subjects", "0"), "the number of subjects must be at least 1, not 0"),
    ],
)
def test_bad_arguments(typed, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, error = typed("fetch", *arguments)
    assert code == 2 and message in error
    assert not list(tmp_path.iterdir())


def test_the_command_ends_with_what_to_type_next(server, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, _ = typed("fetch", "abide", "--atlas", "aal", "--atlas", "ho", "--site", "CMU", "--url", server.url)
    assert code == 0 and "Di Martino" in text and "4 files fetched" in text
    (line,) = [line for line in text.splitlines() if line.startswith("Next: ")]
    assert line == "Next: m2lgdg check ABIDE_pcp --atlas aal --atlas ho --site CMU"
    _, text, error = typed(*line.split()[2:])
    assert "2 subjects" in text and not error


@pytest.mark.parametrize("declared", [0, 10**12])
def test_an_endless_body_is_not_stored(server, tmp_path, monkeypatch, declared):
    """Whether the server says so or not."""
    monkeypatch.setattr("m2lgdg.data.fetch.LARGEST", 1 << 20)
    server.endless, server.declared = PEOPLE[1], declared
    with pytest.raises(
        InputError, match=rf"{PEOPLE[1]}_rois_aal\.1D .*: no readable file \(the server sends more than 1 MiB\)"
    ):
        fetch_abide(tmp_path / "own", ("aal",), url=server.url)
    assert server.sent < 32 << 20
    folder = tmp_path / "own" / "ABIDE_pcp"
    assert sorted(contents(folder)) == sorted(
        [miniature.ABIDE_TABLE, "SHA256SUMS", f"cpac/filt_global/{PEOPLE[0]}_rois_aal.1D"]
    )


def test_links_lead_to_no_deletion_or_writing_elsewhere(server, tmp_path):
    fetch_abide(tmp_path / "own", ("aal",), url=server.url)
    folder, outside = tmp_path / "own" / "ABIDE_pcp", tmp_path / "outside"
    (outside / "filt_global").mkdir(parents=True)
    (outside / "filt_global" / ("0" * 32)).mkdir()
    precious = outside / "filt_global" / "precious.txt"
    precious.write_text("mine")
    name = f"{PEOPLE[0]}_rois_aal.1D"
    (folder / "elsewhere").symlink_to(outside)
    (folder / "cpac" / "filt_global" / name).unlink()
    (folder / "cpac" / "filt_global" / name).symlink_to(precious)
    lines = [
        f"{'0' * 64}  {each}\n" for each in ("elsewhere/filt_global/precious.txt", "../../outside/filt_global/precious.txt")
    ]
    with (folder / "SHA256SUMS").open("a") as file:
        file.writelines([*lines, f"{'0' * 64}  {precious}\n"])
    result = fetch_abide(tmp_path / "own", ("aal",), url=server.url)
    assert (result.damaged, precious.read_text()) == (1, "mine")  # the link itself was replaced by the file
    assert not (folder / "cpac" / "filt_global" / name).is_symlink()
    assert "precious" not in (folder / "SHA256SUMS").read_text()
    (folder / "cpac").rename(tmp_path / "gone")
    (folder / "cpac").symlink_to(outside)
    with pytest.raises(InputError, match="is a link to another folder, and fetch writes only into"):
        fetch_abide(tmp_path / "own", ("aal",), url=server.url)
    assert sorted(path.name for path in (outside / "filt_global").iterdir()) == ["0" * 32, "precious.txt"]
