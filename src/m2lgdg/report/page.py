"""`report.html`: a study's answer, tables and forest plot on one page that needs nothing else, not even a network.

Made from the files of a study folder alone (predictions, study.json, environment.json, inclusion.csv, failures.csv).
"""

from __future__ import annotations

import base64
import io
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.metrics import delong_interval
from m2lgdg.report.tables import changed_fields, label, study_tables
from m2lgdg.stats import cell_scores, macro_scores, site_scores
from m2lgdg.storage import write_text
from m2lgdg.study import read_predictions


def write_report(folder: str | Path) -> Path:
    """Write report.html into a study folder."""
    from jinja2 import Environment

    folder = Path(folder)
    predictions = read_predictions(folder)
    study, environment = (read_json(folder / name) for name in ("study.json", "environment.json"))
    tables = study_tables(predictions)
    page = Environment(autoescape=True).from_string((files("m2lgdg") / "report" / "page.html").read_text(encoding="utf-8"))
    text = page.render(
        study={"name": study.get("name", "study")},
        answer=_answer(predictions),
        failures=_rows(folder / "failures.csv"),
        forest=_forest(predictions),
        tables=[tables[-1], *tables[:-1]],  # the overall answer first
        facts=_facts(predictions, study, environment, _rows(folder / "inclusion.csv")),
    )
    return write_text(folder / "report.html", text)


def _answer(predictions: pd.DataFrame) -> str:
    macro = macro_scores(site_scores(cell_scores(predictions, ("AUC",))))
    macro = macro.sort_values("mean", ascending=False, kind="stable").dropna(subset=["mean"])
    if not len(macro):
        return "No target site has both patients and controls, so no AUC is defined."
    lines = [f"{label(row.method, row.variant)} {100 * row.mean:.1f}" for row in macro.head(3).itertuples()]
    spread = f" (sd over sites {100 * macro.iloc[0]['sd']:.1f})" if macro.iloc[0]["sites"] > 1 else ""
    sites = int(macro.iloc[0]["sites"])
    rest = f", ahead of {', '.join(lines[1:])}" if lines[1:] else ""
    where = f"over {sites} unseen sites" if sites > 1 else "at the unseen site"
    return f"Mean AUC {where}: {lines[0]}{spread}{rest}. 50 is chance."


def _facts(
    predictions: pd.DataFrame, study: dict[str, Any], environment: dict[str, Any], inclusion: list[dict[str, str]]
) -> list[tuple[str, str]]:
    included = sum(row["status"] == "included" for row in inclusion)
    return [
        ("subjects included / excluded", f"{included} / {len(inclusion) - included} (reasons in inclusion.csv)"),
        ("targets", ", ".join(dict.fromkeys(predictions["target"]))),
        ("seeds", ", ".join(map(str, study.get("seeds", [])))),
        ("phenotype inputs", ", ".join(study.get("inputs") or []) or "none"),
        ("selection", "penalties, calibration and early stopping on source subjects only"),
        ("fields changed from their defaults", changed_fields(study) or "none"),
        ("decision threshold", "0.5"),
        ("cohort content", str(study.get("cohort_hash", ""))[:16]),
        ("versions", ", ".join(f"{name} {version}" for name, version in environment.items())),
    ]


def _forest(predictions: pd.DataFrame) -> str:
    """A PNG, base64: AUC with DeLong intervals by site (probabilities averaged over seeds), one colour a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mean = predictions.groupby(["method", "variant", "target", "subject"], sort=False).agg(
        label=("label", "first"), proba=("proba", "mean")
    )
    mean = mean.reset_index()
    keys = list(dict.fromkeys(zip(mean["method"], mean["variant"], strict=True)))
    sites = list(dict.fromkeys(mean["target"]))
    scores = site_scores(cell_scores(predictions, ("AUC",))).set_index(["method", "variant", "target"])["mean"]
    step = 0.8 / len(keys)
    figure, axis = plt.subplots(figsize=(9, 1.2 + max(0.14 * len(keys) + 0.25, 0.4) * len(sites)), dpi=130)
    colours = plt.get_cmap("tab20" if len(keys) > 10 else "tab10")
    for k, key in enumerate(keys):
        for s, site in enumerate(sites):
            part = mean[(mean["method"] == key[0]) & (mean["variant"] == key[1]) & (mean["target"] == site)]
            area = float(scores.get((*key, site), np.nan))
            if len(part) and not np.isnan(area):
                low, high = delong_interval(part["label"].to_numpy(), part["proba"].to_numpy())
                y = s + k * step - 0.4 + step / 2
                axis.plot([low, high], [y, y], color=colours(k % 20), lw=1.2, alpha=0.7)
                axis.plot([area], [y], "o", color=colours(k % 20), ms=4, label=label(*key) if s == 0 else None)
    axis.axvline(0.5, color="0.5", lw=1, ls=":")
    axis.set_yticks(range(len(sites)), [site if len(site) < 30 else site[:29] + "…" for site in sites])
    axis.set_ylim(len(sites) - 0.5, -0.5)
    axis.set_xlim(0.2, 1.0)
    axis.set_xlabel("AUC at the unseen site (line: 95 % DeLong interval)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    return base64.b64encode(buffer.getvalue()).decode()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    rows: list[dict[str, str]] = table.to_dict("records")
    return rows
