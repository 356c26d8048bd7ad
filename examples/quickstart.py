"""From a cohort of several sites to the table of a paper: each site is left out once, two methods are compared."""

import m2lgdg

# A synthetic cohort with a known effect. For your own data: m2lgdg.read("ABIDE_pcp"), or any folder of docs/data.md.
cohort = m2lgdg.make_cohort("tiny", seed=1)
cohort.save("tiny.cohort")
print(cohort)

study = {"cohort": "tiny.cohort", "methods": ["phenotype-logistic", "fc-logistic"], "seeds": [0]}
summary = m2lgdg.run_study(study, "runs/quickstart")  # can be stopped at any time; the next run continues
print(f"{summary.done} trainings, {len(summary.failed)} failed")

print(m2lgdg.table("runs/quickstart"))  # each target site, then the mean over sites with paired tests
