"""The README and the pages: outputs that were really printed, tables of the committed results, a reference without gaps."""

import itertools
import pkgutil
import re
import shlex
from pathlib import Path

import executed
import pandas as pd
import pytest
import readme_tables
import reference
from page_tables.committed import by_site
from scipy.stats import ttest_rel
from typer.main import get_command

import m2lgdg
from m2lgdg.commands import terminal
from m2lgdg.commands.terminal import COMMANDS
from m2lgdg.metrics import auc, delong_interval
from m2lgdg.registry import load_methods
from m2lgdg.study.config import Study
from m2lgdg.study.predictions import read_predictions
from m2lgdg.study.stats import cell_scores, holm, site_scores

ROOT = Path(__file__).parents[1]
PAGE = """<!-- executed -->
```toml title="note.toml"
name = "here"
```

```bash
cat note.toml
for i in 1 2 3 4 5; do echo line $i; done
```

```text
old
...
line 5
```

Between.

```python
print(open("note.toml").read().strip())
```

```text
```

```text
not an output
```
"""


def test_a_page_gets_its_real_output():
    result = executed.with_outputs(PAGE)
    assert result == PAGE.replace("old\n...", 'name = "here"\n...').replace("```text\n```", '```text\nname = "here"\n```')
    assert executed.with_outputs(result) == result
    assert executed.with_outputs(PAGE.replace(executed.MARK, "")) == PAGE.replace(executed.MARK, "")


def test_cut_outputs_follow_the_lines_of_the_page():
    printed = "a 1\n\nb 2\nc\n\nd\n\ne\nf\n"
    assert executed.shortened(printed, "") == printed
    assert executed.shortened(printed, "x\n...\ne\n") == "a 1\n...\ne\nf\n"
    assert executed.shortened(printed, "x\n...\nb 7\n...\ne\nold\n") == "a 1\n...\nb 2\nc\n...\ne\nf\n"
    assert executed.shortened(printed, "...\nd\n") == "...\nd\n\ne\nf\n"
    assert executed.shortened(printed, "x\n...\ngone\n") == printed


def test_a_command_that_fails_is_named():
    with pytest.raises(executed.Failed, match=r"exit code 3 of\nexit 3"):
        executed.with_outputs(PAGE.replace("cat note.toml\n", "exit 3\n"))


def test_outputs_are_compared_without_their_numbers():
    first, second = "AUC  0.91\n------\n7 s, content 0123abcd4567", "AUC 0.9\n---\n12 s, content 89ab0123cdef"
    assert executed.masked(first) == executed.masked(second) != executed.masked(first.replace("AUC", "ACC"))


def test_long_sentences_are_folded_and_tables_are_not():
    sentence, row = "word " * 30, f"name{' ' * 120}0.5  0.6"
    assert max(map(len, executed.folded([sentence]))) <= 100
    assert executed.folded([row, ""]) == [row, ""]


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/pytorch.md", marks=pytest.mark.long)])
def test_a_page_prints_what_it_shows(page):
    text = (ROOT / page).read_text()
    assert executed.masked(executed.with_outputs(text)) == executed.masked(text), "python docs/executed.py writes it anew"


def commands_of(page):
    """Words of each command of m2lgdg in the blocks of a page, without `m2lgdg` itself."""
    for block in re.findall(r"^```(?:sh|bash)?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if re.match(r"m2lgdg [a-z]", line) and " [--" not in line:  # not a usage with brackets
                yield shlex.split(line, comments=True)[1:]


def test_commands_of_the_pages_can_be_parsed():
    """Those that need data of a release or a reader's own are not run; their names and options are the command line's."""
    parsed = 0
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for words in commands_of(page):
            command, rest = get_command(terminal.app), list(words)
            while hasattr(command, "get_command"):  # a group
                command = command.get_command(None, rest.pop(0))
                assert command is not None, (page.name, words)
            command.make_context(words[0], rest)  # raises if an option or an argument is wrong
            parsed += 1
    assert parsed > 40


def test_the_table_of_the_readme_is_that_of_the_results():
    text = readme_tables.README.read_text()
    assert readme_tables.BLOCK.search(text) and readme_tables.rewritten(text) == text, "python docs/readme_tables.py"


def areas_of(study, name, variant):
    """Mean and sd of AUC over seeds in percent by site, by the statistics of the package."""
    table = site_scores(cell_scores(read_predictions(ROOT / "results" / study)))
    own = table[(table["method"] == name) & (table["variant"] == variant) & (table["metric"] == "AUC")]
    return 100 * own.set_index("target")[["mean", "sd"]]


def test_values_of_the_readme():
    text = readme_tables.table()
    rows = [row.split("|")[1:-1] for row in text.splitlines() if row.startswith("|")]
    cells = {
        re.search(r"`([\w-]+)`", row[0])[1]: [float(cell) for cell in row[1:]]
        for row in rows
        if "`" in row[0] and len(row) == 6
    }
    places = ("abide-all/{}", "abide-ii/{}", "rest-meta-mdd-connectomes/{}")
    for name, parts, variant in (
        ("connectome-adaptive", ("linear", "linear", "linear"), "phenotypes"),
        ("m2lgdg-connectome", ("m2lgdg-connectome-seeds", "network", "networks"), ""),
    ):
        studies = [place.format(part) for place, part in zip(places, parts, strict=True)]
        one, two, three = (areas_of(study, name, variant)["mean"] for study in studies)
        five = [f"ABIDEII-{site}_1" for site in ("NYU", "SDSU", "TCD", "UCD", "USM")]
        expected = [one.mean(), one[["NYU", "USM", "UM_1", "YALE"]].mean(), two.mean(), two[five].mean(), three.mean()]
        assert (len(one), len(two), len(three)) == (20, 14, 12) and cells[name] == pytest.approx(expected, abs=0.0501)
    studies = ("abide-all/linear", "abide-ii/peers", "rest-meta-mdd-connectomes/linear")
    svm = [areas_of(study, "fc-svm", "phenotypes")["mean"] for study in studies]
    assert [cells["fc-svm"][i] for i in (0, 2, 4)] == pytest.approx([own.mean() for own in svm], abs=0.0501)


def test_the_paper_at_two_sites_in_the_readme():
    """Single trainings, their average with its interval, the paper's AUC and phenotypes alone."""
    single, alone = areas_of("paper/networks", "m2lgdg", ""), areas_of("abide-all/motion", "phenotype-logistic", "")
    paper = pd.read_csv(ROOT / "studies" / "paper-abide.csv").set_index(["method", "target", "metric"])["value"]
    table = read_predictions(ROOT / "results" / "paper/networks").query("method == 'm2lgdg' and variant == ''")
    rows = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in readme_tables.paper_lines()[2:])}
    assert list(rows) == ["NYU", "USM"]
    for site, cells in rows.items():
        mean = table.query("target == @site").groupby("subject")[["label", "proba"]].mean()
        labels, proba = mean.to_numpy().T
        low, high = delong_interval(labels.astype(int), proba)
        expected = [*single.loc[site], 100 * auc(labels.astype(int), proba), 100 * low, 100 * high]
        expected += [paper["m2lgdg", site, "AUC"], alone.loc[site, "mean"]]
        found = [float(value) for value in re.findall(r"[\d.]+", " ".join(cells))]
        assert found == [pytest.approx(value, abs=0.501 if i in (3, 4) else 0.0501) for i, value in enumerate(expected)]
        # "near its published AUC, and so are phenotypes alone": within one sd of the paper's table
        assert all(abs(found[i] - found[5]) < {"NYU": 3.56, "USM": 2.79}[site] for i in (0, 6))


def test_what_the_readme_calls_not_clear():
    """No p over sites is below 0.05 after Holm's correction among the first three rows, nor beside phenotypes in depression."""
    first = [[readme_tables.chosen(name)] for name in (readme_tables.DEFAULT, readme_tables.NETWORK)]
    first.append([own[0] for own in first[::-1]])
    joined = [[by_site(*sets) for sets in zip(*models, strict=True)] for models in first]
    for one in zip(*joined, strict=True):  # a data set
        pairs = [ttest_rel(a, b[a.index]).pvalue for a, b in itertools.combinations(one, 2)]
        assert min(holm(pairs)) > 0.05
    alone = by_site(("rest-meta-mdd-connectomes/linear", "phenotype-logistic", ""))
    peers = [by_site(readme_tables.chosen(name)[2]) for name in (readme_tables.PEER, "fc-svm", "fc-logistic")]
    rows = [*(sets[2] for sets in joined), *peers]
    assert min(holm([ttest_rel(own, alone[own.index]).pvalue for own in rows])) > 0.05


def test_the_figure_shows_every_method_of_the_study():
    frame = readme_tables.forest_rows()
    predicted = set(read_predictions(ROOT / "results" / readme_tables.TWENTY)["method"]) - {"prior"}
    folders = ("networks", "mm-gtunets", "gpu", "brainnet-transformer")
    studies = [read_predictions(ROOT / "results" / "abide-all" / name) for name in folders]
    networks = set(pd.concat(studies)["method"])
    others = {"irm", "coral", "group-dro"}  # on depression alone
    assert len(networks) == 16 and set(frame["method"]) == predicted | networks | others | {"m2lgdg-connectome"}
    assert set(frame.loc[frame["order"].isna(), "method"]) == others and set(frame["method"].iloc[-3:]) == others
    assert set(frame.loc[frame["apart"].notna(), "method"]) == set(frame["method"]) - others
    assert not frame.duplicated(["set", "method"]).any() and dict(frame.groupby("set")["sites"].max()) == {
        "ABIDE I": 20,
        "ABIDE II": 14,
        "depression": 12,
    }
    one = frame.set_index(["set", "method"]).loc[("ABIDE II", "fc-svm")]
    own = areas_of("abide-ii/peers", "fc-svm", "phenotypes")["mean"]
    assert one["mean"] == pytest.approx(own.mean()) and one["half"] == pytest.approx(2.1604 * own.std() / 14**0.5, rel=1e-4)
    areas = frame.set_index(["set", "method"])["mean"]
    for place, study in (("ABIDE I", "abide-all/networks"), ("depression", "rest-meta-mdd-connectomes/networks")):
        assert areas[place, "mldg"] == pytest.approx(areas_of(study, "mldg", "phenotypes")["mean"].mean())
    changed = areas_of("rest-meta-mdd-connectomes/genm", "genm", "phenotypes")["mean"].mean()  # not that of `more`
    assert areas["depression", "genm"] == pytest.approx(changed)
    assert areas["ABIDE I", "mm-gtunets"] == pytest.approx(  # with IQ, as the others
        areas_of("abide-all/mm-gtunets", "mm-gtunets", "all-phenotypes")["mean"].mean()
    )
    present = areas_of("rest-meta-mdd-connectomes/networks", "m2lgdg-connectome", "")["mean"].mean()
    assert areas["depression", "m2lgdg-connectome"] == pytest.approx(present)


def test_pictures_are_small():
    pictures = sorted((ROOT / "docs" / "images").glob("*.png"))
    assert {"forest.png", "forest-dark.png", "report-top.png"} <= {path.name for path in pictures}
    assert all(path.stat().st_size <= 300_000 for path in pictures)
    for name in re.findall(r'(?:src|srcset)="([^"]+)"', (ROOT / "README.md").read_text()):
        assert (ROOT / name).is_file()


def test_the_reference_has_every_command_key_and_name():
    pages = {
        name: reference.filled((ROOT / "docs" / f"{name}.md").read_text()) for name in ("commands", "studies", "methods", "api")
    }
    assert re.findall(r"^## (.+)$", pages["commands"], re.M) == list(COMMANDS)
    assert "| `--out` | Folder to write to. | `demo` |" in pages["commands"]
    assert set(Study.model_fields) <= set(re.findall(r"^\| `(\w+)` \|", pages["studies"], re.M))
    assert "| `seeds` | list of integer | `[0, 1, 2, 3, 4]` |" in pages["studies"]
    assert set(re.findall(r"^#### ([\w-]+)$", pages["methods"], re.M)) == set(load_methods().modules)
    for name in m2lgdg.__all__:
        assert re.search(rf"^##+ m2lgdg\.{name}$", pages["api"], re.M), name
    assert "`.predict_proba(target: Cohort) -> NDArray[float64]`" in pages["api"]
    assert not any("<!-- generated" in page for page in pages.values())


def test_names_and_files_that_pages_mention_exist():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text()
        for name in set(re.findall(r"\bm2lgdg(?:\.[A-Za-z_]\w*)+", text)):
            if not name.endswith((".md", ".py", ".png", ".sif", ".tar", ".federated.flower")):
                assert pkgutil.resolve_name(name), f"{page.name}: {name}"
        for path in set(re.findall(r"`(?:python )?((?:\w+/)+[a-z_0-9]+\.py)\b", text)):
            assert (ROOT / path).is_file() or (ROOT / "src" / "m2lgdg" / path).is_file(), f"{page.name}: {path}"


def test_numbers_of_a_table_stay_on_one_line():
    pytest.importorskip("mkdocs")
    import site_hooks

    html = "<p>66.9 ± 3.1</p><td>66.9 ± 3.1 [69.2]</td><td>77.4 / 81.5</td><td>-0.6 (-7.1 to 5.8)</td><td>from 1 to many</td>"
    shown = site_hooks.on_page_content(html, None, None, None).replace("\N{NO-BREAK SPACE}", "_")
    cells = "<td>66.9_±_3.1 [69.2]</td><td>77.4_/_81.5</td><td>-0.6 (-7.1_to_5.8)</td><td>from 1 to many</td>"
    assert shown == f"<p>66.9 ± 3.1</p>{cells}"
    assert (
        site_hooks.on_page_content("<code>--max-motion</code>", None, None, None) == '<code class="option">--max-motion</code>'
    )
