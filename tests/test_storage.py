"""Killed saves and full disks leave nothing that stays or blocks: temporary files go with the next save, folders are whole."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from m2lgdg import InputError, make, storage
from m2lgdg.storage import TEMPORARY, new_folder, remove_abandoned, write_text, write_texts, writing

SAVE = """
import sys
from m2lgdg.storage import new_folder, writing
with {}(sys.argv[1]) as part:
    (part / "weights" if part.is_dir() else part).write_bytes(bytes(1 << 20))
    print("written", flush=True)
    sys.stdin.read()
"""


def temporaries(folder):
    return sorted(path.name for path in Path(folder).iterdir() if TEMPORARY.fullmatch(path.name))


@pytest.fixture(params=["writing", "new_folder"])
def saving(request, tmp_path):
    """A process in the middle of a save to tmp_path/out."""
    command = [sys.executable, "-c", SAVE.format(request.param), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "written\n"
    yield process
    process.kill()
    process.communicate()


def test_what_a_killed_save_leaves_goes_with_the_next(saving, tmp_path):
    assert len(temporaries(tmp_path)) == 1
    saving.send_signal(signal.SIGKILL)
    saving.wait()
    assert len(temporaries(tmp_path)) == 1
    write_text(tmp_path / "another", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["another"]


def test_a_save_that_goes_on_is_left_alone(saving, tmp_path):
    write_text(tmp_path / "another", "text")
    remove_abandoned(tmp_path)
    assert len(temporaries(tmp_path)) == 1
    saving.communicate("")
    assert saving.returncode == 0
    out = tmp_path / "out"
    assert (out / "weights" if out.is_dir() else out).stat().st_size == 1 << 20
    assert temporaries(tmp_path) == []


def test_saves_of_one_process_leave_each_other_alone(tmp_path):
    with writing(tmp_path / "a") as first:
        threads = [threading.Thread(target=write_text, args=(tmp_path / f"b{i}", "b")) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        write_texts(tmp_path, {"c": "c", "d": "d"})
        first.write_text("a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", *(f"b{i}" for i in range(8)), "c", "d"]


def test_files_of_others_are_never_taken_for_ours(tmp_path):
    names = [".bashrc", ".config.settings", ".a.m2lgdg-", ".a.m2lgdg-000000-abcdefgh", "a.m2lgdg-000000-abcdefgh"]
    for name in names:  # the second last is of another machine, whose processes cannot be seen from here
        (tmp_path / name).write_text("")
    write_text(tmp_path / "out", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "out"])


def test_a_folder_is_whole_or_as_it_was(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "a" / "b") as part:
        write_text(part / "file", "text")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"^cannot write .*empty: No space left on device\.$"), new_folder(tmp_path / "empty"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list((tmp_path / "empty").iterdir()) == []
    for name in ("empty", "new"):
        with new_folder(tmp_path / name) as part:
            write_text(part / "sub" / "file", "text")
        assert [path.name for path in (tmp_path / name).iterdir()] == ["sub"]
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o777 & ~_umask()
        with pytest.raises(InputError, match="is not empty"), new_folder(tmp_path / name):
            pass
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is not a folder"), new_folder(tmp_path / "file"):
        pass


def _umask():
    current = os.umask(0o022)
    os.umask(current)
    return current


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tiny):
    """A cohort, a model and a study folder."""
    from m2lgdg import run_study

    folder = tmp_path_factory.mktemp("prepared")
    tiny.save(folder / "tiny.cohort")
    make("fc-logistic").fit(tiny, source_distribution=True, new_site_calibration=True).save(folder / "model")
    study = {"cohort": str(folder / "tiny.cohort"), "methods": ["phenotype-logistic"], "seeds": [0], "explain": True}
    run_study(study, folder / "study")
    return folder


COMMANDS = {
    "fit": ("fit", "tiny.cohort", "--method", "phenotype-logistic"),
    "share": ("share", "study"),
    "export": ("export", "model", "--share"),
    "calibrate": ("calibrate", "model", "tiny.cohort"),
    "explain": ("explain", "model", "tiny.cohort"),
    "report": ("report", "study", "--share"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_is_full_at_any_write_blocks_no_next_try(name, prepared, typed, monkeypatch, figures_painted_only):
    monkeypatch.chdir(prepared)
    sync, count = os.fsync, [0]
    monkeypatch.setattr("os.fsync", lambda handle: (count.__setitem__(0, count[0] + 1), sync(handle)))
    assert typed(*COMMANDS[name], "--out", f"{name}-whole")[0] == 0
    writes = count[0]
    assert writes >= 2
    for n in sorted({0, writes - 1}):
        left = [n]

        def fails(handle, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(handle)

        to = prepared / f"{name}-{n}"
        monkeypatch.setattr("os.fsync", fails)
        code, _, errors = typed(*COMMANDS[name], "--out", to)
        assert code == 2 and errors.count("\n") == 1 and "No space left on device" in errors and str(to) in errors
        assert ".m2lgdg-" not in errors
        if name != "report":  # the next report replaces what is there
            assert not to.exists()
        assert temporaries(prepared) == []
        monkeypatch.setattr("os.fsync", sync)
        assert typed(*COMMANDS[name], "--out", to)[0] == 0
        assert _names(to) == _names(prepared / f"{name}-whole")


def _names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_copy_that_fails_is_a_sentence(prepared, typed, monkeypatch):
    """`share` copies explanations by shutil."""
    monkeypatch.chdir(prepared)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copy", full)
        code, _, errors = typed("share", "study", "--out", "copy")
    assert code == 2 and errors == "m2lgdg: cannot write copy: No space left on device.\n"
    assert not Path("copy").exists() and temporaries(prepared) == []
    assert typed("share", "study", "--out", "copy")[0] == 0


@pytest.mark.onnx
def test_graph_and_description_are_written_both_or_not_at_all(prepared, typed, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(prepared)
    sync, left = os.fsync, [1]

    def fails(handle):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr("os.fsync", fails)
    code, _, errors = typed("export", "model", "--out", "graph/model.onnx")
    assert code == 2 and "No space left" in errors
    assert not Path("graph/model.onnx").exists()


def test_existing_files_are_replaced_only_on_request(prepared, typed, monkeypatch):
    monkeypatch.chdir(prepared)
    for words in (("predict", "model", "tiny.cohort", "--out", "mine.csv"), ("convert", "tiny.cohort", "mine.csv")):
        Path("mine.csv").write_text("years of work")
        code, _, errors = typed(*words)
        assert (code, Path("mine.csv").read_text()) == (2, "years of work")
        assert errors == "m2lgdg: mine.csv already exists; add --overwrite to replace it, or choose another name.\n"
        assert typed(*words, "--overwrite")[0] == 0
        assert Path("mine.csv").stat().st_size > 100
    assert typed("predict", "model", "tiny.cohort", "--out", "study")[0] == 2


def test_the_same_tensors_have_the_same_bytes(tmp_path):
    """The library of safetensors shuffles metadata, so that a model made again would have another hash."""
    tensors = {"b": np.arange(3.0), "a": np.zeros((2, 0), dtype=np.float32)}
    metadata = {"format": "some-1"} | {f"key-{i}": f'"é\n\t{i}\x7f\\' for i in range(8)}
    files = [storage.write_tensors(tmp_path / f"{i}", tensors, metadata).read_bytes() for i in range(5)]
    assert len({*files}) == 1
    stored, values = storage.read_tensors(tmp_path / "0", "some-1")
    assert stored == metadata and list(storage.read_metadata(tmp_path / "0")) == sorted(metadata)
    np.testing.assert_array_equal(values["b"], tensors["b"])
