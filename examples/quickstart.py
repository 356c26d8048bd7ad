"""From a cohort of several sites to the table of a paper: every site is left out once, two methods are compared."""

import m2lgdg
from m2lgdg.report.tables import render, study_tables
from m2lgdg.study.predictions import read_predictions

# A synthetic cohort whose truth is known. Yours: m2lgdg.read("ABIDE_pcp"), or any folder of docs/data.md.
cohort = m2lgdg.make_cohort("tiny", seed=1)
cohort.save("tiny.cohort")
print(cohort)

study = {"cohort": "tiny.cohort", "methods": ["phenotype-logistic", "fc-logistic"], "seeds": [0]}
summary = m2lgdg.run_study(study, "runs/quickstart")  # stop it any time: run again, it goes on
print(f"{summary.done} trainings, {len(summary.failed)} failed")

*sites, overall = study_tables(read_predictions("runs/quickstart"))
print(render([overall], "text"))
