"""A model of all your sites, applied to a hospital it has never seen: probabilities, OOD scores and quality flags."""

import m2lgdg

cohort = m2lgdg.make_cohort("tiny", seed=1)
known = cohort.select(cohort.sites != "west")
newcomer = cohort.select(cohort.sites == "west").unlabelled()  # a new hospital has no labels yet

model = m2lgdg.make("connectome-adaptive", phenotypes=True).fit(known, source_distribution=True)
model.save("model")  # safetensors and JSON, no pickle; send this folder

fitted = m2lgdg.Model.load("model")
proba = fitted.predict_proba(newcomer)[:, 1]
ood = fitted.source_distribution_.scores(newcomer)["connectivity"]  # one in twenty subjects of a typical site exceeds 1
flags = fitted.flags(newcomer)
for i in range(5):
    print(f"subject {i}: proba {proba[i]:.2f}, OOD score {ood[i]:.2f}, {'; '.join(flags[i]) or 'no flags'}")

print("The site as a whole:")
for line in fitted.source_distribution_.compare(newcomer):
    print(f"  {line}")
