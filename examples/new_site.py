"""A model of all your sites at a hospital it has never seen: probabilities, and which of them to distrust."""

import m2lgdg

cohort = m2lgdg.make_cohort("tiny", seed=1)
ours = cohort.select(cohort.sites != "west")
newcomer = cohort.select(cohort.sites == "west").unlabelled()  # a new hospital has no labels yet

model = m2lgdg.make("connectome-adaptive", phenotypes=True).fit(ours, source_distribution=True)
model.save("model")  # safetensors and JSON, no pickle: this folder is what you send

fitted = m2lgdg.Method.load("model")
proba = fitted.predict_proba(newcomer)[:, 1]
shift = fitted.source_distribution_.scores(newcomer)[
    "connectivity"
]  # above 1: further from source than 19 of 20 at a usual new site
for one in range(5):
    said = "; ".join(fitted.flags(newcomer)[one]) or "nothing to remark"
    print(f"subject {one}: proba {proba[one]:.2f}, shift {shift[one]:.2f}, {said}")

print("The site as a whole:")
for line in fitted.source_distribution_.compare(newcomer):
    print(f"  {line}")
