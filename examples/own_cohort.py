"""Your own data: a table of participants and one array per subject, read, checked, and each site left out once."""

from pathlib import Path

import numpy as np

import m2lgdg
from m2lgdg.metrics import evaluate

# participants.tsv and one (time, roi) array per subject. Both are synthetic here, with a planted difference: in patients
# the first three ROIs are correlated.
lab = Path("my-lab")
lab.mkdir(exist_ok=True)
rng = np.random.default_rng(0)
rows = ["participant_id\tsite\tdiagnosis\tage\tsex"]
for number in range(60):
    site, patient = ("Oslo", "Rome", "Lima")[number % 3], number % 2 == 0
    series = rng.normal(size=(120, 20))
    series[:, :3] += (0.8 if patient else 0.0) * rng.normal(size=(120, 1))
    np.save(lab / f"sub-{number:03d}.npy", series)
    age, sex = rng.integers(20, 60), "MF"[number // 6 % 2]
    rows.append(f"sub-{number:03d}\t{site}\t{'patient' if patient else 'control'}\t{age}\t{sex}")
(lab / "participants.tsv").write_text("\n".join(rows) + "\n")

# The rest is the same for your own folder; docs/data.md lists what it can contain.
cohort = m2lgdg.read(lab)
check = m2lgdg.check_cohort(cohort)
print(check.sites.to_string())
for finding in check.findings:
    print(f"{finding.severity}: {finding.text}")

for fold in m2lgdg.leave_one_site_out(cohort):
    fitted = m2lgdg.make("fc-logistic").fit(fold.source)
    proba = fitted.predict_proba(fold.target)[:, 1]
    print(f"left out {fold.site}: AUC {evaluate(fold.target.labels, proba)['AUC']:.2f}")
