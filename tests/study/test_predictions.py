"""Several studies of one cohort in one table: the same numbers as one study of all methods, and what is refused."""

import itertools
import json
import re

import numpy as np
import pandas as pd
import pytest

import m2lgdg
from m2lgdg import InputError
from m2lgdg.study.predictions import COLUMNS, adapted_variant, read_joined_predictions, read_predictions

METHODS = ("one", "two", "three")


SITES = ("A", "B", "C")


def predicted(methods=METHODS, sites=SITES, seeds=2):
    """Thirty subjects a site; a method has the same probabilities in whatever study it is."""
    rows = []
    for method, site, seed in itertools.product(methods, sites, range(seeds)):
        rng = np.random.default_rng([METHODS.index(method), SITES.index(site), seed])
        labels = np.array([0, 1] * 15)
        scores = 1 / (1 + np.exp(-(0.5 * (2 * labels - 1) + rng.normal(size=30))))
        rows += [(method, "", seed, site, f"{site}{i}", label, scores[i]) for i, label in enumerate(labels)]
    return pd.DataFrame(rows, columns=COLUMNS)


def study(folder, table, source=("D0", "D1")):
    """A study folder with these predictions, and source subjects besides the targets."""
    folder.mkdir()
    table.to_csv(folder / "predictions.csv", index=False)
    subjects = [*dict.fromkeys(zip(table["subject"], table["target"], strict=True)), *((name, "D") for name in source)]
    inclusion = [(subject, site, "included", "") for subject, site in subjects] + [("X", "D", "excluded", "too short")]
    pd.DataFrame(inclusion, columns=["subject", "site", "status", "reason"]).to_csv(folder / "inclusion.csv", index=False)
    return folder


@pytest.mark.parametrize("parts", [(1, 2), (2, 1), (1, 1, 1)])
@pytest.mark.parametrize("form", ["text", "csv"])
def test_the_same_tables_as_one_study(parts, form, tmp_path):
    whole, names, folders = study(tmp_path / "whole", predicted()), iter(METHODS), []
    for i, count in enumerate(parts):
        folders.append(study(tmp_path / f"part{i}", predicted(tuple(itertools.islice(names, count)))))
    expected = m2lgdg.table(whole, form, tests=True)
    assert m2lgdg.table(folders[0], form, also=folders[1:], tests=True) == expected
    assert "three" not in m2lgdg.table(folders[0], form)


def test_different_numbers_of_seeds_are_named(tmp_path):
    first, second = (
        study(tmp_path / "a", predicted(("one",), seeds=2)),
        study(tmp_path / "b", predicted(("two",), seeds=4)),
    )
    assert "mean ± sd over 2 to 4 seeds" in m2lgdg.table(first, also=[second])
    third = study(tmp_path / "c", predicted(("three",), seeds=1))
    assert "mean ± sd over 2 seeds (one seed where no sd is given)" in m2lgdg.table(first, also=third)


def other_labels():
    table = predicted(("two",))
    return table.assign(label=1 - table["label"])


@pytest.mark.parametrize(
    ("table", "source", "words"),
    [
        (predicted(("two",), ("A", "B")), ("D0", "D1"), "no predictions at C, a target of"),
        (predicted(("two",)).query("subject != 'B3'"), ("D0", "D1"), "different subjects or labels at B"),
        (other_labels(), ("D0", "D1"), "different subjects or labels at A"),
        (predicted(("two",)), ("D0",), "run with different subjects"),
        (predicted(("one", "two")), ("D0", "D1"), "both have one"),
    ],
)
def test_studies_that_cannot_be_compared_are_refused(table, source, words, tmp_path):
    first, second = study(tmp_path / "a", predicted(("one",))), study(tmp_path / "b", table, source)
    with pytest.raises(InputError, match=words) as refused:
        m2lgdg.table(first, also=[second])
    assert str(second) in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe",
        b"subject;site;status\nA0;A;included\n",
        b"subject,status\nA0,included\n",
        b"subject,site,status,reason\n",
    ],
    ids=["empty", "binary", "semicolons", "no site", "header"],
)
def test_a_damaged_list_of_subjects_is_refused_only_where_it_is_needed(content, tmp_path):
    first, second = study(tmp_path / "a", predicted(("one",))), study(tmp_path / "b", predicted(("two",)))
    (second / "inclusion.csv").write_bytes(content)
    with pytest.raises(InputError, match=r"inclusion\.csv"):
        m2lgdg.table(first, also=[second])
    assert "two" in m2lgdg.table(second)


def test_variants_are_apart_and_a_study_without_inclusion_is_taken(tmp_path):
    first = study(tmp_path / "a", predicted(("one",)))
    second = study(tmp_path / "b", predicted(("one",)).assign(variant="more"))
    (first / "inclusion.csv").unlink()
    assert len(read_joined_predictions([first, second])) == 2 * len(read_joined_predictions([first]))
    with pytest.raises(InputError, match="both have one, variant more"):
        read_joined_predictions([first, second, second])
    third = study(tmp_path / "c", predicted(("three",)), ("D0", "D7"))  # compared with the second: the first lists no subjects
    with pytest.raises(InputError, match="different subjects"):
        read_joined_predictions([first, second, third])


def test_an_adapted_track_next_to_a_strict_study(tmp_path):
    """The main method of the first study is not in the adapted track, and the note has the size of the adapted study."""
    both = predicted(("two", "three"))
    adapted = both.assign(variant=adapted_variant(""), proba=both["proba"] ** 0.9)
    first, second = (
        study(tmp_path / "a", predicted(("one",))),
        study(tmp_path / "b", pd.concat([both, adapted])),
    )
    third = study(tmp_path / "c", adapted.query("method == 'two'").assign(variant=adapted_variant("more")))
    (first / "study.json").write_text(json.dumps({"main": "one", "adapt_subjects": 20}))
    (second / "study.json").write_text(json.dumps({"track": ["strict", "adapted"], "adapt_subjects": 5}))
    (third / "study.json").write_text(json.dumps({"track": ["adapted"], "adapt_subjects": 7}))
    text = m2lgdg.table(first, also=[second])
    assert "Target A, adapted track" in text and "5 other subjects" in text and "20" not in text.split("adapted track")[1]
    with pytest.raises(InputError, match="different adapt_subjects"):
        m2lgdg.table(first, also=[second, third])


def test_the_command(typed, tmp_path):
    first, second = (
        study(tmp_path / "a", predicted(("one",))),
        study(tmp_path / "b", predicted(("two", "three"))),
    )
    code, out, err = typed("table", first, "--also", second, "--best", "two")
    assert code == 0 and out.startswith(m2lgdg.table(first, also=[second], best="two").rstrip())
    assert err.strip() == f"Next: m2lgdg report {first} --best two --also {second}"
    code, _, err = typed("table", first, "--also", tmp_path / "nowhere")
    assert code == 2 and "nowhere is not a study folder" in err


def test_lines_below_the_tables_name_their_study(typed, tmp_path):
    first, second = study(tmp_path / "a", predicted(("one",))), study(tmp_path / "b", predicted(("two",)))
    (first / "study.json").write_text(json.dumps({"cohort_hash": "1"}))
    (second / "study.json").write_text(
        json.dumps({"cohort_hash": "2", "methods": ["two"], "seeds": [0, 1, 2], "targets": SITES})
    )
    out = typed("table", first, "--also", second)[1]
    assert f"{second}: run on another version of the cohort than {first} (" in out
    assert f"{second}: Missing in these tables (failed or not run yet): 3 cells of two." in out
    assert "version of the cohort" not in typed("table", first)[1]


EDITED = {
    "proba": [(value, "a probability") for value in ("nan", "", "inf", "1.7", "-0.1", "high")],
    "label": [(value, "1, 0 or -1 (not known)") for value in ("2", "", "patient", "0.5")],
    "seed": [(value, "a seed") for value in ("a", "", "-1", "0.5")],
}


@pytest.mark.parametrize(("column", "value", "kind"), [(name, *pair) for name, pairs in EDITED.items() for pair in pairs])
def test_edited_predictions_are_refused_with_their_line(tmp_path, column, value, kind):
    edited = predicted().astype({column: object})
    edited.loc[3, column] = value
    edited.to_csv(tmp_path / "predictions.csv", index=False)
    with pytest.raises(InputError, match=re.escape(f"line 5: {column} {value!r} is not {kind}.")):
        read_predictions(tmp_path)


def test_a_subject_twice_or_with_two_labels_is_refused(tmp_path):
    predictions = predicted()
    pd.concat([predictions, predictions.iloc[[7]]]).to_csv(tmp_path / "predictions.csv", index=False)
    with pytest.raises(InputError, match=f"line {len(predictions) + 2}: a subject occurs twice in the same cell"):
        read_predictions(tmp_path)
    other = predictions.copy()
    other.loc[3, "label"] = 1 - other.loc[3, "label"]
    other.to_csv(tmp_path / "predictions.csv", index=False)
    with pytest.raises(InputError, match="subject A3 at A has different labels in different rows"):
        read_predictions(tmp_path)
